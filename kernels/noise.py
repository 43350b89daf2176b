"""Counter-based noise of the samplers: the same Gumbel variable for (seed, position, token id).

This is the definition; the CPU sampler calls it and the Triton sampler repeats it. The integer
part is exact: numpy, torch and Triton agree to the bit, on every machine. All integer operations
are modulo 2^64 (keys) or 2^32 (bits), shifts are logical:

    mix64(z)  = z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9
                z ^= z >> 27;  z *= 0x94D049BB133111EB
                z ^ (z >> 31)                                  (SplitMix64's finaliser)
    fmix32(h) = h ^= h >> 16;  h *= 0x85EBCA6B
                h ^= h >> 13;  h *= 0xC2B2AE35
                h ^ (h >> 16)                                  (MurmurHash3's finaliser)

    G      = 0x9E3779B97F4A7C15
    z      = mix64(mix64(seed + G) + (position + 1) * G)
    key0   = z mod 2^32,  key1 = z >> 32
    h      = fmix32(fmix32(token * 0x9E3779B1 + key0) ^ key1)
    v      = min((float32(h) + 0.5) * 2^-32, 1 - 2^-24)        (float32, round to nearest even)
    E      = -log1p(-v)                                        (standard exponential)
    gumbel = -log(E)

The positions of a seed are a SplitMix64 stream whose start is itself mixed, so that neighbouring
seeds share nothing. The choice of token is argmax(logit / temperature + gumbel) over the allowed
tokens, ties to the lowest id: the token then has the softmax's distribution (Gumbel-max trick;
Maddison et al. 2014, "A* Sampling", section 2).

Why -log1p(-v) and not -log(v), which has the same distribution: the winner of an argmax has a
large Gumbel, that is a small E. Here that is v near 0, where float32 has all its resolution, and
the 2^32 values of h stay distinct; -log(v) would need v near 1, where float32 knows only 2^24
values, and ties would decide. Where v rounds to 1 (E would be infinite) it is clamped to the
largest float32 below 1; such a token has gumbel = -2.8, its lowest. The highest is +22.9.

The float part is as exact as the logarithms of the platform (a few units in the last place).
"""

from typing import Any, TypeVar

import numpy as np
import torch

Array = TypeVar("Array", np.ndarray, torch.Tensor)

_GOLDEN64 = 0x9E3779B97F4A7C15
_GOLDEN32 = 0x9E3779B1


def _signed(value: int, bits: int) -> int:
    """The two's complement reading of an unsigned constant."""
    return value - (1 << bits) if value >> (bits - 1) else value


def _shift(x: Array, by: int, bits: int) -> Array:
    """Logical right shift of two's complement integers."""
    result: Array = (x >> by) & ((1 << (bits - by)) - 1)
    return result


def _mix64(z: Array) -> Array:
    z = (z ^ _shift(z, 30, 64)) * _signed(0xBF58476D1CE4E5B9, 64)
    z = (z ^ _shift(z, 27, 64)) * _signed(0x94D049BB133111EB, 64)
    result: Array = z ^ _shift(z, 31, 64)
    return result


def _fmix32(h: Array) -> Array:
    h = (h ^ _shift(h, 16, 32)) * _signed(0x85EBCA6B, 32)
    h = (h ^ _shift(h, 13, 32)) * _signed(0xC2B2AE35, 32)
    result: Array = h ^ _shift(h, 16, 32)
    return result


def noise_keys(seed: Array, position: Array) -> Array:
    """The two keys of each (seed, position): int32 `[..., 2]`, bit patterns of 32-bit words.

    seed, position: int64 `[...]`, numpy or torch, any value; they broadcast.
    """
    golden = _signed(_GOLDEN64, 64)
    with np.errstate(over="ignore"):
        z = _mix64(_mix64(seed + golden) + (position + 1) * golden)
    result: Array = _split(z)
    return result


def noise_bits(keys: Array, token_ids: Array) -> Array:
    """The random word `h` of each token: int32 `[..., n]`, bit patterns of 32-bit words.

    keys: int32 `[..., 2]` from `noise_keys`. token_ids: int32 `[..., n]`; they broadcast.
    """
    with np.errstate(over="ignore"):
        mixed = _fmix32(token_ids * _signed(_GOLDEN32, 32) + keys[..., :1])
        return _fmix32(mixed ^ keys[..., 1:])


def gumbel_reference(keys: Array, token_ids: Array) -> Array:
    """The Gumbel variable of each token: float32 `[..., n]`, within [-2.9, 22.9].

    keys: int32 `[..., 2]` from `noise_keys`. token_ids: int32 `[..., n]` (or `[n]`, the same
    tokens for each key); only the tokens that may be chosen need to be given.
    """
    result: Array = _gumbel(noise_bits(keys, token_ids))
    return result


def _split(z: Any) -> Any:
    """int64 `[...]` -> int32 `[..., 2]`: low word, high word, whatever the byte order."""
    low, high = z & 0xFFFFFFFF, _shift(z, 32, 64)
    if isinstance(z, torch.Tensor):
        words = torch.stack((low, high), dim=-1)
        return torch.where(words >> 31 != 0, words - (1 << 32), words).to(torch.int32)
    return np.stack((low, high), axis=-1).astype(np.uint32).view(np.int32)


def _gumbel(bits: Any) -> Any:
    """int32 words -> float32 noise: v, E and gumbel of the definition."""
    below_one = 1.0 - 2.0**-24
    if isinstance(bits, torch.Tensor):
        unsigned = (bits.to(torch.int64) & 0xFFFFFFFF).to(torch.float32)
        uniform = ((unsigned + 0.5) * 2.0**-32).clamp_(max=below_one)
        return -torch.log(-torch.log1p(-uniform))
    v = (bits.view(np.uint32).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return -np.log(-np.log1p(-np.minimum(v, np.float32(below_one))))
