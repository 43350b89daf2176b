"""The program of `kernels/attention.py` for short rows: an equal share of all that is read."""

from typing import Any

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hillstar.kernels.attention_merge import merge, store_heads
from hillstar.kernels.attention_tile import attend, finish, load_queries, store_tile
from hillstar.kernels.jit import jit, jit_with

PIECE_UNITS = 2
"""What beginning a segment costs, in units of 64 tokens read: 0 and 4 were slower where contexts
are uneven (H200, 2026-11-29: 64 rows of 32 to 2,048 tokens)."""


@jit
def _span(
    q_len: tl.tensor,
    context: tl.tensor,
    window: tl.tensor,
    UNIT: tl.constexpr,
    SHORT_Q: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> Any:
    """The first key that a row sees, in whole units, and how many units it reads: none if it is
    not short, one at least if it is, for someone has to write its result."""
    first = context * 0
    if HAS_WINDOW:
        first = tl.maximum(context - q_len - window + 1, 0) // UNIT * UNIT
    units = tl.maximum(tl.cdiv(context - first, UNIT), 1)
    return first, tl.where((q_len > 0) & (q_len <= SHORT_Q), units, 0)


@jit_with(do_not_specialize=["num_rows", "stride_table", "gap", "part_rows"])
def short_kernel(
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
    gap: tl.tensor,
    part_rows: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHORT_Q: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    UNIT: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    PIECE_UNITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """One program's share of the reading: pieces of segments, each a row and a KV head."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    rows = tl.arange(0, ROWS_PADDED)
    is_row = rows < num_rows
    q_lens = tl.load(cu_seqlens_q + rows + 1, mask=is_row, other=0)
    q_lens -= tl.load(cu_seqlens_q + rows, mask=is_row, other=0)
    contexts = tl.load(context_lens + rows, mask=is_row, other=0)
    _, units = _span(q_lens, contexts, window, UNIT, SHORT_Q, HAS_WINDOW)
    # Where programs walk from segment to segment, a segment costs time beside what it reads.
    num_segments = tl.sum((units > 0).to(tl.int32), axis=0) * num_kv_heads
    is_walked = num_segments > tl.num_programs(0) // 2
    extra = tl.where(is_walked, PIECE_UNITS, 0)
    units = tl.where(units > 0, units + extra, 0) * num_kv_heads
    ends = tl.cumsum(units, axis=0)
    num_units = tl.sum(units, axis=0)
    share = tl.maximum(tl.cdiv(num_units, tl.num_programs(0)), MIN_UNITS)
    begin = program * share
    end = tl.minimum(begin + share, num_units)
    m = tl.arange(0, BLOCK_M)
    if PDL and begin >= end:
        gdc_wait()
    while begin < end:
        # The piece of this share that lies in one segment: a row and a KV head.
        row = tl.sum((ends <= begin).to(tl.int32), axis=0)
        row_begin = tl.sum(tl.where(rows < row, units, 0), axis=0)
        q_start = tl.load(cu_seqlens_q + row)
        q_len = tl.load(cu_seqlens_q + row + 1) - q_start
        context = tl.load(context_lens + row)
        first_key, length = _span(q_len, context, window, UNIT, SHORT_Q, HAS_WINDOW)
        kv_head = (begin - row_begin) // (length + extra)
        segment = row_begin + kv_head * (length + extra) + extra
        stop = tl.minimum(end, segment + length)
        first = first_key + tl.maximum(begin - segment, 0) * UNIT
        last = tl.minimum(first_key + (stop - segment) * UNIT, context)
        if PDL:
            gdc_wait()
        query = m // GROUP
        head = kv_head * GROUP + m % GROUP
        valid = query < q_len
        token = (q_start + query).to(tl.int64)
        queries = load_queries(
            q, token, head, valid, stride_q_token, stride_q_head, HEAD_DIM, DIM, UPCAST
        )
        keys = kv + kv_head.to(tl.int64) * stride_head
        table = block_tables + row.to(tl.int64) * stride_table
        acc = tl.zeros([BLOCK_M, DIM], dtype=tl.float32)
        maximum = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        acc, maximum, total = attend(
            acc,
            maximum,
            total,
            queries,
            context - q_len,
            query,
            keys,
            stride_kv,
            table,
            stride_block,
            stride_slot,
            first,
            last,
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
        writer = segment // share
        num_parts = (segment + length - 1) // share - writer + 1
        if stop <= segment:
            pass  # only the extra of a segment that the next program begins
        elif num_parts == 1:
            store_tile(out, result, token * (num_kv_heads * GROUP) + head, valid, HEAD_DIM, DIM)
        else:
            part = program + tl.where(program > writer, gap, 0)
            part_row = part.to(tl.int64) * part_rows + m
            tl.store(partial_lse + part_row, lse, mask=valid)
            store_tile(partial_out, result, part_row, valid, HEAD_DIM, DIM)
            tl.debug_barrier()  # every thread's part is written before one thread says so
            counter = counters + tl.where(gap > 0, writer, row * num_kv_heads + kv_head)
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1:
                tl.store(counter, 0)
                for index in range(q_len):
                    merged = merge(
                        partial_out,
                        partial_lse,
                        writer,
                        gap,
                        num_parts,
                        index,
                        part_rows,
                        GROUP,
                        HEAD_DIM,
                        DIM,
                        HEADS,
                        AT_ONCE,
                    )
                    where_token = (q_start + index).to(tl.int64)
                    store_heads(
                        out, merged, where_token, kv_head, num_kv_heads, GROUP, HEAD_DIM, DIM, HEADS
                    )
        begin = stop
