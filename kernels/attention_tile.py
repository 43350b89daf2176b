"""What the programs of `kernels/attention.py` share: a tile of queries over a run of its keys."""

from typing import Any

import triton.language as tl

from hillstar.kernels.jit import jit


@jit
def load_queries(
    q: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    valid: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    UPCAST: tl.constexpr,
) -> Any:
    """`[BLOCK_M, DIM]`; zero where not valid and past head_dim."""
    columns = tl.arange(0, DIM)
    where = q + (token * stride_q_token + head * stride_q_head)[:, None] + columns[None, :]
    queries = tl.load(where, mask=valid[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    return queries


@jit
def attend(
    acc: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    queries: tl.tensor,
    position: tl.tensor,
    query: tl.tensor,
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

    position: of the tile's first query; query: which of its queries each row is. begin is a
    multiple of the smaller of BLOCK_SIZE and BLOCK_N. Without MASKED every query sees all of the
    tokens and their number is a multiple of BLOCK_N. The tokens of a tile are addressed as runs
    that lie in one block each: a thread looks few of them up, and adds constants to find the
    rest (half the instructions of a lookup for each token, which is what short contexts wait for).
    """
    RUN: tl.constexpr = min(BLOCK_SIZE, BLOCK_N)
    columns = tl.arange(0, DIM)
    in_head = (columns < HEAD_DIM)[None, None, :]
    n = tl.arange(0, BLOCK_N)
    runs = tl.arange(0, BLOCK_N // RUN) * RUN
    slots = tl.arange(0, RUN)
    in_run = (slots * stride_slot)[None, :, None] + columns[None, None, :]
    # Block ids are loaded one tile ahead and carried: keys and values are then plain loads to
    # the compiler, which keeps as many tiles in flight as there are pipeline stages.
    blocks = tl.load(table + (begin + runs) // BLOCK_SIZE, mask=begin + runs < end, other=0)
    for start in tl.range(begin, end, BLOCK_N):  # pyright: ignore[reportGeneralTypeIssues]
        first = blocks.to(tl.int64) * stride_block
        if RUN < BLOCK_SIZE:
            first += (start + runs) % BLOCK_SIZE * stride_slot
        ahead = start + BLOCK_N + runs
        blocks = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        where = keys + first[:, None, None] + in_run
        # Keys past the end are read, from there or from block 0, and their scores overwritten;
        # values are not: what nobody has stored may be NaN, and stay so with a weight of 0.
        k = tl.load(where, mask=in_head, other=0.0) if DIM != HEAD_DIM else tl.load(where)
        if MASKED:
            in_range = (runs[:, None] + slots[None, :] < end - start)[:, :, None]
            v = tl.load(where + stride_kv, mask=in_range & in_head, other=0.0)
        elif DIM != HEAD_DIM:
            v = tl.load(where + stride_kv, mask=in_head, other=0.0)
        else:
            v = tl.load(where + stride_kv)
        k = tl.reshape(k, [BLOCK_N, DIM])
        v = tl.reshape(v, [BLOCK_N, DIM])
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if MASKED and (HAS_WINDOW or start + BLOCK_N > tl.minimum(position + 1, end)):
            last = tl.minimum(position + query - start, end - start - 1)
            visible = n[None, :] <= last[:, None]
            if HAS_WINDOW:
                visible = visible & (n[None, :] > (position + query - start - window)[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        highest = tl.maximum(maximum, tl.max(scores, axis=1) * scale_log2)
        base = highest
        if MASKED:  # a query that has seen no key yet: -inf - -inf would be NaN
            base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores * scale_log2 - base[:, None])
        decay = tl.exp2(maximum - base)
        total = total * decay + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        maximum = highest
    return acc, maximum, total


@jit
def finish(acc: tl.tensor, maximum: tl.tensor, total: tl.tensor) -> Any:
    """The normalised result and its base-2 log-sum-exp; zeros and -inf without keys."""
    has_keys = total > 0
    total = tl.where(has_keys, total, 1.0)
    lse = tl.where(has_keys, maximum + tl.log2(total), float("-inf"))
    return acc * (1.0 / total)[:, None], lse


@jit
def store_tile(
    out: tl.tensor,
    result: tl.tensor,
    row: tl.tensor,
    valid: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
) -> None:
    """Write `[BLOCK_M, DIM]` to rows of head_dim elements at `out`."""
    columns = tl.arange(0, DIM)
    where = out + (row * HEAD_DIM)[:, None] + columns[None, :]
    tl.store(where, result, mask=valid[:, None] & (columns < HEAD_DIM)[None, :])
