"""Attention over the paged cache on a CPU: gather the blocks of a few rows, then one fused call.

Rows that decode (one token) are batched: rows of similar context are gathered side by side, the
query heads of a KV head folded into the query length, and padded keys masked. Rows that prefill
go one by one, in pieces of queries. Both read keys and values through torch's flash attention,
which never materialises scores. `kernels/paged_attention.py` is the GPU's counterpart.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from hillstar.engine.kv.cache import KVCache
from hillstar.engine.plan import Batch

_MAX_GROUP_BYTES = 2 << 20
"""Keys and values gathered for one call; beyond the L2 cache, gather and read cost twice
(bench/cpu_engine.py on a Sapphire Rapids core, 2026-11-29)."""

_PIECE = 512  # queries a call while prefilling at an offset: bounds the work on masked keys

Mix = Callable[[int, torch.Tensor, torch.Tensor], None]
"""`mix(layer, qkv, out)`: attention of some of the batch's tokens, written to `out`."""


class PagedAttention:
    """The attention of one step, for all layers: what they share is prepared here once.

    The cache is read as rows of one block and one head, `[-1, block_size * head_dim]`, and
    written as rows of one token and one head, `[-1, head_dim]`; rows of layer i lie
    i * 2 * num_kv_heads further than those of layer 0, so that indices are made once a step.
    """

    def __init__(
        self, batch: Batch, cache: KVCache, num_heads: int, sliding_window: int | None
    ) -> None:
        self._layout = layout = _Layout.of(cache, num_heads)
        self._token_rows = cache.pool.view(-1, layout.head_dim)
        blocks, offsets = np.divmod(batch.slot_mapping, layout.block_size)
        first = blocks * (layout.block_stride * layout.block_size) + offsets
        heads = np.arange(2 * layout.num_kv_heads) * layout.block_size
        self._store_index = torch.from_numpy(first[:, None] + heads)
        self._mixes = _plan(batch, cache, layout, sliding_window)

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Store the keys and values of `qkv`, then attend: `[T, num_heads * head_dim]`.

        qkv: `[T, num_heads + 2 * num_kv_heads, head_dim]`, queries and keys rotated.
        """
        layout = self._layout
        rows = self._token_rows[layer * 2 * layout.num_kv_heads * layout.block_size :]
        rows.index_put_((self._store_index,), qkv[:, layout.num_heads :])
        out = qkv.new_empty(len(qkv), layout.num_heads * layout.head_dim)
        for mix in self._mixes:
            mix(layer, qkv, out)
        return out


@dataclass(frozen=True, slots=True)
class _Layout:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    block_stride: int  # rows of (block, head) from one block to the next

    @staticmethod
    def of(cache: KVCache, num_heads: int) -> "_Layout":
        _, num_layers, _, num_kv_heads, block_size, head_dim = cache.pool.shape
        return _Layout(num_heads, num_kv_heads, head_dim, block_size, num_layers * 2 * num_kv_heads)

    @property
    def grouped(self) -> tuple[int, int, int]:
        """The shape of a token's queries with those that share a KV head together."""
        return self.num_kv_heads, self.num_heads // self.num_kv_heads, self.head_dim


def _plan(batch: Batch, cache: KVCache, layout: _Layout, sliding_window: int | None) -> list[Mix]:
    """Split the batch's rows into calls."""
    counts = np.diff(batch.cu_seqlens_q)
    starts = batch.context_lens - counts
    window = sliding_window or int(batch.context_lens.max()) + 1
    first_blocks = np.maximum(starts - window + 1, 0) // layout.block_size
    mixes: list[Mix] = [
        _Prefill(batch, int(row), int(first_blocks[row]), window, cache, layout)
        for row in np.flatnonzero(counts > 1)
    ]
    ends = -(-batch.context_lens // layout.block_size)
    sizes = ends - first_blocks
    for rows in _groups(np.flatnonzero(counts == 1), sizes, cache, layout):
        mixes.append(_Decode(batch, rows, first_blocks[rows], sizes[rows], window, cache, layout))
    return mixes


def _groups(
    rows: np.ndarray, sizes: np.ndarray, cache: KVCache, layout: _Layout
) -> list[np.ndarray]:
    """Rows of similar size together, each group padded within `_MAX_GROUP_BYTES`."""
    block_bytes = 2 * layout.num_kv_heads * layout.block_size * layout.head_dim
    most_blocks = _MAX_GROUP_BYTES // (block_bytes * cache.pool.element_size())
    by_size = rows[np.argsort(-sizes[rows], kind="stable")]
    groups: list[np.ndarray] = []
    begin = 0
    while begin < len(by_size):
        width = int(sizes[by_size[begin]])
        fitting = by_size[begin : begin + max(1, most_blocks // width)]
        # Past half the width, padding would cost more than another call.
        group = fitting[2 * sizes[fitting] >= width]
        groups.append(np.sort(group))
        begin += len(group)
    return groups


def _block_rows(tables: np.ndarray, layout: _Layout) -> torch.Tensor:
    """Rows of (block, head) of layer 0: `[2, R, num_kv_heads, num_blocks]`, flat.

    tables: `[R, num_blocks]`.
    """
    heads = np.arange(2 * layout.num_kv_heads).reshape(2, 1, layout.num_kv_heads, 1)
    rows = tables[None, :, None, :].astype(np.int64) * layout.block_stride + heads
    return torch.from_numpy(rows.reshape(-1))


class _Gather:
    """Keys and values of some rows' blocks, laid out side by side."""

    def __init__(self, tables: np.ndarray, cache: KVCache, layout: _Layout) -> None:
        self._block_rows = cache.pool.view(-1, layout.block_size * layout.head_dim)
        self._index = _block_rows(tables, layout)
        self._heads = 2 * layout.num_kv_heads
        num_rows, num_blocks = tables.shape
        shape = (2, num_rows, layout.num_kv_heads, num_blocks * layout.block_size, layout.head_dim)
        self._out = cache.pool.new_empty(len(self._index), self._block_rows.shape[1])
        self._keys, self._values = self._out.view(shape).unbind(0)

    def __call__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both `[R, num_kv_heads, num_blocks * block_size, head_dim]`, until the next call."""
        rows = self._block_rows[layer * self._heads :]
        torch.index_select(rows, 0, self._index, out=self._out)
        return self._keys, self._values


class _Decode:
    """Rows that feed one token each, attended in one call."""

    def __init__(
        self,
        batch: Batch,
        rows: np.ndarray,
        first_blocks: np.ndarray,
        sizes: np.ndarray,
        window: int,
        cache: KVCache,
        layout: _Layout,
    ) -> None:
        self._layout = layout
        tokens = batch.cu_seqlens_q[rows].astype(np.int64)
        is_all = len(tokens) == len(batch.token_ids)
        self._tokens = None if is_all else torch.from_numpy(tokens)
        # A short row's padding repeats its own last block, so no row reads another's memory.
        columns = np.minimum(np.arange(sizes.max()), sizes[:, None] - 1) + first_blocks[:, None]
        self._gather = _Gather(batch.block_tables[rows[:, None], columns], cache, layout)
        ends = batch.context_lens[rows] - first_blocks * layout.block_size
        begins = np.maximum(ends - window, 0)
        self._mask: torch.Tensor | None = None
        self._keys = slice(int(begins[0]), int(ends[0]))
        if len(rows) > 1:
            self._keys = slice(None)
            keys = np.arange(int(sizes.max()) * layout.block_size)
            hidden = (keys < begins[:, None]) | (keys >= ends[:, None])
            mask = cache.pool.new_zeros(hidden.shape)
            mask.masked_fill_(torch.from_numpy(hidden), -torch.inf)
            self._mask = mask[:, None, None]

    def __call__(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        layout = self._layout
        keys, values = self._gather(layer)
        queries = qkv if self._tokens is None else qkv.index_select(0, self._tokens)
        attended = F.scaled_dot_product_attention(
            queries[:, : layout.num_heads].view(-1, *layout.grouped),
            keys[:, :, self._keys],
            values[:, :, self._keys],
            attn_mask=self._mask,
        ).flatten(1)
        if self._tokens is None:
            out.copy_(attended)
        else:
            out.index_copy_(0, self._tokens, attended)


class _Prefill:
    """A row that feeds several tokens; they see what came before and themselves, causally."""

    def __init__(
        self,
        batch: Batch,
        row: int,
        first_block: int,
        window: int,
        cache: KVCache,
        layout: _Layout,
    ) -> None:
        self._layout = layout
        self._begin, self._end = (int(i) for i in batch.cu_seqlens_q[row : row + 2])
        self._context = context = int(batch.context_lens[row])
        self._start = context - (self._end - self._begin)
        self._window = window
        self._first_key = first_block * layout.block_size
        self._is_whole = self._start == 0 and context <= window
        if not self._is_whole:
            table = batch.block_tables[
                row : row + 1, first_block : -(-context // layout.block_size)
            ]
            self._gather = _Gather(table, cache, layout)
            # Visible distances to the last key of a piece: [0, window), as keys count up.
            self._visible = cache.pool.new_full((context + _PIECE,), -torch.inf)
            self._visible[max(0, context - window) : context] = 0

    def __call__(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        layout = self._layout
        tokens = qkv[self._begin : self._end]
        queries = tokens[:, : layout.num_heads].view(-1, *layout.grouped).permute(1, 2, 0, 3)
        target = out[self._begin : self._end].view(-1, *layout.grouped).permute(1, 2, 0, 3)
        if self._is_whole:
            keys, values = tokens[:, layout.num_heads :].permute(1, 0, 2).chunk(2)
            target.copy_(_attend(queries, keys, values, is_causal=True))
            return
        keys, values = (x[0] for x in self._gather(layer))
        for begin in range(0, queries.shape[2], _PIECE):
            piece = slice(begin, begin + _PIECE)
            target[:, :, piece] = self._piece(queries[:, :, piece], begin, keys, values)

    def _piece(
        self, queries: torch.Tensor, begin: int, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Queries from `begin` on against the keys that any of them sees.

        With the queries in reverse, "key j is visible to query i" depends on i + j alone, so the
        mask is a view with strides (1, 1) of one vector instead of a matrix.
        """
        num_queries = queries.shape[2]
        position = self._start + begin
        end = position + num_queries
        first = max(position - self._window + 1, self._first_key)
        used = slice(first - self._first_key, end - self._first_key)
        mask = self._visible[self._context - end + first :].as_strided(
            (num_queries, end - first), (1, 1)
        )
        return _attend(queries.flip(2), keys[:, used], values[:, used], mask=mask).flip(2)


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """`[num_kv_heads, group, num_queries, head_dim]`; keys and values lack the group's axis."""
    shape = (-1, queries.shape[1], -1, -1)
    return F.scaled_dot_product_attention(
        queries,
        keys.unsqueeze(1).expand(shape),
        values.unsqueeze(1).expand(shape),
        attn_mask=mask,
        is_causal=is_causal,
    )
