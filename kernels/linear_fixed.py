"""Products of which each token's result is the same bits, however many tokens there are.

    fixed_linear:         out = x W^T (+ bias) (+ residual)
    fixed_gate_up_swiglu: out = silu(g) * u,  (g | u) = x W^T

What a library multiplies a token with, and in which order it sums, depends on how many others
there are; so do `kernels/linear.py`'s choices. Here the order of sums is a function of the weight's
shape: its columns are cut into *segments*, each summed from left to right in float32, 16 columns at
a time (or one, in float32), and the segments' sums are added from the first to the last. (Why this
matters: He et al. 2025, "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab.)

How the work is shared out may follow the number of tokens, since it moves no sum: a program has 16,
64 or 128 of them (the width of the tensor cores' instruction, which sums the same columns for
each), and few tokens' segments are summed by programs of their own, of which the last to arrive
adds them up. `tests/kernels/test_linear_fixed.py` compares bits.

Grid `(token tiles, output tiles, segments or 1)`, token tiles first: what is in flight shares its
weights. Bytes moved a call: the weight once for 64 tokens or fewer; the inputs for every output
tile, mostly out of the L2 cache; the outputs (and residuals) once.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hillstar.kernels.checks import take_counters
from hillstar.kernels.jit import jit, jit_with
from hillstar.kernels.linear import gate_up_swiglu_reference, linear_reference
from hillstar.kernels.linear_checks import check_factors, check_glu, check_sum
from hillstar.kernels.linear_tile import load_block
from hillstar.kernels.pdl import has_pdl

fixed_linear_reference = linear_reference
fixed_gate_up_swiglu_reference = gate_up_swiglu_reference

_NUM_PROGRAMS = 256  # that fill an H200, about two on each multiprocessor
_MIN_SEGMENT = 1024  # columns


@dataclass(frozen=True, slots=True)
class _Tiling:
    block_m: int  # tokens
    block_n: int  # weight rows; with a GLU as many of each half
    block_k: int
    num_warps: int
    num_stages: int


def _tiling(num_tokens: int, itemsize: int, is_glu: bool) -> _Tiling:
    if itemsize == 4:
        return _Tiling(16 if num_tokens <= 16 else 64, 64, 32, 4, 2)
    if num_tokens <= 16:
        return _Tiling(16, 64, 128, 4, 3 if is_glu else 4)
    if num_tokens <= 64:
        return _Tiling(64, 64, 64, 4, 4)
    return _Tiling(128, 64 if is_glu else 128, 64, 8, 3)


def _num_segments(num_outputs: int, num_inputs: int, is_glu: bool) -> int:
    """A function of the weight alone: as many as fill the device with few tokens."""
    num_tiles, num_segments = triton.cdiv(num_outputs, 64), 1
    while (
        not is_glu
        and 2 * num_segments * num_tiles <= _NUM_PROGRAMS
        and num_inputs >= 2 * num_segments * _MIN_SEGMENT
    ):
        num_segments *= 2
    return num_segments


@jit
def _segment(
    x_rows: tl.tensor,
    valid: tl.tensor,
    gates: tl.tensor,
    ups: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    GLU: tl.constexpr,
    UPCAST: tl.constexpr,
) -> Any:
    """The sums `[BLOCK_N, BLOCK_M]` over the columns `begin … end`, of gates and of ups."""
    gate = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for k in tl.range(begin, end, BLOCK_K, num_stages=NUM_STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        columns = k + tl.arange(0, BLOCK_K)[None, :]
        gate_tile = load_block(gates, columns, columns >= 0, K, BLOCK_K)
        xs = load_block(x_rows, columns, valid, K, BLOCK_K)
        if UPCAST:
            xs, gate_tile = xs.to(tl.float32), gate_tile.to(tl.float32)
        gate = tl.dot(gate_tile, tl.trans(xs), gate, input_precision="ieee")
        if GLU:
            up_tile = load_block(ups, columns, columns >= 0, K, BLOCK_K).to(xs.dtype)
            up = tl.dot(up_tile, tl.trans(xs), up, input_precision="ieee")
    return gate, up


@jit_with(do_not_specialize=["num_tokens"])
def _fixed_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    partials: tl.tensor,
    counters: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    stride_x: tl.tensor,
    stride_residual: tl.tensor,
    K: tl.constexpr,
    STRIDE_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    APART: tl.constexpr,
    GLU: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    tile, own = tl.program_id(1), tl.program_id(2)
    first = tile * BLOCK_N
    lane = tl.arange(0, BLOCK_N)
    # The last tile reads its last row again instead of rows that do not exist.
    rows = tl.minimum(lane, num_outputs - 1 - first) * STRIDE_W
    gates = (weight + first.to(tl.int64) * STRIDE_W + rows)[:, None]
    ups = (weight + (first + num_outputs).to(tl.int64) * STRIDE_W + rows)[:, None]
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = (tokens < num_tokens)[:, None]
    x_rows = x + (tokens.to(tl.int64) * stride_x)[:, None]
    SHARE: tl.constexpr = tl.cdiv(tl.cdiv(K, 128), NUM_SEGMENTS) * 128
    if PDL:
        gdc_wait()

    gate = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for index in range(1 if APART else NUM_SEGMENTS):
        begin = (own + index) * SHARE
        end = tl.minimum(begin + SHARE, K)
        gate_part, up_part = _segment(
            x_rows,
            valid,
            gates,
            ups,
            begin,
            end,
            K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            NUM_STAGES,
            GLU,
            UPCAST,
        )
        gate += gate_part
        up += up_part

    if APART:
        unit: tl.constexpr = BLOCK_N * BLOCK_M
        base = partials + tile.to(tl.int64) * (NUM_SEGMENTS * unit)
        places = lane[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(base + own * unit + places, gate)
        tl.debug_barrier()  # every thread's sums are written before one thread says so
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") != NUM_SEGMENTS - 1:
            return
        tl.store(counters + tile, 0)
        gate = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        for other in tl.static_range(NUM_SEGMENTS):  # pyright: ignore[reportGeneralTypeIssues]
            gate += tl.load(base + other * unit + places, cache_modifier=".cg")

    if GLU:
        gate = gate / (1.0 + tl.exp(-gate)) * up
    result = tl.trans(gate)  # [BLOCK_M, BLOCK_N]
    outputs = (first + lane)[None, :]
    mask = valid & (outputs < num_outputs)
    if bias is not None:
        result += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)
    if residual is not None:
        where = residual + (tokens.to(tl.int64) * stride_residual)[:, None] + outputs
        result += tl.load(where, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + (tokens.to(tl.int64) * num_outputs)[:, None] + outputs, result, mask=mask)


def fixed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias + residual`, new and contiguous `[num_tokens, out]`.

    Arguments as `kernels.linear.linear`'s. counters: needed where few tokens' segments are summed
    apart, one for each 64 outputs.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or stride.
    """
    num_tokens, num_outputs = check_factors(x, weight)
    out_dtype = check_sum(x, num_outputs, bias=bias, residual=residual, out_dtype=out_dtype)
    out = torch.empty((num_tokens, num_outputs), dtype=out_dtype, device=x.device)
    _launch(x, weight, bias, residual, out, counters, is_glu=False)
    return out


def fixed_gate_up_swiglu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `x @ weight.T`, new and contiguous `[num_tokens, intermediate]`.

    weight: `[2 * intermediate, in]`, the gate's rows first.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or stride.
    """
    num_tokens, width = check_glu(x, weight)
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    _launch(x, weight, None, None, out, None, is_glu=True)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    counters: torch.Tensor | None,
    *,
    is_glu: bool,
) -> None:
    num_tokens, num_outputs = out.shape
    if out.numel() == 0:
        return
    num_inputs = weight.shape[1]
    tiling = _tiling(num_tokens, x.itemsize, is_glu)
    num_segments = _num_segments(num_outputs, num_inputs, is_glu)
    is_apart = num_segments > 1 and num_tokens <= tiling.block_m
    num_tiles = triton.cdiv(num_outputs, tiling.block_n)
    partials = None
    if is_apart:
        counters = take_counters(counters, num_tiles, x.device)
        shape = (num_tiles, num_segments, tiling.block_n, tiling.block_m)
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    pdl = has_pdl(x.device)
    grid = (triton.cdiv(num_tokens, tiling.block_m), num_tiles, num_segments if is_apart else 1)
    _fixed_kernel[grid](
        x,
        weight,
        bias,
        residual,
        out,
        partials,
        counters if is_apart else None,
        num_tokens,
        num_outputs,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        K=num_inputs,
        STRIDE_W=weight.stride(0),
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        NUM_STAGES=tiling.num_stages,
        NUM_SEGMENTS=num_segments,
        APART=is_apart,
        GLU=is_glu,
        PDL=pdl,
        UPCAST=not x.is_cuda,  # the interpreter has no product of bfloat16
        num_warps=tiling.num_warps,
        launch_pdl=pdl,
    )
