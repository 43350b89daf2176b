"""How much memory is free, for whoever sizes something by it."""

from pathlib import Path

from hillstar.engine.memory import free_memory_bytes


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
