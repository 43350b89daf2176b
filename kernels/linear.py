"""Products of few tokens with a weight matrix, bound by reading the weights once.

    linear:         out = norm(x) W^T (+ bias) (+ residual)
    gate_up_swiglu: out = silu(g) * u,  (g | u) = norm(x) W^T     (Shazeer 2020, section 2)

Sums are float32, and what is added or multiplied after them joins before the one rounding to the
result's dtype. A decode step reads every weight and computes next to nothing, so the only aim is
to keep the memory busy from the first microsecond of a launch to the last: one token goes to
`linear_vector`, up to 64 to the tensor cores in `linear_tile`, more to cuBLAS (and 128 or 256 of a
GLU to `linear_dense`). The weights are `[out, in]`, row-major. Bytes moved a call: the weight once,
`num_tokens * in` inputs (out of the L2 cache, for every program again), `num_tokens * out` outputs
(and residuals).

The norm prologue. norm(x) is `x * norm_weight / sqrt(mean(x^2) + eps)` (Zhang and Sennrich 2019),
or x without `norm_weight`. A row's quotient is one number, so it moves behind the product:
`W (x * norm_weight) * rstd`. Each program reads all of x anyway and sums the squares on the way.
`rms_norm` rounds x * rstd, and its product with the weight; here one token is not rounded at all,
and more are rounded once, as `x * norm_weight`: each input is within half a unit in the last
place (2^-9 in bfloat16) of the exact norm, closer to it than `rms_norm` is.
"""

import torch
import torch.nn.functional as F
import triton

from hillstar.kernels.activation import swiglu
from hillstar.kernels.checks import check_tensor, take_counters
from hillstar.kernels.linear_checks import check_factors, check_glu, check_sum
from hillstar.kernels.linear_dense import can_describe, dense_glu
from hillstar.kernels.linear_tile import tile_kernel
from hillstar.kernels.linear_tuning import Tuning, choose_dense_glu, choose_tuning
from hillstar.kernels.linear_vector import vector_kernel
from hillstar.kernels.norm import rms_norm
from hillstar.kernels.pdl import has_pdl


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The specification of `linear`: same arguments, same result."""
    out = _exact_norm(x, norm_weight, eps) @ weight.float().T
    if bias is not None:
        out += bias.float()
    if residual is not None:
        out += residual.float()
    return out.to(out_dtype or x.dtype)


def gate_up_swiglu_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """The specification of `gate_up_swiglu`: same arguments, same result."""
    gate, up = (_exact_norm(x, norm_weight, eps) @ weight.float().T).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def _exact_norm(x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    exact = x.float()
    if norm_weight is None:
        return exact
    scale = torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + eps)
    return exact * scale * norm_weight.float()


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    out_dtype: torch.dtype | None = None,
    tuning: Tuning | None = None,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """`norm(x) @ weight.T + bias + residual`, new and contiguous `[num_tokens, out]`.

    x: `[num_tokens, in]`; weight: `[out, in]`; both may have strided rows. bias: `[out]`;
    residual: `[num_tokens, out]`, rows may be strided; norm_weight: `[in]`. All of one dtype:
    float32, bfloat16 or float16. eps: of the norm, unused without `norm_weight`.
    out_dtype: of the result, x's dtype or float32; by default x's.
    tuning: by default the measured choice for the shape, which may be cuBLAS.
    counters: int32, zeros, one for each tile of a split product; left zero, so that one tensor
    serves all products of a stream. Without it a split product makes its own.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or stride, or the tuning does
            not fit the call.
    """
    num_tokens, num_outputs = check_factors(x, weight)
    _check_norm(x, norm_weight)
    out_dtype = check_sum(x, num_outputs, bias=bias, residual=residual, out_dtype=out_dtype)
    tuning = tuning or choose_tuning(num_tokens, num_outputs, weight.shape[1], itemsize=x.itemsize)
    if tuning is None:
        return _library_linear(x, weight, bias, residual, norm_weight, eps, out_dtype)
    out = torch.empty((num_tokens, num_outputs), dtype=out_dtype, device=x.device)
    _launch(x, weight, norm_weight, bias, residual, out, eps, tuning, counters, is_glu=False)
    return out


def gate_up_swiglu(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    tuning: Tuning | None = None,
) -> torch.Tensor:
    """`silu(gate) * up` of `norm(x) @ weight.T`, new and contiguous `[num_tokens, intermediate]`.

    x: `[num_tokens, in]`; weight: `[2 * intermediate, in]`, the gate's rows first; norm_weight:
    `[in]`. All of one dtype: float32, bfloat16 or float16. eps and tuning: as `linear`'s; the
    columns of this product are never split.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or stride, or the tuning does
            not fit the call.
    """
    num_tokens, width = check_glu(x, weight)
    _check_norm(x, norm_weight)
    tuning = tuning or choose_tuning(
        num_tokens, width, weight.shape[1], itemsize=x.itemsize, glu=True
    )
    if tuning is None:
        normed = x if norm_weight is None else rms_norm(x, norm_weight, eps)
        dense = choose_dense_glu(num_tokens, width)
        if dense is None or not can_describe(normed, weight):
            return swiglu(F.linear(normed, weight))
        return dense_glu(normed, weight, dense)
    if tuning.num_splits > 1:
        raise ValueError(f"tuning: num_splits is {tuning.num_splits}; expected 1 for a GLU")
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    _launch(x, weight, norm_weight, None, None, out, eps, tuning, None, is_glu=True)
    return out


def _check_norm(x: torch.Tensor, norm_weight: torch.Tensor | None) -> None:
    if norm_weight is not None:
        shape = (x.shape[1],)
        check_tensor("norm_weight", norm_weight, shape=shape, dtypes=(x.dtype,), device=x.device)


def _library_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The product as cuBLAS does it, the norm before it as a kernel of its own."""
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    if out_dtype != x.dtype:
        out = _wide_product(x, weight)
        for term in (bias, residual):
            if term is not None:
                out += term
        return out
    if residual is None:
        return F.linear(x, weight, bias)
    if bias is not None:
        residual = residual + bias
    return torch.addmm(residual, x, weight.T)


def _wide_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T` with its float32 sums as they are; torch has that on CUDA only."""
    if x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    tuning: Tuning,
    counters: torch.Tensor | None,
    *,
    is_glu: bool,
) -> None:
    """Fill `out` with one launch of the kernel that `tuning` names."""
    num_tokens, num_outputs = out.shape
    if num_tokens > tuning.block_m or (tuning.block_m == 1 and tuning.num_splits > 1):
        raise ValueError(f"tuning: {tuning} does not fit {num_tokens} tokens")
    if out.numel() == 0:
        return
    num_inputs, stride = weight.shape[1], weight.stride(0)
    num_tiles = triton.cdiv(num_outputs, tuning.block_n)
    pdl = tuning.pdl and has_pdl(x.device)
    shared = {
        "K": num_inputs,
        "STRIDE_W": stride,
        "BLOCK_N": tuning.block_n,
        "BLOCK_K": tuning.block_k,
        "NUM_STAGES": tuning.num_stages,
        "GLU": is_glu,
        "PDL": pdl,
        "num_warps": tuning.num_warps,
        "launch_pdl": pdl,
    }
    if tuning.block_m == 1:
        vector_kernel[(num_tiles,)](
            x, weight, norm_weight, bias, residual, out, num_outputs, eps, **shared
        )
        return
    partials = None
    if tuning.num_splits > 1:
        counters = take_counters(counters, num_tiles, x.device)
        shape = (num_tiles, tuning.num_splits, tuning.block_n + 1, tuning.block_m)
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    aligned = all(n * x.itemsize % 16 == 0 for n in (num_inputs, stride))
    prefetch = tuning.block_k * tuning.num_stages if aligned and weight.data_ptr() % 16 == 0 else 0
    tile_kernel[(num_tiles, tuning.num_splits)](
        x,
        weight,
        norm_weight,
        bias,
        residual,
        out,
        partials,
        counters if tuning.num_splits > 1 else None,
        num_tokens,
        num_outputs,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        BLOCK_M=tuning.block_m,
        NUM_SPLITS=tuning.num_splits,
        PREFETCH=prefetch if pdl else 0,
        ITEMSIZE=x.itemsize,
        UPCAST=not x.is_cuda,  # the interpreter has no product of bfloat16
        **shared,
    )
