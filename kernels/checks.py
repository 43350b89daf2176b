"""What every launcher checks before it launches: a wrong argument is a `ValueError`, named.

A kernel that is handed the wrong shape, dtype or stride reads and writes memory that is not its
own; these checks are the only thing between a caller's slip and a corrupted cache.
"""

from collections.abc import Sequence

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    contiguous: bool = False,
) -> None:
    """Check one argument; `None` in `shape` stands for any size.

    The last dimension must always be contiguous (stride 1), all of them with `contiguous`.

    Raises:
        ValueError: names the argument, what it is and what is expected.
    """
    if tensor.dim() != len(shape) or any(
        want is not None and have != want for have, want in zip(tensor.shape, shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: shape is {tuple(tensor.shape)}; expected ({wanted})")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name}: dtype is {tensor.dtype}; expected {names}")
    if tensor.device != device:
        raise ValueError(f"{name}: device is {tensor.device}; expected {device}")
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: last stride is {tensor.stride(-1)}; expected 1")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name}: strides are {tensor.stride()}; expected contiguous")


def take_counters(given: torch.Tensor | None, needed: int, device: torch.device) -> torch.Tensor:
    """Counters of programs that wait for each other: those given, checked, or new ones, zeros.

    Raises:
        ValueError: those given are no int32, on another device, or fewer than `needed`.
    """
    if given is None:
        return torch.zeros(needed, dtype=torch.int32, device=device)
    check_tensor("counters", given, shape=(None,), dtypes=(torch.int32,), device=device)
    if given.numel() < needed:
        raise ValueError(f"counters: {given.numel()} elements; expected at least {needed}")
    return given
