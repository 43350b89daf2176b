"""Attention on a CPU where a token's result must not depend on what is computed beside it.

torch's fused attention sums over tiles of 512 keys and multiplies as many queries at once as it is
given. So every query is a batch of its own, its keys begin at a multiple of 512 and are padded to
one: then the same calls on the same numbers give its result alone, in a batch and in any chunk of a
prompt. Keys beyond what a query sees weigh nothing, and sums with nothing are exact.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from hillstar.engine.kv.cache import KVCache
from hillstar.engine.plan import Batch

_TILE = 512


class FixedAttention:
    """Attention over one cache, read and written as in `engine.attention`."""

    def __init__(self, cache: KVCache, num_heads: int, sliding_window: int | None) -> None:
        self._pool = cache.pool  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
        self._num_heads = num_heads
        self._window = sliding_window or 1 << 30

    def step(self, batch: Batch) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """Prepare what the layers of one step share; call it with a layer and its `qkv`."""
        block_size = self._pool.shape[4]
        blocks, offsets = (
            torch.from_numpy(x) for x in np.divmod(batch.slot_mapping.astype(np.int64), block_size)
        )
        rows = [self._row(batch, row) for row in range(len(batch.rows))]
        num_heads = self._num_heads

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            pool = self._pool[:, layer]
            num_tokens, _, head_dim = qkv.shape
            stored = qkv[:, num_heads:].view(num_tokens, 2, -1, head_dim)
            pool[blocks, :, :, offsets] = stored
            out = qkv.new_empty(num_tokens, num_heads * head_dim)
            for row in rows:
                out[row.tokens] = row.attend(pool, qkv[row.tokens, :num_heads])
            return out

        return attend

    def _row(self, batch: Batch, row: int) -> "_Row":
        block_size = self._pool.shape[4]
        begin, end = (int(i) for i in batch.cu_seqlens_q[row : row + 2])
        context = int(batch.context_lens[row])
        positions = np.arange(context - (end - begin), context)
        first = max(0, int(positions[0]) - self._window + 1) // _TILE * _TILE
        num_keys = -(-(context - first) // _TILE) * _TILE
        used = batch.block_tables[row, first // block_size : -(-context // block_size)]
        # What lies past the context repeats the last block: finite, and nobody looks at it.
        table = np.full(num_keys // block_size, used[-1], dtype=np.int64)
        table[: len(used)] = used
        distances = positions[:, None] - np.arange(first, first + num_keys)
        hidden = torch.from_numpy((distances < 0) | (distances >= self._window))
        mask = torch.zeros(hidden.shape, dtype=self._pool.dtype)
        mask.masked_fill_(hidden, -torch.inf)
        return _Row(slice(begin, end), torch.from_numpy(table), mask[:, None, None])


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """A sequence's share of a step."""

    tokens: slice
    table: torch.Tensor  # int64 [num_keys / block_size]
    mask: torch.Tensor  # [num_queries, 1, 1, num_keys]

    def attend(self, pool: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """pool: of the layer; queries: `[num_queries, num_heads, head_dim]`."""
        num_queries, _, head_dim = queries.shape
        # [blocks, 2, KV heads, block_size, dim] -> 2 x [KV heads, keys, dim]
        gathered = pool[self.table].permute(1, 2, 0, 3, 4)
        keys, values = gathered.reshape(2, gathered.shape[1], -1, head_dim)
        return F.scaled_dot_product_attention(
            queries.reshape(num_queries, len(keys), -1, head_dim),
            keys.expand(num_queries, -1, -1, -1),
            values.expand(num_queries, -1, -1, -1),
            attn_mask=self.mask,
        ).flatten(1)
