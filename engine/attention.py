"""Attention over the paged cache on a CPU: gather the blocks of a few rows, then one fused call.

Rows that decode (one token, or a few with drafts) are batched: rows of similar context are gathered
side by side, the query heads of a KV head folded into the query length, and padded keys masked.
Rows that prefill go one by one, in pieces of queries. Both read keys and values through torch's
flash attention, which never materialises scores. `kernels/attention.py` is the GPU's counterpart.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from hillstar.engine.kv.cache import KVCache
from hillstar.engine.plan import Batch

_MAX_GROUP_BYTES = 2 << 20
"""Keys and values gathered for one call: about one core's L2 cache. Between 1 and 4 MiB no size
was best at every batch and context on the shared machine it was tried on (2026-11-29)."""

_MAX_SHORT = 16  # tokens of a row that is attended beside others: a decoder's, drafts included

_PIECE = 512  # queries a call while prefilling at an offset: bounds the work on masked keys


class PagedAttention:
    """Attention over one cache. The cache is read as rows of one block and one head, and written
    as rows of one token and one head; each layer has its view, so that the same indices serve
    all layers of a step.
    """

    def __init__(self, cache: KVCache, num_heads: int, sliding_window: int | None) -> None:
        _, num_layers, _, num_kv_heads, block_size, head_dim = cache.pool.shape
        self._layout = _Layout(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            block_stride=num_layers * 2 * num_kv_heads,
            dtype=cache.pool.dtype,
            window=sliding_window or 1 << 30,
        )
        blocks = cache.pool.view(-1, block_size * head_dim)
        tokens = cache.pool.view(-1, head_dim)
        firsts = range(0, num_layers * 2 * num_kv_heads, 2 * num_kv_heads)
        self._block_rows = tuple(blocks[first:] for first in firsts)
        self._token_rows = tuple(tokens[first * block_size :] for first in firsts)

    def step(self, batch: Batch) -> "StepAttention":
        """Prepare what the layers of one step share: indices, masks, buffers."""
        return StepAttention(batch, self._layout, self._block_rows, self._token_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    block_stride: int  # rows of (block, head) from one block to the next
    dtype: torch.dtype
    window: int  # tokens that a token sees, itself included

    @property
    def grouped(self) -> tuple[int, int, int]:
        """The shape of a token's queries with those that share a KV head together."""
        return self.num_kv_heads, self.num_heads // self.num_kv_heads, self.head_dim


class _Mix(Protocol):
    """The attention of some of the batch's tokens."""

    tokens: slice | torch.Tensor  # which ones

    def __call__(self, block_rows: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        """qkv: of these tokens. Returns `[n, num_heads * head_dim]`."""
        ...


class StepAttention:
    """The attention of one step, for each layer in turn."""

    def __init__(
        self,
        batch: Batch,
        layout: _Layout,
        block_rows: tuple[torch.Tensor, ...],
        token_rows: tuple[torch.Tensor, ...],
    ) -> None:
        self._num_heads = layout.num_heads
        self._block_rows = block_rows
        self._token_rows = token_rows
        blocks, offsets = np.divmod(batch.slot_mapping, layout.block_size)
        first = blocks * (layout.block_stride * layout.block_size) + offsets
        heads = np.arange(2 * layout.num_kv_heads) * layout.block_size
        self._stored = torch.from_numpy((first[:, None] + heads).reshape(-1))
        self._mixes = _split(batch, layout)

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Store the keys and values of `qkv`, then attend: `[T, num_heads * head_dim]`.

        qkv: `[T, num_heads + 2 * num_kv_heads, head_dim]`, queries and keys rotated.
        """
        keys_values = qkv[:, self._num_heads :].reshape(len(self._stored), -1)
        self._token_rows[layer].index_copy_(0, self._stored, keys_values)
        block_rows = self._block_rows[layer]
        if len(self._mixes) == 1:
            return self._mixes[0](block_rows, qkv)
        out = qkv.new_empty(len(qkv), self._num_heads * qkv.shape[2])
        for mix in self._mixes:
            out[mix.tokens] = mix(block_rows, qkv[mix.tokens])
        return out


def _split(batch: Batch, layout: _Layout) -> list[_Mix]:
    """Share the batch's tokens out to calls."""
    counts = np.diff(batch.cu_seqlens_q)
    starts = batch.context_lens - counts
    first_blocks = np.maximum(starts - layout.window + 1, 0) // layout.block_size
    sizes = -(-batch.context_lens // layout.block_size) - first_blocks
    is_short = counts <= _MAX_SHORT
    mixes: list[_Mix] = [
        _Prefill(batch, int(row), int(first_blocks[row]), layout)
        for row in np.flatnonzero(~is_short)
    ]
    for count in np.unique(counts[is_short]):
        for rows in _groups(np.flatnonzero(counts == count), sizes, layout):
            mixes.append(_Decode(batch, rows, first_blocks[rows], sizes[rows], layout))
    return mixes


def _groups(rows: np.ndarray, sizes: np.ndarray, layout: _Layout) -> list[np.ndarray]:
    """Rows of similar size together, each group padded within `_MAX_GROUP_BYTES`."""
    block_bytes = 2 * layout.num_kv_heads * layout.block_size * layout.head_dim
    most_blocks = _MAX_GROUP_BYTES // (block_bytes * layout.dtype.itemsize)
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

    def __init__(self, tables: np.ndarray, layout: _Layout) -> None:
        self._index = _block_rows(tables, layout)
        num_rows, num_blocks = tables.shape
        num_keys = num_blocks * layout.block_size
        row_elems = layout.block_size * layout.head_dim
        self._out = torch.empty(len(self._index), row_elems, dtype=layout.dtype)
        shape = (2, num_rows, layout.num_kv_heads, num_keys, layout.head_dim)
        self._keys, self._values = self._out.view(shape).unbind(0)

    def __call__(self, block_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both `[R, num_kv_heads, num_blocks * block_size, head_dim]`, until the next call."""
        torch.index_select(block_rows, 0, self._index, out=self._out)
        return self._keys, self._values


class _Decode:
    """Rows that feed as many tokens each, one or a few, attended in one call."""

    def __init__(
        self,
        batch: Batch,
        rows: np.ndarray,
        first_blocks: np.ndarray,
        sizes: np.ndarray,
        layout: _Layout,
    ) -> None:
        self._layout = layout
        begins = batch.cu_seqlens_q[rows].astype(np.int64)
        self._count = count = int(batch.cu_seqlens_q[rows[0] + 1] - begins[0])
        self.tokens: slice | torch.Tensor = torch.from_numpy(
            (begins[:, None] + np.arange(count)).reshape(-1)
        )
        # A short row's padding repeats its own last block, so no row reads another's memory.
        columns = np.minimum(np.arange(sizes.max()), sizes[:, None] - 1) + first_blocks[:, None]
        self._gather = _Gather(batch.block_tables[rows[:, None], columns], layout)
        # What each token sees, `[R, count]`: it is the last one, and the window ends before it.
        seen = batch.context_lens[rows, None] - np.arange(count)[::-1]
        ends = seen - first_blocks[:, None] * layout.block_size
        starts = np.maximum(ends - layout.window, 0)
        if ends.size == 1:
            self._seen = slice(int(starts[0, 0]), int(ends[0, 0]))
            self._mask = None
        else:
            self._seen = slice(None)
            num_keys = int(sizes.max()) * layout.block_size
            self._mask = _mask(starts, ends, num_keys, layout)

    def __call__(self, block_rows: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        layout, count = self._layout, self._count
        keys, values = self._gather(block_rows)
        queries = qkv[:, : layout.num_heads].view(-1, count, *layout.grouped)
        if count == 1:
            queries = queries[:, 0]
        else:  # tokens and the heads of a group together are the queries of a KV head
            queries = queries.transpose(1, 2).flatten(2, 3)
        attended = F.scaled_dot_product_attention(
            queries, keys[:, :, self._seen], values[:, :, self._seen], attn_mask=self._mask
        )
        if count > 1:
            num_rows, num_kv_heads, _, head_dim = attended.shape
            attended = attended.view(num_rows, num_kv_heads, count, -1, head_dim)
            attended = attended.transpose(1, 2).flatten(0, 1)
        return attended.flatten(1)


def _mask(starts: np.ndarray, ends: np.ndarray, num_keys: int, layout: _Layout) -> torch.Tensor:
    """`[R, 1, 1 or count * group, num_keys]`: 0 for keys from start up to end, minus infinity for
    the others. starts, ends: `[R, count]`."""
    keys = np.arange(num_keys)
    hidden = torch.from_numpy((keys < starts[..., None]) | (keys >= ends[..., None]))
    mask = torch.zeros(hidden.shape, dtype=layout.dtype).masked_fill_(hidden, -torch.inf)
    if mask.shape[1] > 1:
        mask = mask.repeat_interleave(layout.grouped[1], dim=1)
    return mask[:, None]


class _Prefill:
    """A row that feeds several tokens; they see what came before and themselves, causally."""

    def __init__(self, batch: Batch, row: int, first_block: int, layout: _Layout) -> None:
        self._layout = layout
        begin, end = (int(i) for i in batch.cu_seqlens_q[row : row + 2])
        self.tokens: slice | torch.Tensor = slice(begin, end)
        self._context = context = int(batch.context_lens[row])
        self._start = context - (end - begin)
        self._first_key = first_block * layout.block_size
        self._is_whole = self._start == 0 and context <= layout.window
        if not self._is_whole:
            last_block = -(-context // layout.block_size)
            self._gather = _Gather(batch.block_tables[row, None, first_block:last_block], layout)
            # Visible distances to the last key of a piece: [0, window), as keys count up.
            self._visible = torch.full((context + _PIECE,), -torch.inf, dtype=layout.dtype)
            self._visible[max(0, context - layout.window) : context] = 0

    def __call__(self, block_rows: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        num_heads, grouped = self._layout.num_heads, self._layout.grouped
        queries = qkv[:, :num_heads].view(-1, *grouped).permute(1, 2, 0, 3)
        if self._is_whole:
            keys, values = qkv[:, num_heads:].permute(1, 0, 2).chunk(2)
            attended = _attend(queries, keys, values, is_causal=True)
        else:
            keys, values = (x[0] for x in self._gather(block_rows))
            pieces = [
                self._piece(queries[:, :, begin : begin + _PIECE], begin, keys, values)
                for begin in range(0, len(qkv), _PIECE)
            ]
            attended = torch.cat(pieces, dim=2)
        return attended.permute(2, 0, 1, 3).flatten(1)

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
        first = max(position - self._layout.window + 1, self._first_key)
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
