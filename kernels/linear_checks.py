"""What the launchers of products check (`kernels/linear.py`, `kernels/linear_fixed.py`)."""

import torch

from hillstar.kernels.checks import FLOATS, check_tensor


def check_factors(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int]:
    """Of `x @ weight.T`; the number of tokens and of weight rows."""
    check_tensor("x", x, shape=(None, None), dtypes=FLOATS, device=x.device)
    num_tokens, num_inputs = x.shape
    shape = (None, num_inputs)
    check_tensor("weight", weight, shape=shape, dtypes=(x.dtype,), device=x.device)
    return num_tokens, weight.shape[0]


def check_glu(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int]:
    """Of a gate and an up product in one; the number of tokens and of columns of the result."""
    num_tokens, num_rows = check_factors(x, weight)
    if num_rows % 2:
        raise ValueError(f"weight: {num_rows} rows; expected an even number, gate and up")
    return num_tokens, num_rows // 2


def check_sum(
    x: torch.Tensor,
    num_outputs: int,
    *,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.dtype:
    """What is added to a product of x, and the dtype of the result: x's unless another is asked
    for."""
    if bias is not None:
        check_tensor("bias", bias, shape=(num_outputs,), dtypes=(x.dtype,), device=x.device)
    if residual is not None:
        shape = (len(x), num_outputs)
        check_tensor("residual", residual, shape=shape, dtypes=(x.dtype,), device=x.device)
    out_dtype = out_dtype or x.dtype
    if out_dtype not in (x.dtype, torch.float32):
        raise ValueError(f"out_dtype: {out_dtype}; expected {x.dtype} or torch.float32")
    return out_dtype
