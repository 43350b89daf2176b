"""The programs of `kernels/attention.py` for long rows: a tile, and its context or a part of it."""

from typing import Any

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hillstar.kernels.attention_merge import merge, store_heads
from hillstar.kernels.attention_tile import attend, finish, load_queries, store_tile
from hillstar.kernels.jit import jit, jit_with


@jit
def _num_tiles(
    cu_seqlens_q: tl.tensor,
    num_rows: tl.tensor,
    BLOCK_Q: tl.constexpr,
    SHORT_Q: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
) -> Any:
    """Tiles of each row."""
    rows = tl.arange(0, ROWS_PADDED)
    is_row = rows < num_rows
    q_lens = tl.load(cu_seqlens_q + rows + 1, mask=is_row, other=0)
    q_lens -= tl.load(cu_seqlens_q + rows, mask=is_row, other=0)
    return tl.where(q_lens > SHORT_Q, tl.cdiv(q_lens, BLOCK_Q), 0)


@jit
def _num_splits(
    num_tiles: tl.tensor,
    num_kv_heads: tl.tensor,
    split_tokens: tl.tensor,
    max_splits: tl.tensor,
) -> Any:
    """Programs that share a tile's context: as many as there is room for, unless their share is
    fixed."""
    if split_tokens > 0:
        splits = max_splits
    else:
        splits = tl.maximum(max_splits // tl.maximum(num_tiles * num_kv_heads, 1), 1)
    return splits


@jit
def _place(
    cu_seqlens_q: tl.tensor,
    context_lens: tl.tensor,
    tiles: tl.tensor,
    tile: tl.tensor,
    splits: tl.tensor,
    window: tl.tensor,
    split_tokens: tl.tensor,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    MIN_SHARE: tl.constexpr,
) -> Any:
    """A tile's row, the first of its tokens, how many it has, the position of the first, the
    first key that it sees, and each split's share of the keys."""
    rows = tl.arange(0, ROWS_PADDED)
    row = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
    first = (tile - tl.sum(tl.where(rows < row, tiles, 0), axis=0)) * BLOCK_Q
    q_start = tl.load(cu_seqlens_q + row)
    q_len = tl.load(cu_seqlens_q + row + 1) - q_start
    position = tl.load(context_lens + row) - q_len + first
    count = tl.minimum(q_len - first, BLOCK_Q)
    begin = 0
    if HAS_WINDOW:
        whole = tl.maximum(split_tokens, BLOCK_N)
        begin = tl.maximum(position - window + 1, 0) // whole * whole
    length = tl.maximum(position + count - begin, 1)
    if split_tokens > 0:
        share = split_tokens
    else:
        share = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
        share = tl.maximum(share, MIN_SHARE)
    return row, q_start + first, count, position, begin, share, tl.cdiv(length, share)


@jit_with(do_not_specialize=["num_rows", "stride_table", "split_tokens", "max_splits"])
def long_kernel(
    q: tl.tensor,
    kv: tl.tensor,
    block_tables: tl.tensor,
    cu_seqlens_q: tl.tensor,
    context_lens: tl.tensor,
    out: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_block: tl.tensor,
    stride_kv: tl.tensor,
    stride_head: tl.tensor,
    stride_slot: tl.tensor,
    stride_table: tl.tensor,
    num_rows: tl.tensor,
    num_kv_heads: tl.tensor,
    scale_log2: tl.tensor,
    window: tl.tensor,
    split_tokens: tl.tensor,
    max_splits: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHORT_Q: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    PDL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
    PEEL: tl.constexpr,
) -> None:
    """One tile of one KV head over its context, or over the part that falls to this program."""
    if PDL:
        gdc_launch_dependents()
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tiles = _num_tiles(cu_seqlens_q, num_rows, BLOCK_Q, SHORT_Q, ROWS_PADDED)
    num_tiles = tl.sum(tiles, axis=0)
    splits = 1
    if SPLITS:
        splits = _num_splits(num_tiles, num_kv_heads, split_tokens, max_splits)
    program = tl.program_id(0)
    kv_head = program % num_kv_heads
    split = program // num_kv_heads % splits
    # The last tiles of a row see the most keys: they begin first, and the short ones fill up.
    from_last = program // num_kv_heads // splits
    tile = num_tiles - 1 - from_last  # pyright: ignore[reportOperatorIssue]
    if tile < 0:
        if PDL:
            gdc_wait()
        return
    row, q_first, count, position, begin, share, num_parts = _place(
        cu_seqlens_q,
        context_lens,
        tiles,
        tile,
        splits,
        window,
        split_tokens,
        BLOCK_Q,
        BLOCK_N,
        ROWS_PADDED,
        HAS_WINDOW,
        MIN_SHARE,
    )
    end = position + count
    if SPLITS:
        begin += split * share
        end = tl.minimum(begin + share, end)
    if PDL:
        gdc_wait()
    if SPLITS and split >= num_parts:
        return
    m = tl.arange(0, BLOCK_M)
    query = m // GROUP
    head = kv_head * GROUP + m % GROUP
    valid = query < count  # also excludes the rows past BLOCK_Q * GROUP: count <= BLOCK_Q
    token = (q_first + query).to(tl.int64)
    queries = load_queries(
        q, token, head, valid, stride_q_token, stride_q_head, HEAD_DIM, DIM, UPCAST
    )
    keys = kv + kv_head.to(tl.int64) * stride_head
    table = block_tables + row.to(tl.int64) * stride_table
    acc = tl.zeros([BLOCK_M, DIM], dtype=tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if PEEL:
        # Tiles that the first query sees whole need no mask; they are most of a long chunk.
        seen = tl.maximum(tl.minimum(position + 1, end) - begin, 0)
        middle = begin + seen // BLOCK_N * BLOCK_N
        acc, maximum, total = attend(
            acc,
            maximum,
            total,
            queries,
            position,
            query,
            keys,
            stride_kv,
            table,
            stride_block,
            stride_slot,
            begin,
            middle,
            scale_log2,
            window,
            HEAD_DIM,
            DIM,
            BLOCK_SIZE,
            BLOCK_N,
            HAS_WINDOW,
            False,
            UPCAST,
        )
        begin = middle
    acc, maximum, total = attend(
        acc,
        maximum,
        total,
        queries,
        position,
        query,
        keys,
        stride_kv,
        table,
        stride_block,
        stride_slot,
        begin,
        end,
        scale_log2,
        window,
        HEAD_DIM,
        DIM,
        BLOCK_SIZE,
        BLOCK_N,
        HAS_WINDOW,
        True,
        UPCAST,
    )
    result, lse = finish(acc, maximum, total)
    out_row = token * (num_kv_heads * GROUP) + head
    if SPLITS:
        if num_parts > 1:
            part = (tile * num_kv_heads + kv_head) * splits + split
            part_row = part.to(tl.int64) * BLOCK_M + m
            tl.store(partial_lse + part_row, lse, mask=valid)
            store_tile(partial_out, result, part_row, valid, HEAD_DIM, DIM)
        else:
            store_tile(out, result, out_row, valid, HEAD_DIM, DIM)
    else:
        store_tile(out, result, out_row, valid, HEAD_DIM, DIM)


@jit_with(do_not_specialize=["num_rows", "split_tokens", "max_splits"])
def reduce_kernel(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    cu_seqlens_q: tl.tensor,
    context_lens: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_kv_heads: tl.tensor,
    window: tl.tensor,
    split_tokens: tl.tensor,
    max_splits: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHORT_Q: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    PDL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> None:
    """The parts of one query of a tile, of which several programs had one, weighed together."""
    if PDL:
        gdc_launch_dependents()
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile, kv_head, query = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles = _num_tiles(cu_seqlens_q, num_rows, BLOCK_Q, SHORT_Q, ROWS_PADDED)
    num_tiles = tl.sum(tiles, axis=0)
    splits = _num_splits(num_tiles, num_kv_heads, split_tokens, max_splits)
    if tile >= num_tiles:
        if PDL:
            gdc_wait()
        return
    _, q_first, count, _, _, _, num_parts = _place(
        cu_seqlens_q,
        context_lens,
        tiles,
        tile,
        splits,
        window,
        split_tokens,
        BLOCK_Q,
        BLOCK_N,
        ROWS_PADDED,
        HAS_WINDOW,
        MIN_SHARE,
    )
    if PDL:
        gdc_wait()
    if (query < count) & (num_parts > 1):
        merged = merge(
            partial_out,
            partial_lse,
            (tile * num_kv_heads + kv_head) * splits,
            0,
            num_parts,
            query,
            BLOCK_M,
            GROUP,
            HEAD_DIM,
            DIM,
            HEADS,
            AT_ONCE,
        )
        token = (q_first + query).to(tl.int64)
        store_heads(out, merged, token, kv_head, num_kv_heads, GROUP, HEAD_DIM, DIM, HEADS)
