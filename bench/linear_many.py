"""Products of many tokens on a GPU: cuBLAS against what replaces it, at the 8B shape.

    python bench/linear_many.py [--ms 128 256 8192] [--out ...]

Figures are microseconds of one call in a replayed CUDA graph, over weights that the L2 cache cannot
hold, each form in turn with the others: at these sizes the device runs at the limit of its power,
and what is timed later is slower. Every form is checked against the library's result.

* glu: the product and `swiglu`, and `linear_dense` (also where the library keeps the tokens).
* o, down: the product, its sum with the residual and a norm, and the product added in place.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from common import finish, report
from gpu_timing import measure_ceilings
from hillstar.kernels.activation import swiglu
from hillstar.kernels.linear_dense import dense_glu
from hillstar.kernels.linear_tuning import DenseTuning
from hillstar.kernels.norm import rms_norm
from linear_cases import DEVICE, EPS, MAX_RELATIVE_ERROR, SHAPES, relative_error

NUM_WEIGHTS = 4  # of gate_up as large as 4 L2 caches
ROUNDS, ROUND_S = 5, 0.005

Form = Callable[[torch.Tensor], torch.Tensor]  # of a weight


def capture(form: Form, weights: list[torch.Tensor]) -> torch.cuda.CUDAGraph:
    """The form with each weight in turn."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        form(weights[0])  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for weight in weights:
            form(weight)
    return graph


def replay_s(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Seconds of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def compare(forms: dict[str, Form], weights: list[torch.Tensor]) -> dict[str, float]:
    """Microseconds of a call of each form, the median of rounds of all of them."""
    graphs = {name: capture(form, weights) for name, form in forms.items()}
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(1 + ROUNDS):
        for name, graph in graphs.items():
            repeats = max(1, int(ROUND_S / replay_s(graph, 1)))
            times[name].append(replay_s(graph, repeats) / len(weights))
    return {name: round(statistics.median(t[1:]) * 1e6, 1) for name, t in times.items()}


def check(name: str, out: torch.Tensor, wanted: torch.Tensor) -> None:
    error = relative_error(out, wanted.float())
    assert error < 2 * MAX_RELATIVE_ERROR, (name, error)  # both are rounded


def glu_us(num_tokens: int, weights: list[torch.Tensor]) -> dict[str, float]:
    x = torch.randn((num_tokens, SHAPES["gate_up"][1]), device=DEVICE).bfloat16()
    forms: dict[str, Form] = {
        "library": lambda weight: swiglu(F.linear(x, weight)),
        "product alone": partial(F.linear, x),
        "dense": lambda weight: dense_glu(x, weight, DenseTuning()),
    }
    check("dense", forms["dense"](weights[0]), forms["library"](weights[0]))
    return compare(forms, weights)


def added_us(shape: str, num_tokens: int, weights: list[torch.Tensor]) -> dict[str, float]:
    num_outputs, num_inputs = SHAPES[shape]
    x = torch.randn((num_tokens, num_inputs), device=DEVICE).bfloat16()
    residual = torch.randn((num_tokens, num_outputs), device=DEVICE).bfloat16()
    norm = torch.ones(num_outputs, device=DEVICE).bfloat16()
    forms: dict[str, Form] = {
        "added apart": lambda w: rms_norm(residual + F.linear(x, w), norm, EPS),
        "added in place": lambda w: rms_norm(residual.addmm_(x, w.T), norm, EPS),
    }
    wanted = forms["added apart"](weights[0])
    check(shape, forms["added in place"](weights[0]), wanted)
    return compare(forms, weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ms", nargs="+", type=int, default=[96, 128, 192, 256, 512, 2048, 8192])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    ceilings = measure_ceilings()
    figures: dict[str, dict[str, float]] = {}
    for shape in ("gate_up", "o", "down"):
        rows, columns = SHAPES[shape]
        scale = columns**-0.5
        weights = [
            (torch.randn((rows, columns), device=DEVICE) * scale).bfloat16()
            for _ in range(NUM_WEIGHTS)
        ]
        for m in options.ms:
            times = glu_us(m, weights) if shape == "gate_up" else added_us(shape, m, weights)
            figures[f"{shape}@{m}"] = times
            print(f"{shape}@{m}: {times}", flush=True)
    checked = f"every form within {2 * MAX_RELATIVE_ERROR} of the library's"
    finish(report(options.seed, ceilings=ceilings, checked=checked, us=figures), options.out)


if __name__ == "__main__":
    main()
