"""How much of the machine's RAM can still be taken."""

from pathlib import Path


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """What the kernel calls available, within the container's limit; None: it does not say.

    What a container has read of files counts as used there, and can be had like free memory.
    """
    try:
        fields = _numbers(root / "proc/meminfo")
        available = fields["MemAvailable:"] * 1024
    except (OSError, KeyError):
        return None
    group = root / "sys/fs/cgroup"
    try:
        limit = int((group / "memory.max").read_text())  # "max": there is none
        used = int((group / "memory.current").read_text())
        files = _numbers(group / "memory.stat")
    except (OSError, ValueError):
        return available
    cached = files.get("active_file", 0) + files.get("inactive_file", 0)
    return max(0, min(available, limit - max(0, used - cached)))


def _numbers(path: Path) -> dict[str, int]:
    """The file's lines `name number …`. Raises OSError."""
    pairs = (line.split()[:2] for line in path.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
