"""The noise definition: numpy and torch against plain Python integers."""

import math

import numpy as np
import pytest
import torch

from hillstar.kernels.noise import gumbel_reference, noise_bits, noise_keys

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1


def mix64(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK64
    return z ^ (z >> 31)


def fmix32(h: int) -> int:
    h = (h ^ (h >> 16)) * 0x85EBCA6B & MASK32
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & MASK32
    return h ^ (h >> 16)


def word(seed: int, position: int, token: int) -> int:
    golden = 0x9E3779B97F4A7C15
    z = mix64((mix64((seed + golden) & MASK64) + (position + 1) * golden) & MASK64)
    return fmix32(fmix32((token * 0x9E3779B1 + (z & MASK32)) & MASK32) ^ (z >> 32))


SEEDS = [0, 1, -1, 42, (1 << 63) - 1, -(1 << 63)]
POSITIONS = [0, 1, 2, 77, 131071, (1 << 40) + 3]
TOKENS = [0, 1, 2, 49151, 128255, (1 << 31) - 1]


def test_words_are_those_of_the_definition() -> None:
    """numpy and torch give the words that arbitrary-precision integers give."""
    wanted = [
        [word(s & MASK64, p, t) for t in TOKENS] for s, p in zip(SEEDS, POSITIONS, strict=True)
    ]
    seeds, positions = np.array(SEEDS, np.int64), np.array(POSITIONS, np.int64)
    tokens = np.array(TOKENS, np.int32)
    by_numpy = noise_bits(noise_keys(seeds, positions), tokens)
    by_torch = noise_bits(
        noise_keys(torch.from_numpy(seeds), torch.from_numpy(positions)), torch.from_numpy(tokens)
    )
    assert by_numpy.view(np.uint32).tolist() == wanted
    assert by_torch.numpy().view(np.uint32).tolist() == wanted


def test_one_row_works_without_a_batch_dimension() -> None:
    """A scalar seed and position give the keys that a batch of one gives, without a warning."""
    keys = noise_keys(np.asarray((1 << 63) - 1), np.asarray(5))
    batch = noise_keys(np.array([(1 << 63) - 1]), np.array([5]))
    assert keys.tolist() == batch[0].tolist()


def test_numpy_and_torch_noise_agree() -> None:
    """The float part of numpy and of torch differs by rounding only."""
    keys = noise_keys(np.arange(4, dtype=np.int64), np.arange(4, dtype=np.int64))
    tokens = np.arange(4096, dtype=np.int32)
    by_torch = gumbel_reference(torch.from_numpy(keys), torch.from_numpy(tokens))
    np.testing.assert_allclose(gumbel_reference(keys, tokens), by_torch.numpy(), atol=2e-6)


@pytest.mark.parametrize(("h", "wanted"), [(0, 22.874), (MASK32, -2.812)])
def test_extreme_words_give_finite_noise(h: int, wanted: float) -> None:
    """The smallest and the largest word give the ends of the documented range, never infinity."""
    token = 0
    # fmix32 is a bijection: search key1 backwards from the wanted word by inverting it.
    inverse = pow(0x85EBCA6B, -1, 1 << 32), pow(0xC2B2AE35, -1, 1 << 32)
    x = h
    x = (x ^ (x >> 16)) * inverse[1] & MASK32
    x ^= (x >> 13) ^ (x >> 26)
    x = x * inverse[0] & MASK32
    x = x ^ (x >> 16)
    keys = np.array([0, x ^ fmix32(token)], np.uint32).view(np.int32)
    tokens = np.array([token], np.int32)
    assert noise_bits(keys, tokens).view(np.uint32).tolist() == [h]
    assert gumbel_reference(keys, tokens)[0] == pytest.approx(wanted, abs=2e-3)


def test_noise_is_gumbel_distributed() -> None:
    """Mean, variance and the tail of 2^20 draws are those of the standard Gumbel distribution."""
    keys = noise_keys(np.arange(1024, dtype=np.int64), np.zeros(1024, dtype=np.int64))
    draws = gumbel_reference(keys, np.arange(1024, dtype=np.int32)).astype(np.float64)
    error = math.sqrt(math.pi**2 / 6 / draws.size)
    assert abs(draws.mean() - np.euler_gamma) < 4 * error
    assert draws.var() == pytest.approx(math.pi**2 / 6, rel=0.01)
    above = float((draws > 5.0).mean())
    assert above == pytest.approx(1 - math.exp(-math.exp(-5.0)), rel=0.05)


def test_neighbouring_seeds_and_positions_are_unrelated() -> None:
    """Draws of adjacent seeds, positions and tokens show no correlation."""
    grid = np.arange(64, dtype=np.int64)
    keys = noise_keys(grid[:, None], grid[None, :])
    draws = gumbel_reference(keys, np.arange(256, dtype=np.int32)).astype(np.float64)
    draws = (draws - draws.mean()) / draws.std()
    limit = 5 / math.sqrt(draws.size)
    for axis in range(3):
        shifted = np.roll(draws, 1, axis=axis)
        assert abs(float((draws * shifted).mean())) < limit
