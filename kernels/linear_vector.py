"""The product of one token: `out = W x` on the vector units, for `kernels/linear.py`.

Grid `(ceil(num_outputs / BLOCK_N),)`; one program computes BLOCK_N outputs (with GLU: reads as
many rows of each half). A thread holds the same columns of every row, so it reads x once for all
of them; products are summed across threads at the end. The first block of weights is loaded
before anything else: with PDL, while the kernel before still computes x.
"""

from typing import Any

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hillstar.kernels.jit import jit


@jit
def _load_row(where: tl.tensor, k: tl.tensor, K: tl.constexpr, BLOCK_K: tl.constexpr) -> Any:
    """`[1, BLOCK_K]` of a vector from column k, float32; zero past its end."""
    columns = k + tl.arange(0, BLOCK_K)[None, :]
    if K % BLOCK_K == 0:
        return tl.load(where + columns).to(tl.float32)
    return tl.load(where + columns, mask=columns < K, other=0.0).to(tl.float32)


@jit
def _load_weights(where: tl.tensor, k: tl.tensor, K: tl.constexpr, BLOCK_K: tl.constexpr) -> Any:
    """`[BLOCK_N, BLOCK_K]` weights from column k, not kept in the caches; zero past the end."""
    columns = k + tl.arange(0, BLOCK_K)[None, :]
    if K % BLOCK_K == 0:
        return tl.load(where + columns, eviction_policy="evict_first")
    return tl.load(where + columns, mask=columns < K, other=0.0, eviction_policy="evict_first")


@jit
def _inputs(
    x: tl.tensor, norm_weight: tl.tensor, k: tl.tensor, K: tl.constexpr, BLOCK_K: tl.constexpr
) -> Any:
    """`[1, BLOCK_K]` of x, times the norm's weight if there is one, and of x squared."""
    plain = _load_row(x, k, K, BLOCK_K)
    scaled = plain
    if norm_weight is not None:
        scaled = plain * _load_row(norm_weight, k, K, BLOCK_K)
    return scaled, plain * plain


@jit
def vector_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    norm_weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    num_outputs: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    STRIDE_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    GLU: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """BLOCK_N outputs of the one token."""
    if PDL:
        gdc_launch_dependents()
    first = tl.program_id(0) * BLOCK_N
    lane = tl.arange(0, BLOCK_N)
    # The last program reads its last row again instead of rows that do not exist.
    rows = (tl.minimum(lane, num_outputs - 1 - first) * STRIDE_W)[:, None]
    gates = weight + first.to(tl.int64) * STRIDE_W + rows
    ups = weight + (first + num_outputs).to(tl.int64) * STRIDE_W + rows
    gate_tile = _load_weights(gates, 0, K, BLOCK_K)
    up_tile = _load_weights(ups, 0, K, BLOCK_K) if GLU else gate_tile
    if PDL:
        gdc_wait()
    xs, squares = _inputs(x, norm_weight, 0, K, BLOCK_K)
    gate = gate_tile.to(tl.float32) * xs
    up = up_tile.to(tl.float32) * xs if GLU else gate
    if K > BLOCK_K:
        if NUM_STAGES == 1:
            for k in tl.static_range(BLOCK_K, K, BLOCK_K):  # pyright: ignore[reportGeneralTypeIssues]
                gate_tile = _load_weights(gates, k, K, BLOCK_K)
                if GLU:
                    up_tile = _load_weights(ups, k, K, BLOCK_K)
                xs, more = _inputs(x, norm_weight, k, K, BLOCK_K)
                squares += more
                gate += gate_tile.to(tl.float32) * xs
                if GLU:
                    up += up_tile.to(tl.float32) * xs
        else:
            for k in tl.range(BLOCK_K, K, BLOCK_K, num_stages=NUM_STAGES):  # pyright: ignore[reportGeneralTypeIssues]
                gate_tile = _load_weights(gates, k, K, BLOCK_K)
                if GLU:
                    up_tile = _load_weights(ups, k, K, BLOCK_K)
                xs, more = _inputs(x, norm_weight, k, K, BLOCK_K)
                squares += more
                gate += gate_tile.to(tl.float32) * xs
                if GLU:
                    up += up_tile.to(tl.float32) * xs

    result = tl.sum(gate, axis=1)
    scale = 1.0
    if norm_weight is not None:
        scale = 1.0 / tl.sqrt(tl.sum(squares) / K + eps)
        result *= scale
    if GLU:
        result = result / (1.0 + tl.exp(-result)) * (tl.sum(up, axis=1) * scale)
    columns = first + lane
    mask = columns < num_outputs
    if bias is not None:
        result += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        result += tl.load(residual + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + columns, result, mask=mask)
