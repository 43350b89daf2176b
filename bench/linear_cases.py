"""The products of the 8B shape as benchmark cases: shapes, weights, calls, ahead compilation."""

import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from hillstar.kernels.linear import gate_up_swiglu, linear
from hillstar.kernels.linear_tuning import Tuning, choose_tuning

DEVICE = "cuda"
NUM_LAYERS, EPS = 32, 1e-5
SHAPES = {  # weight rows, columns
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}
MAX_RELATIVE_ERROR = 5e-3  # of the whole result: bfloat16 rounds each element by up to 2^-8

Weights = dict[str, list[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """One compiled form of a product: what decides which kernel it is."""

    shape: str
    num_tokens: int
    tuning: Tuning
    has_norm: bool = False
    has_residual: bool = False


def default_tuning(shape: str, num_tokens: int) -> Tuning | None:
    """The library's own choice for one of the shapes."""
    num_rows, num_columns = SHAPES[shape]
    is_glu = shape == "gate_up"
    return choose_tuning(num_tokens, num_rows // 2 if is_glu else num_rows, num_columns, glu=is_glu)


def make_counters() -> torch.Tensor:
    """Zeros for any split product of the shapes."""
    return torch.zeros(4096, dtype=torch.int32, device=DEVICE)


def product(
    case: Case, x: torch.Tensor, weight: torch.Tensor, counters: torch.Tensor, **given: Any
) -> torch.Tensor:
    """The case's call; `given` are the norm's weight and the residual."""
    if case.shape == "gate_up":
        return gate_up_swiglu(x, weight, tuning=case.tuning, eps=EPS, **given)
    return linear(x, weight, tuning=case.tuning, counters=counters, eps=EPS, **given)


def compile_case(case: Case) -> tuple[Case, str]:
    """In a pool process: compile by running on a few rows; what went wrong, or nothing."""
    num_columns = SHAPES[case.shape][1]
    few = {"dtype": torch.bfloat16, "device": DEVICE}
    num_rows = 512
    x = torch.zeros((case.num_tokens, num_columns), **few)
    weight = torch.zeros((num_rows, num_columns), **few)
    given: dict[str, torch.Tensor] = {}
    if case.has_norm:
        given["norm_weight"] = torch.zeros(num_columns, **few)
    if case.has_residual:
        given["residual"] = torch.zeros((case.num_tokens, num_rows), **few)
    try:
        product(case, x, weight, make_counters(), **given)
        torch.cuda.synchronize()
    except Exception as error:  # a tuning that does not fit the device is a result, too
        return case, f"{type(error).__name__}: {str(error)[:200]}"
    return case, ""


def compile_all(pool: ProcessPoolExecutor, cases: list[Case]) -> list[Case]:
    """Those that compile; the others are named. Equal kernels are compiled once."""
    start = time.perf_counter()
    kernels = {case: _kernel(case) for case in cases}
    problems = dict(pool.map(compile_case, dict.fromkeys(kernels.values())))
    for kernel, problem in problems.items():
        if problem:
            print(f"does not run: {kernel}: {problem}")
    print(f"compiled {len(problems)} kernels in {time.perf_counter() - start:.1f} s", flush=True)
    return [case for case, kernel in kernels.items() if not problems[kernel]]


def _kernel(case: Case) -> Case:
    """The same for all cases that are one compiled kernel: it does not depend on the rows."""
    shape = case.shape if case.shape in ("gate_up", "down") else "o"
    return replace(case, shape=shape, num_tokens=case.tuning.block_m)


def make_weights(shapes: Iterable[str]) -> Weights:
    """Random weights of every layer (the last product: of one)."""
    return {
        shape: [
            torch.empty(SHAPES[shape], dtype=torch.bfloat16, device=DEVICE).normal_(
                std=SHAPES[shape][1] ** -0.5
            )
            for _ in range(1 if shape == "lm_head" else NUM_LAYERS)
        ]
        for shape in shapes
    }


def relative_error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((out.float() - wanted.float()).norm() / wanted.float().norm())
