"""RMSNorm (Zhang and Sennrich 2019, section 3).

    out = round(x / sqrt(mean(x^2) + eps)) * weight

The mean and the quotient are float32, the quotient is rounded to x's dtype before it is
multiplied by the weight: the order in which Llama checkpoints were trained.

Grid `(num_tokens,)`; one program normalises one row, held in registers between its two uses.
Rows may be strided, the last dimension may not. Bytes moved a call:
`2 * num_tokens * hidden * itemsize`.
Launched while the kernel before still runs, where the device can (`kernels/pdl.py`).
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hillstar.kernels.checks import FLOATS, check_tensor
from hillstar.kernels.jit import jit
from hillstar.kernels.pdl import has_pdl


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The specification of `rms_norm`: same arguments, same result."""
    exact = x.float()
    scale = torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + eps)
    return (exact * scale).to(x.dtype) * weight


@jit
def _rms_norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    stride_x: tl.tensor,
    hidden: tl.tensor,
    eps: tl.tensor,
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
    scale = 1.0 / tl.sqrt(tl.sum(row * row, axis=0) / hidden + eps)
    normal = (row * scale).to(weights.dtype).to(tl.float32)
    tl.store(out + token * hidden + columns, normal * weights.to(tl.float32), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise x: new and contiguous `[num_tokens, hidden]`.

    x: `[num_tokens, hidden]`, rows may be strided; left unchanged. weight: `[hidden]`. Both of one
    dtype: float32, bfloat16 or float16.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or stride.
    """
    check_tensor("x", x, shape=(None, None), dtypes=FLOATS, device=x.device)
    num_tokens, hidden = x.shape
    check_tensor("weight", weight, shape=(hidden,), dtypes=(x.dtype,), device=x.device)
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block = triton.next_power_of_2(hidden)
    pdl = has_pdl(x.device)
    _rms_norm_kernel[(num_tokens,)](
        x,
        weight,
        out,
        x.stride(0),
        hidden,
        eps,
        BLOCK=block,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=max(1, min(16, block // 512)),
    )
    return out
