"""The program of `kernels/attention.py`: one tile of queries over its share of their context."""

from typing import Any

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hillstar.kernels.attention_merge import locate, merge, store_heads
from hillstar.kernels.jit import jit, jit_with
from hillstar.kernels.pdl import prefetch


@jit
def _load_tile(
    where: tl.tensor,
    in_range: tl.tensor,
    columns: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> Any:
    """`[BLOCK_N, DIM]` keys or values; zero past the range and past head_dim."""
    if MASKED:
        tile = tl.load(where, mask=in_range[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)
    elif DIM != HEAD_DIM:
        tile = tl.load(where, mask=(columns < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(where)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@jit
def _attend(
    acc: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    queries: tl.tensor,
    positions: tl.tensor,
    keys: tl.tensor,
    stride_kv: tl.tensor,
    table: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale_log2: tl.tensor,
    window: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> Any:
    """Continue the online softmax over the context tokens `begin … end`.

    Without MASKED every query sees all of them and their number is a multiple of BLOCK_N.
    """
    columns = tl.arange(0, DIM)
    # Block ids are loaded one tile ahead and carried: keys and values are then plain loads to
    # the compiler, which keeps as many tiles in flight as there are pipeline stages.
    ahead = begin + tl.arange(0, BLOCK_N)
    blocks = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
    for start in tl.range(begin, end, BLOCK_N):  # pyright: ignore[reportGeneralTypeIssues]
        tokens = start + tl.arange(0, BLOCK_N)
        in_range = tokens < end
        offsets = blocks.to(tl.int64) * stride_block + (tokens % BLOCK_SIZE) * stride_slot
        ahead = tokens + BLOCK_N
        blocks = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        where = keys + offsets[:, None] + columns[None, :]
        k = _load_tile(where, in_range, columns, HEAD_DIM, DIM, MASKED, UPCAST)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale_log2
        if MASKED:
            visible = in_range[None, :] & (tokens[None, :] <= positions[:, None])
            if HAS_WINDOW:
                visible = visible & (tokens[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        highest = tl.maximum(maximum, tl.max(scores, axis=1))
        base = highest
        if MASKED:  # a query that has seen no key yet: -inf - -inf would be NaN
            base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(maximum - base)
        total = total * decay + tl.sum(weights, axis=1)
        v = _load_tile(where + stride_kv, in_range, columns, HEAD_DIM, DIM, MASKED, UPCAST)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        maximum = highest
    return acc, maximum, total


@jit_with(do_not_specialize=["num_rows", "stride_table"])
def attention_kernel(
    q: tl.tensor,
    kv: tl.tensor,
    block_tables: tl.tensor,
    cu_seqlens_q: tl.tensor,
    context_lens: tl.tensor,
    out: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    counters: tl.tensor,
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
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART_M: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SHORT_Q: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    IS_SHORT: tl.constexpr,
    MERGES: tl.constexpr,
    PDL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PEEL: tl.constexpr,
    PREFETCH: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    slot, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, q_start, q_len, first, count = locate(
        cu_seqlens_q, slot, num_rows, GROUP, BLOCK_M, SHORT_Q, ROWS_PADDED, IS_SHORT
    )
    if count <= 0:
        if PDL:
            gdc_wait()
        return
    first_position = tl.load(context_lens + row) - q_len + first

    m = tl.arange(0, BLOCK_M)
    query = m // GROUP
    head = kv_head * GROUP + m % GROUP
    valid = query < count  # also excludes the rows past BLOCK_Q * GROUP: count <= BLOCK_Q
    positions = first_position + query
    columns = tl.arange(0, DIM)
    in_head = (columns < HEAD_DIM)[None, :]

    # The keys of this tile: [begin, end); of this split: its share, in whole tiles, or what of
    # them lies between two multiples of SPLIT_TOKENS.
    end = first_position + count
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
    if SPLIT_TOKENS > 0:
        begin = tl.maximum(begin, split * SPLIT_TOKENS)
        end = tl.minimum(end, (split + 1) * SPLIT_TOKENS)
    elif NUM_SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), NUM_SPLITS) * BLOCK_N
        begin += split * share
        end = tl.minimum(begin + share, end)

    keys = kv + kv_head.to(tl.int64) * stride_head
    table = block_tables + row.to(tl.int64) * stride_table
    if PDL:
        if PREFETCH > 0 and begin < end:
            ahead = tl.minimum(begin + tl.arange(0, BLOCK_N), end - 1)
            block = tl.load(table + ahead // BLOCK_SIZE).to(tl.int64)
            where = keys + block * stride_block + (ahead % BLOCK_SIZE) * stride_slot
            num_bytes = tl.full([BLOCK_N], PREFETCH, tl.int32)
            prefetch(where, num_bytes)
            prefetch(where + stride_kv, num_bytes)
        gdc_wait()
    token = (q_start + first + query).to(tl.int64)
    q_where = q + (token * stride_q_token + head * stride_q_head)[:, None] + columns[None, :]
    queries = tl.load(q_where, mask=valid[:, None] & in_head, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)

    acc = tl.zeros([BLOCK_M, DIM], dtype=tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if PEEL:
        # Tiles that the first query sees whole need no mask; they are most of a long chunk.
        seen = tl.minimum(tl.maximum(first_position + 1 - begin, 0), tl.maximum(end - begin, 0))
        middle = begin + seen // BLOCK_N * BLOCK_N
        acc, maximum, total = _attend(
            acc,
            maximum,
            total,
            queries,
            positions,
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
    acc, maximum, total = _attend(
        acc,
        maximum,
        total,
        queries,
        positions,
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

    has_keys = total > 0
    result = acc / tl.where(has_keys, total, 1.0)[:, None]
    if NUM_SPLITS == 1:
        out_where = out + ((token * num_kv_heads * GROUP + head) * HEAD_DIM)[:, None]
        out_where += columns[None, :]
        tl.store(out_where, result, mask=valid[:, None] & in_head)
    else:
        tile = slot.to(tl.int64) * num_kv_heads + kv_head
        part = (tile * NUM_SPLITS + split) * PART_M + m
        lse = tl.where(has_keys, maximum + tl.log2(tl.where(has_keys, total, 1.0)), float("-inf"))
        tl.store(partial_lse + part, lse, mask=valid)
        part_where = partial_out + (part * HEAD_DIM)[:, None] + columns[None, :]
        tl.store(part_where, result, mask=valid[:, None] & in_head)
        if MERGES:
            tl.debug_barrier()  # every thread's part is written before one thread says so
            if tl.atomic_add(counters + tile, 1, sem="acq_rel") != NUM_SPLITS - 1:
                return
            tl.store(counters + tile, 0)
            for index in range(count):
                merged = merge(
                    partial_out,
                    partial_lse,
                    tile,
                    index,
                    GROUP,
                    HEAD_DIM,
                    DIM,
                    HEADS,
                    PART_M,
                    NUM_SPLITS,
                    AT_ONCE,
                )
                where = (q_start + first + index).to(tl.int64)
                store_heads(out, merged, where, kv_head, num_kv_heads, GROUP, HEAD_DIM, DIM, HEADS)
