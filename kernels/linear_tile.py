"""The product of up to 64 tokens on the tensor cores, for `kernels/linear.py`.

Grid `(ceil(num_outputs / BLOCK_N), NUM_SPLITS)`. One program multiplies a tile of weights
`[BLOCK_N, columns]` by the tokens transposed, `[columns, BLOCK_M]`: the weights are the large
side, so they take the large side of the matrix instruction, and 16 tokens cost what 1 does.

Split columns: each program of a tile leaves its sums in `partials` (float32
`[tiles, NUM_SPLITS, BLOCK_N + 1, BLOCK_M]`; the last row holds the tokens' sums of squares) and
counts its arrival; the last to arrive adds all of them up in the order of the splits, whoever it
is, so a result never varies, and sets the counter back to zero for the next launch.
"""

from typing import Any

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hillstar.kernels.jit import jit, jit_with
from hillstar.kernels.pdl import prefetch


@jit
def load_block(
    where: tl.tensor, columns: tl.tensor, mask: tl.tensor, K: tl.constexpr, BLOCK_K: tl.constexpr
) -> Any:
    """A block of tokens or of a vector; zero where `mask` is false or past the last column."""
    if K % BLOCK_K != 0:
        mask = mask & (columns < K)
    return tl.load(where + columns, mask=mask, other=0.0)


@jit
def _load_weights(
    where: tl.tensor, columns: tl.tensor, K: tl.constexpr, BLOCK_K: tl.constexpr
) -> Any:
    """`[BLOCK_N, BLOCK_K]` weights, not kept in the caches; zero past the last column."""
    if K % BLOCK_K == 0:
        return tl.load(where + columns, eviction_policy="evict_first")
    return tl.load(where + columns, mask=columns < K, other=0.0, eviction_policy="evict_first")


@jit_with(do_not_specialize=["num_tokens"])
def tile_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    norm_weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    partials: tl.tensor,
    counters: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    stride_x: tl.tensor,
    stride_residual: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    STRIDE_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    GLU: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    tile, split = tl.program_id(0), tl.program_id(1)
    SHARE: tl.constexpr = tl.cdiv(tl.cdiv(K, BLOCK_K), NUM_SPLITS) * BLOCK_K
    begin = split * SHARE
    end = tl.minimum(begin + SHARE, K)
    first = tile * BLOCK_N
    lane = tl.arange(0, BLOCK_N)
    # The last tile reads its last row again instead of rows that do not exist.
    rows = tl.minimum(lane, num_outputs - 1 - first) * STRIDE_W
    gates = weight + first.to(tl.int64) * STRIDE_W + rows
    ups = weight + (first + num_outputs).to(tl.int64) * STRIDE_W + rows
    if PDL:
        if PREFETCH > 0:
            size = tl.minimum(end - begin, PREFETCH) * ITEMSIZE
            if size > 0:
                prefetch(gates + begin, tl.zeros([BLOCK_N], tl.int32) + size)
                if GLU:
                    prefetch(ups + begin, tl.zeros([BLOCK_N], tl.int32) + size)
        gdc_wait()

    tokens = tl.arange(0, BLOCK_M)
    valid = (tokens < num_tokens)[:, None]
    x_rows = x + (tokens * stride_x)[:, None]
    squares = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    gate = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for k in tl.range(begin, end, BLOCK_K, num_stages=NUM_STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        columns = k + tl.arange(0, BLOCK_K)[None, :]
        gate_tile = _load_weights(gates[:, None], columns, K, BLOCK_K)
        xs = load_block(x_rows, columns, valid, K, BLOCK_K)
        if norm_weight is not None:
            exact = xs.to(tl.float32)
            squares += exact * exact
            scales = load_block(norm_weight, columns, columns >= 0, K, BLOCK_K)
            xs = (exact * scales.to(tl.float32)).to(xs.dtype)
        if UPCAST:
            xs, gate_tile = xs.to(tl.float32), gate_tile.to(tl.float32)
        gate = tl.dot(gate_tile, tl.trans(xs), gate, input_precision="ieee")
        if GLU:
            up_tile = _load_weights(ups[:, None], columns, K, BLOCK_K).to(xs.dtype)
            up = tl.dot(up_tile, tl.trans(xs), up, input_precision="ieee")

    total = tl.sum(squares, axis=1)
    if NUM_SPLITS > 1:
        base = partials + tile.to(tl.int64) * (NUM_SPLITS * (BLOCK_N + 1) * BLOCK_M)
        places = lane[:, None] * BLOCK_M + tokens[None, :]
        own = base + split * ((BLOCK_N + 1) * BLOCK_M)
        tl.store(own + places, gate)
        if norm_weight is not None:
            tl.store(own + BLOCK_N * BLOCK_M + tokens, total)
        tl.debug_barrier()  # every thread's sums are written before one thread says so
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") != NUM_SPLITS - 1:
            return
        tl.store(counters + tile, 0)
        gate = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        for other in tl.static_range(NUM_SPLITS):  # pyright: ignore[reportGeneralTypeIssues]
            part = base + other * ((BLOCK_N + 1) * BLOCK_M)
            gate += tl.load(part + places, cache_modifier=".cg")
            if norm_weight is not None:
                total += tl.load(part + BLOCK_N * BLOCK_M + tokens, cache_modifier=".cg")

    if norm_weight is not None:
        scale = (1.0 / tl.sqrt(total / K + eps))[None, :]
        gate *= scale
        up *= scale
    if GLU:
        gate = gate / (1.0 + tl.exp(-gate)) * up
    result = tl.trans(gate)  # [BLOCK_M, BLOCK_N]
    outputs = (first + lane)[None, :]
    mask = valid & (outputs < num_outputs)
    if bias is not None:
        result += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)
    if residual is not None:
        added = tl.load(
            residual + (tokens * stride_residual)[:, None] + outputs, mask=mask, other=0.0
        )
        result += added.to(tl.float32)
    tl.store(out + (tokens * num_outputs)[:, None] + outputs, result, mask=mask)
