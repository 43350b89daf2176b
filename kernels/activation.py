"""SwiGLU: `silu(gate) * up` (Shazeer 2020, "GLU Variants Improve Transformer", section 2).

silu(x) = x / (1 + exp(-x)), in float32; the product is rounded once, to the input's dtype.

Grid `(num_tokens, ceil(intermediate / 1024))`; one program computes 1024 columns of one row.
Input rows are `gate | up` (they may be strided), the output is contiguous. Bytes moved a call:
`3 * num_tokens * intermediate * itemsize` (2 reads, 1 write).
"""

import torch
import triton
import triton.language as tl

from hillstar.kernels.checks import FLOATS, check_tensor
from hillstar.kernels.jit import jit


def swiglu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The specification of `swiglu`: same argument, same result."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


@jit
def _swiglu_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    intermediate: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < intermediate
    row = gate_up + token * stride
    gate = tl.load(row + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + intermediate + columns, mask=mask, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * intermediate + columns, product, mask=mask)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, new and contiguous `[num_tokens, intermediate]`.

    gate_up: `[num_tokens, 2 * intermediate]`, gate first; float32, bfloat16 or float16; rows may
    be strided. Left unchanged.

    Raises:
        ValueError: the argument has a wrong shape, dtype or stride.
    """
    check_tensor("gate_up", gate_up, shape=(None, None), dtypes=FLOATS, device=gate_up.device)
    num_tokens, width = gate_up.shape
    if width % 2:
        raise ValueError(f"gate_up: {width} columns; expected an even number, gate and up")
    out = torch.empty((num_tokens, width // 2), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    block = min(1024, triton.next_power_of_2(width // 2))
    grid = (num_tokens, triton.cdiv(width // 2, block))
    _swiglu_kernel[grid](gate_up, out, gate_up.stride(0), width // 2, BLOCK=block, num_warps=4)
    return out
