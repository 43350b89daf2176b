"""What every benchmark reports beside its figures: the machine, the versions, the commit."""

import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "transformers", "numpy")


def machine() -> dict[str, Any]:
    """GPU and driver where there is one, CPU model and cores always."""
    cpu = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    found: dict[str, Any] = {"cpu": cpu, "cores": os.cpu_count()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["driver"] = _output(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        )
    return found


def report(seed: int, **figures: Any) -> dict[str, Any]:
    """The result object of BARS-style files: machine, versions, commit, date, seed, figures."""
    return {
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{p: version(p) for p in PACKAGES}},
        "commit": os.environ.get("HILLSTAR_COMMIT") or _output(["git", "rev-parse", "HEAD"]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seed": seed,
        **figures,
    }


def finish(result: dict[str, Any], out: Path | None) -> None:
    """Write the result file and print the object as the last line."""
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def median_s(run: Callable[[], object], repeats: int = 5, warmup: int = 1) -> float:
    """The median wall time of `run` in seconds; the caller synchronises inside `run`."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
