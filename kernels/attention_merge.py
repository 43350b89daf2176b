"""Where the tiles of `kernels/attention.py` lie, and the parts of a split context put together."""

from typing import Any

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hillstar.kernels.jit import jit, jit_with


@jit
def locate(
    cu_seqlens_q: tl.tensor,
    tile: tl.tensor,
    num_rows: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SHORT_Q: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    IS_SHORT: tl.constexpr,
) -> Any:
    """The row of a tile slot, the first token of the row, the tile's first query in the row, and
    how many queries the tile has (0 or less: none, the program has nothing to do)."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    if IS_SHORT:
        row = tile
        q_start = tl.load(cu_seqlens_q + row)
        q_len = tl.load(cu_seqlens_q + row + 1) - q_start
        first = 0
        count = tl.where(q_len <= SHORT_Q, q_len, 0)
    else:
        rows = tl.arange(0, ROWS_PADDED)
        starts = tl.load(cu_seqlens_q + rows, mask=rows < num_rows, other=0) // BLOCK_Q + rows
        later = (rows > 0) & (rows < num_rows) & (starts <= tile)
        row = tl.sum(later.to(tl.int32), axis=0)
        q_start = tl.load(cu_seqlens_q + row)
        q_len = tl.load(cu_seqlens_q + row + 1) - q_start
        first = (tile - (q_start // BLOCK_Q + row)) * BLOCK_Q
        count = tl.where(q_len > SHORT_Q, tl.minimum(q_len - first, BLOCK_Q), 0)
    return row, q_start, q_len, first, count


@jit
def merge(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    tile: tl.tensor,
    query: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PART_M: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> Any:
    """`[GROUP, DIM]` of one query of a tile, padded to a power of two: the splits' parts weighed
    together, as many at once as registers hold."""
    heads = tl.arange(0, HEADS)
    columns = tl.arange(0, DIM)
    in_part = ((heads < GROUP)[:, None] & (columns < HEAD_DIM)[None, :])[None, :, :]
    maximum = tl.full([HEADS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([HEADS], dtype=tl.float32)
    acc = tl.zeros([HEADS, DIM], dtype=tl.float32)
    for begin in tl.static_range(0, NUM_SPLITS, AT_ONCE):  # pyright: ignore[reportGeneralTypeIssues]
        splits = begin + tl.arange(0, AT_ONCE)
        part = (tile * NUM_SPLITS + splits)[:, None] * PART_M + query * GROUP + heads[None, :]
        # Other programs wrote the parts: they are in the L2 cache, not in this SM's own.
        in_group = (heads < GROUP)[None, :]
        lse = tl.load(partial_lse + part, mask=in_group, other=float("-inf"), cache_modifier=".cg")
        where = partial_out + (part * HEAD_DIM)[:, :, None] + columns[None, None, :]
        parts = tl.load(where, mask=in_part, other=0.0, cache_modifier=".cg")
        highest = tl.maximum(maximum, tl.max(lse, axis=0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(lse - base[None, :])
        decay = tl.exp2(maximum - base)
        total = total * decay + tl.sum(weights, axis=0)
        acc = acc * decay[:, None] + tl.sum(parts * weights[:, :, None], axis=0)
        maximum = highest
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@jit
def store_heads(
    out: tl.tensor,
    values: tl.tensor,
    token: tl.tensor,
    kv_head: tl.tensor,
    num_kv_heads: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Write what `_merge` gave for a token."""
    heads = tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, DIM)[None, :]
    where = out + ((token * num_kv_heads + kv_head) * GROUP + heads) * HEAD_DIM + columns
    tl.store(where, values, mask=(heads < GROUP) & (columns < HEAD_DIM))


@jit_with(do_not_specialize=["num_rows"])
def reduce_kernel(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    cu_seqlens_q: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_kv_heads: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PART_M: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SHORT_Q: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    IS_SHORT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    slot, kv_head, query = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, q_start, _, first, count = locate(
        cu_seqlens_q, slot, num_rows, GROUP, BLOCK_M, SHORT_Q, ROWS_PADDED, IS_SHORT
    )
    if PDL:
        gdc_wait()
    if query >= count:
        return
    tile = slot.to(tl.int64) * num_kv_heads + kv_head
    merged = merge(
        partial_out,
        partial_lse,
        tile,
        query,
        GROUP,
        HEAD_DIM,
        DIM,
        HEADS,
        PART_M,
        NUM_SPLITS,
        AT_ONCE,
    )
    token = (q_start + first + query).to(tl.int64)
    store_heads(out, merged, token, kv_head, num_kv_heads, GROUP, HEAD_DIM, DIM, HEADS)
