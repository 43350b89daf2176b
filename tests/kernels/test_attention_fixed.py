"""Attention with `fixed_tuning`: a token's result is the same bits in any batch and any chunk."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from hillstar.kernels.attention import paged_attention, paged_attention_reference
from hillstar.kernels.attention_tuning import Tiling, Tuning, fixed_tuning

HEADS, KV_HEADS, DIM, BLOCK = 3, 1, 32, 16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
SMALL = Tuning(Tiling(16, 16, 4, 2), Tiling(16, 16, 4, 2), split_tokens=32)


class Sequences:
    """Sequences whose queries, keys and values at each position are given."""

    def __init__(self, lengths: list[int], dtype: torch.dtype, generator: torch.Generator) -> None:
        self._device = generator.device
        counts = [-(-length // BLOCK) for length in lengths]

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=self._device, generator=generator).to(dtype)

        self._kv = draw(sum(counts), 2, KV_HEADS, BLOCK, DIM)
        self._queries = [draw(length, HEADS, DIM) for length in lengths]
        blocks = torch.randperm(sum(counts), device=self._device, generator=generator)
        self._tables = list(blocks.int().split(counts))

    def step(
        self, chunks: list[tuple[int, int, int]], tuning: Tuning, window: int = 0, slack: int = 0
    ) -> list[torch.Tensor]:
        """The results of chunks (sequence, start, end), computed in one call.

        slack: by how much the bound of the contexts exceeds them.
        """
        longest = max(end for _, _, end in chunks) + slack
        tables = torch.zeros(len(chunks), -(-longest // BLOCK), dtype=torch.int32)
        tables = tables.to(self._device)
        for row, (sequence, _, end) in enumerate(chunks):
            used = -(-end // BLOCK)
            tables[row, :used] = self._tables[sequence][:used]
        counts = [end - start for _, start, end in chunks]
        starts = torch.tensor([0, *counts]).cumsum(0)
        arguments: dict[str, Any] = {
            "q": torch.cat([self._queries[i][start:end] for i, start, end in chunks]),
            "kv": self._kv,
            "block_tables": tables,
            "cu_seqlens_q": starts.int().to(self._device),
            "context_lens": torch.tensor([end for _, _, end in chunks]).int().to(self._device),
            "scale": DIM**-0.5,
            "max_q_len": max(counts),
            "max_context_len": longest,
            "window": window,
            "tuning": tuning,
        }
        out = paged_attention(**arguments)
        tolerance = TOLERANCE[out.dtype]
        wanted = paged_attention_reference(**arguments)
        torch.testing.assert_close(out, wanted, atol=tolerance, rtol=tolerance)
        return list(out.split(counts))


@DTYPES
@pytest.mark.parametrize("window", [0, 20])
def test_neither_chunks_nor_company_change_a_bit(
    generator: torch.Generator, dtype: torch.dtype, window: int
) -> None:
    """Prefilled whole, in chunks at any offset, token by token, beside longer and shorter rows."""
    sequences = Sequences([40, 70], dtype, generator)
    [whole] = sequences.step([(0, 0, 40)], SMALL, window)
    for start, end in pairwise([0, 1, 23, 32, 39, 40]):
        [chunk] = sequences.step([(0, start, end)], SMALL, window)
        assert torch.equal(chunk, whole[start:end])
    company = [(1, 60, 70), (0, 39, 40), (1, 0, 3), (0, 30, 33), (1, 69, 70)]
    found = sequences.step(company, SMALL, window, slack=50)
    assert torch.equal(found[1], whole[39:40])
    assert torch.equal(found[3], whole[30:33])


@DTYPES
def test_the_chosen_tuning_does_so(generator: torch.Generator, dtype: torch.dtype) -> None:
    """The same with the tiling that engines use, in splits that are shorter than theirs."""
    tuning = fixed_tuning(HEADS // KV_HEADS, DIM, dtype.itemsize)
    assert tuning.short == tuning.long
    assert tuning.split_tokens is not None and tuning.split_tokens % tuning.long.block_n == 0
    tuning = replace(tuning, split_tokens=64)
    sequences = Sequences([80, 20], dtype, generator)
    [chunk] = sequences.step([(0, 50, 80)], tuning)
    for position in (50, 64, 79):
        alone, _ = sequences.step([(0, position, position + 1), (1, 0, 20)], tuning)
        assert torch.equal(alone[0], chunk[position - 50])
