"""Host memory in large pages."""

import mmap

import pytest
import torch

from hillstar.engine.pages import zeros


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_of_ones_own_is_zero_and_writable(dtype: torch.dtype) -> None:
    """It starts as zeros, holds what is written, and outlives every other name for it."""
    tensor = zeros((3, 1 << 20), dtype)
    assert tensor.shape == (3, 1 << 20)
    assert tensor.dtype == dtype
    assert not tensor.any()
    row = tensor[1].fill_(2)
    del tensor
    assert float(row.float().sum()) == 2 << 20
    assert zeros((0, 4), dtype).shape == (0, 4)


def test_large_pages_are_a_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that knows no large pages gives memory all the same."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)
    assert not zeros((16,), torch.float32).any()
