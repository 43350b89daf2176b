"""What this machine has, asked without loading torch into this process."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hillstar.cli.report import CommandError

_BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})  # x86 and Arm
_GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # Linux, and Linux under Windows
_PROBE = """
import json, torch
ok = torch.cuda.is_available()
free = torch.cuda.mem_get_info()[0] if ok else 0
print(json.dumps({"name": torch.cuda.get_device_name() if ok else None, "free_bytes": free}))
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The CUDA device that torch takes first."""

    name: str
    free_bytes: int


def find_gpu() -> Gpu | None:
    """The CUDA GPU, or None. A child asks, so that no CUDA context stays in this process."""
    if not any(path.exists() for path in _GPU_FILES):
        return None
    child = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True)
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or ["no output"])[-1]
        raise CommandError(f"device: torch cannot be asked for a GPU: {last}")
    answer = json.loads(child.stdout)
    return Gpu(answer["name"], answer["free_bytes"]) if answer["name"] else None


def cpu_multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU has bfloat16 products in hardware."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = {
        flag
        for line in lines
        if line.lower().startswith(("flags", "features"))
        for flag in line.partition(":")[2].split()
    }
    return not flags.isdisjoint(_BF16_FLAGS)
