"""How much memory is free, for whoever sizes something by it."""

import mmap
from pathlib import Path

import pytest
import torch

from hillstar.engine.memory import free_memory_bytes, zeros


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


def test_free_memory_respects_the_containers_limit(tmp_path: Path) -> None:
    """The smaller of what the kernel says and what the group may still take, files given back."""
    assert free_memory_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9999 kB\nMemAvailable:    8000 kB\n")
    assert free_memory_bytes(tmp_path) == 8000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    (group / "memory.stat").write_text("anon 300\nfile 700\nactive_file 200\ninactive_file 400\n")
    assert free_memory_bytes(tmp_path) == 8000 * 1024
    (group / "memory.max").write_text("5000000\n")
    assert free_memory_bytes(tmp_path) == 4_999_600
    (group / "memory.max").write_text("300\n")
    assert free_memory_bytes(tmp_path) == 0
