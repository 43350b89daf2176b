"""What a call takes on a GPU, and what the GPU could do at best in the same run."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """A call to time: `runs` are the same call on different memory, `num_bytes` each moves."""

    runs: list[Callable[[], object]]
    num_bytes: int


def time_s(runs: list[Callable[[], object]], repeats: int = 15) -> float:
    """Median seconds of one call: the calls are captured once and replayed as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in runs:  # compiles, and warms the allocator
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for run in runs:
            run()
    times = []
    for repeat in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end) / 1e3 / len(runs))
    return statistics.median(times)


class Table:
    """Times calls, prints a line for each and keeps the figures."""

    def __init__(self, copy_bytes_s: float) -> None:
        self._copy_bytes_s = copy_bytes_s
        self.figures: dict[str, dict[str, float]] = {}

    def add(self, name: str, timing: Timing) -> None:
        seconds = time_s(timing.runs)
        rate = timing.num_bytes / seconds
        figure = {
            "us": round(seconds * 1e6, 2),
            "TBps": round(rate / 1e12, 3),
            "share": round(rate / self._copy_bytes_s, 3),
        }
        self.figures[name] = figure
        print(f"{name:44}", "  ".join(f"{key} {value:>9}" for key, value in figure.items()))


def measure_ceilings() -> dict[str, float]:
    """TB a second of a device copy, TFLOP a second of a large product."""
    ceilings = {
        "copy_TBps": copy_ceiling_bytes_s() / 1e12,
        "bf16_TFLOPs": matmul_ceiling_flop_s() / 1e12,
    }
    print(f"ceilings: {ceilings}")
    return {name: round(value, 3) for name, value in ceilings.items()}


def copy_ceiling_bytes_s() -> float:
    """Bytes read and written a second by a device copy of 2 GiB of random data, median of 20."""
    source = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.numel() / statistics.median(times)


def matmul_ceiling_flop_s() -> float:
    """FLOP a second of a bf16 product of two random 8192 x 8192 matrices."""
    a, b = torch.randn((2, 8192, 8192), device="cuda").bfloat16()
    return 2 * 8192**3 / time_s([lambda: a @ b] * 4)
