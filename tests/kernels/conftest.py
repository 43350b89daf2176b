"""Kernel tests run compiled where there is a CUDA device, in Triton's interpreter elsewhere.

`tests/conftest.py` sets Triton's variable before anything imports it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run: compiled on CUDA, interpreted on the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    """A seeded source of test data on the device."""
    return torch.Generator(device=device).manual_seed(20260)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what launchers allocate with NaN (or -1): a place that no kernel writes is seen."""
    for name in ("empty", "empty_like"):
        allocate = getattr(torch, name)

        def poisoned(*args: Any, _allocate: Any = allocate, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = _allocate(*args, **kwargs)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else -1)

        monkeypatch.setattr(torch, name, poisoned)


@pytest.fixture(scope="session")
def moved(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """A tensor on the device with the same strides: `to` would make it contiguous."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        there = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
        )
        return there.copy_(tensor)

    return move
