"""RMSNorm, with the residual addition before it fused in (Zhang and Sennrich 2019, section 3).

    residual_out = x + residual                                     (rounded to x's dtype)
    out = round(residual_out / sqrt(mean(residual_out^2) + eps)) * weight

The mean and the quotient are float32, the quotient is rounded to x's dtype before it is
multiplied by the weight: the order in which Llama checkpoints were trained.

Grid `(num_tokens,)`; one program normalises one row, held in registers between its two uses.
Rows may be strided, the last dimension may not. Bytes moved a call:
`num_tokens * hidden * itemsize` times 4 with a residual (2 reads, 2 writes), times 2 without.
Launched while the kernel before still runs, where the device can (`kernels/pdl.py`).
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hillstar.kernels.checks import FLOATS, check_tensor
from hillstar.kernels.jit import jit
from hillstar.kernels.pdl import has_pdl


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of `rms_norm`: same arguments, same result."""
    residual_out = x if residual is None else x + residual
    exact = residual_out.float()
    scale = torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + eps)
    return (exact * scale).to(x.dtype) * weight, residual_out


@jit
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    residual_out: tl.tensor,
    stride_x: tl.tensor,
    stride_residual: tl.tensor,
    hidden: tl.tensor,
    eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    weights = tl.load(weight + columns, mask=mask, other=0.0)
    if PDL:
        gdc_wait()
    row = tl.load(x + token * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        added = tl.load(residual + token * stride_residual + columns, mask=mask, other=0.0)
        rounded = (row + added.to(tl.float32)).to(weights.dtype)
        tl.store(residual_out + token * hidden + columns, rounded, mask=mask)
        row = rounded.to(tl.float32)  # normalise what is stored, not what was rounded away
    scale = 1.0 / tl.sqrt(tl.sum(row * row, axis=0) / hidden + eps)
    normal = (row * scale).to(weights.dtype).to(tl.float32)
    tl.store(out + token * hidden + columns, normal * weights.to(tl.float32), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise `x + residual` (or `x`) and return it with the sum.

    x, residual: `[num_tokens, hidden]`, rows may be strided. weight: `[hidden]`. All of one
    dtype: float32, bfloat16 or float16.

    Returns `(out, residual_out)`, both new and contiguous `[num_tokens, hidden]`; without a
    residual, `residual_out` is `x` itself. The arguments are left unchanged.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or stride.
    """
    check_tensor("x", x, shape=(None, None), dtypes=FLOATS, device=x.device)
    num_tokens, hidden = x.shape
    check_tensor("weight", weight, shape=(hidden,), dtypes=(x.dtype,), device=x.device)
    if residual is not None:
        check_tensor(
            "residual", residual, shape=(num_tokens, hidden), dtypes=(x.dtype,), device=x.device
        )
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    residual_out = x if residual is None else torch.empty_like(out)
    if out.numel() == 0:
        return out, residual_out
    block = triton.next_power_of_2(hidden)
    pdl = has_pdl(x.device)
    _rms_norm_kernel[(num_tokens,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        residual_out,
        x.stride(0),
        x.stride(0) if residual is None else residual.stride(0),
        hidden,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=max(1, min(16, block // 512)),
    )
    return out, residual_out
