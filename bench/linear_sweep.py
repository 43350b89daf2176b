"""The skinny products of the 8B shape under many tunings, beside cuBLAS, on a GPU.

    python bench/linear_sweep.py --out bench/results/h200-linear.json
    python bench/linear_sweep.py --shapes qkv o --ms 1 16

A figure is the median time of a call inside a replayed CUDA graph whose calls walk the weights of
all layers, far more than the L2 cache holds. Kernels are compiled ahead by a pool of processes.
Every variant is checked against the reference, and run twice for equal bits. The best plain
variants of a case are tried again with programmatic dependent launch; there a call overlaps with
the one before it, as in a step. Last come sequences of a decode step: norms apart or folded in.
"""

import argparse
import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from common import finish, report
from gpu_timing import copy_ceiling_bytes_s, time_s
from hillstar.kernels.activation import swiglu
from hillstar.kernels.linear import gate_up_swiglu_reference, linear_reference
from hillstar.kernels.linear_tuning import Tuning
from linear_cases import (
    DEVICE,
    MAX_RELATIVE_ERROR,
    SHAPES,
    Case,
    Weights,
    compile_all,
    default_tuning,
    make_counters,
    make_weights,
    product,
    relative_error,
)
from linear_chain import LAYER_SHAPES, Chain, Chosen, chain_cases, sequences

NUM_RETRIED = 2  # best plain variants of a case, tried with programmatic dependent launch
TUNING_FIELDS = [field.name for field in fields(Tuning)]


def vector_tunings(num_columns: int, is_glu: bool) -> Iterator[Tuning]:
    """For one token: (rows, columns, warps, stages)."""
    short = [(2, 4096, 2, 1), (2, 4096, 4, 1), (4, 4096, 4, 1), (4, 4096, 8, 1), (8, 4096, 8, 1)]
    if is_glu:
        cuts = [*short, (1, 4096, 2, 1), (8, 4096, 16, 1), (4, 2048, 4, 1), (4, 1024, 4, 3)]
    elif num_columns <= 4096:
        cuts = [*short, (8, 4096, 4, 1), (16, 4096, 8, 1), (8, 2048, 4, 1), (8, 1024, 4, 4)]
    else:
        cuts = [(4, 2048, 4, 1), (8, 2048, 8, 1), (8, 1024, 4, 1), (4, 2048, 4, 4), (8, 1024, 4, 5)]
        cuts += [(2, 16384, 8, 1), (1, 16384, 8, 1), (2, 16384, 16, 1), (4, 16384, 16, 1)]
    for block_n, block_k, num_warps, num_stages in cuts:
        yield Tuning(1, block_n, block_k, num_warps, num_stages)


def tile_tunings(shape: str, num_tokens: int) -> Iterator[Tuning]:
    """For several tokens: (rows, columns, warps, stages) and splits."""
    few = num_tokens <= 16
    if shape == "gate_up":
        cuts = [(64, 128, 4, 3), (64, 64, 4, 5), (32, 128, 4, 4), (32, 256, 4, 2), (128, 64, 8, 3)]
        cuts += [(16, 256, 2, 3), (64, 128, 8, 3)] if few else [(128, 64, 8, 4)]
        splits: tuple[int, ...] = (1,)
    elif shape == "lm_head":
        cuts = [(64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 4, 3), (128, 128, 8, 4)]
        cuts += [(128, 64, 4, 6), (256, 64, 8, 4)]
        splits = (1,)
    else:
        cuts = [(64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 4, 4), (128, 128, 8, 3)]
        splits = (2, 4, 8) if shape == "down" else (1, 2, 4)
    block_m = max(16, 1 << (num_tokens - 1).bit_length())
    for block_n, block_k, num_warps, num_stages in cuts:
        for num_splits in splits:
            yield Tuning(block_m, block_n, block_k, num_warps, num_stages, num_splits)
    if few and len(splits) > 1:  # small tiles that need no split
        yield Tuning(block_m, 16, 256, 1, 4)
        yield Tuning(block_m, 32, 256, 2, 4)
        yield Tuning(block_m, 32, 256, 4, 5)
    if num_tokens <= 8:
        yield Tuning(8, 64, 128, 4, 5, splits[-1])
        yield Tuning(8, 32, 256, 4, 4)


def tunings(shape: str, num_tokens: int) -> list[Tuning]:
    """What the sweep tries for one shape; the chosen tuning is always among it."""
    found = [*tile_tunings(shape, num_tokens)]
    if num_tokens == 1:
        found = [*vector_tunings(SHAPES[shape][1], shape == "gate_up"), found[0], found[1]]
    chosen = default_tuning(shape, num_tokens)
    return [*dict.fromkeys([*found, *([replace(chosen, pdl=False)] if chosen else [])])]


class Sweep:
    """Times the cases of one shape and number of tokens after the other."""

    def __init__(self, weights: Weights, copy_bytes_s: float) -> None:
        self.weights = weights
        self._copy_bytes_s = copy_bytes_s
        self._counters = make_counters()
        self.figures: dict[str, dict[str, Any]] = {}
        self.wrong: list[Case] = []

    def time(self, shape: str, num_tokens: int, cases: list[Case]) -> list[Tuning]:
        """Check and time the cases and, at first, cuBLAS; the cases' tunings, best first."""
        weights = self.weights[shape]
        x = torch.randn((num_tokens, SHAPES[shape][1]), device=DEVICE).bfloat16()
        num_bytes = weights[0].nbytes + x.nbytes + num_tokens * SHAPES[shape][0] * 2
        key = f"{shape}@{num_tokens}"
        if key not in self.figures:
            runs = [partial(library_product, shape, x, weight) for weight in self._cycle(weights)]
            self.figures[key] = {"cublas_us": round(time_s([*runs]) * 1e6, 2), "variants": []}
        figure = self.figures[key]
        check = gate_up_swiglu_reference if shape == "gate_up" else linear_reference
        wanted = check(x, weights[-1])
        for case in cases:
            call = partial(product, case, x, counters=self._counters)
            out, again = call(weight=weights[-1]), call(weight=weights[-1])
            error = relative_error(out, wanted)
            if not error < MAX_RELATIVE_ERROR or not torch.equal(out, again):
                print(f"wrong result: {case}, error {error}")
                self.wrong.append(case)
                continue
            seconds = time_s([partial(call, weight=weight) for weight in self._cycle(weights)], 9)
            rate = num_bytes / seconds
            figure["variants"].append(
                {
                    **asdict(case.tuning),
                    "us": round(seconds * 1e6, 2),
                    "TBps": round(rate / 1e12, 3),
                    "share": round(rate / self._copy_bytes_s, 3),
                }
            )
        ranked = sorted(figure["variants"], key=lambda variant: variant["us"])
        figure["variants"], figure["best"] = ranked, ranked[:1]
        tried = [Tuning(**{name: variant[name] for name in TUNING_FIELDS}) for variant in ranked]
        return [tuning for tuning in tried if tuning in {case.tuning for case in cases}]

    def show(self) -> None:
        print("case          cuBLAS |  best plain: us  TB/s share | with pdl | tuning of each")
        for key, figure in self.figures.items():
            best = {
                pdl: next((v for v in figure["variants"] if v["pdl"] == pdl), None)
                for pdl in (False, True)
            }
            print(f"{key:12} {figure['cublas_us']:7.2f}", end="")
            for variant in best.values():
                if variant is not None:
                    cut = [variant[name] for name in TUNING_FIELDS[:-1]]
                    print(
                        f" | {variant['us']:7.2f} {variant['TBps']:.3f} {variant['share']:.2f}",
                        "x".join(map(str, cut)),
                        end="",
                    )
            print()

    @staticmethod
    def _cycle(weights: list[torch.Tensor]) -> list[torch.Tensor]:
        return weights * (4 if len(weights) == 1 else 1)


def library_product(shape: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = F.linear(x, weight)
    return swiglu(out) if shape == "gate_up" else out


def sweep_all(
    pool: ProcessPoolExecutor, sweep: Sweep, pairs: list[tuple[str, int]]
) -> dict[tuple[str, int, bool], Tuning]:
    """Time every variant; the best tuning of a shape, a number of tokens, without and with pdl."""
    cases = [Case(shape, m, tuning) for shape, m in pairs for tuning in tunings(shape, m)]
    best: dict[tuple[str, int, bool], Tuning] = {}
    for pdl in (False, True):
        fits = compile_all(pool, cases)
        cases = []
        for shape, m in pairs:
            ranked = sweep.time(
                shape, m, [c for c in fits if (c.shape, c.num_tokens) == (shape, m)]
            )
            if not ranked:
                continue
            best[shape, m, pdl] = ranked[0]
            retried = ranked[: NUM_RETRIED * (2 if m == 1 else 1)]
            cases += [Case(shape, m, replace(tuning, pdl=True)) for tuning in retried]
        sweep.show()
    return best


def chosen_for(m: int, best: dict[tuple[str, int, bool], Tuning]) -> Chosen:
    """The best tunings that the sweep found, or the default choice where it did not look."""
    chosen = {}
    for shape in SHAPES:
        for pdl in (False, True):
            tuning = best.get((shape, m, pdl)) or default_tuning(shape, m)
            assert tuning is not None, f"{shape}: no kernel for {m} tokens"
            chosen[shape, pdl] = replace(tuning, pdl=pdl)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES], choices=SHAPES)
    parser.add_argument("--ms", nargs="+", type=int, default=[1, 4, 16, 32, 64])
    parser.add_argument("--chain", nargs="*", type=int, default=[1, 16], help="tokens of sequences")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    pairs = [(shape, m) for shape in options.shapes for m in options.ms]
    num_workers = max(1, min(14, (os.cpu_count() or 2) - 1))
    with ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn")) as pool:
        copy_bytes_s = copy_ceiling_bytes_s()
        print(f"copy {copy_bytes_s / 1e12:.3f} TB/s", flush=True)
        layers = LAYER_SHAPES if options.chain else ()
        weights = make_weights(dict.fromkeys([*options.shapes, *layers]))
        sweep = Sweep(weights, copy_bytes_s)
        best = sweep_all(pool, sweep, pairs)
        chosen = {m: chosen_for(m, best) for m in options.chain}
        compile_all(pool, [case for m in options.chain for case in chain_cases(m, chosen[m])])
    figures = {str(m): sequences(m, Chain.make(weights, chosen[m])) for m in options.chain}
    for m, times in figures.items():
        print(f"tokens {m}:", times)
    result = report(
        options.seed,
        ceilings={"copy_TBps": round(copy_bytes_s / 1e12, 3)},
        checked=f"every variant within {MAX_RELATIVE_ERROR} of the reference (norm of the error "
        "over norm), bits equal in two runs; chains against the references",
        products=sweep.figures,
        sequences_us=figures,
    )
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    short = {key: {**figure, "variants": []} for key, figure in sweep.figures.items()}
    finish(result | {"products": short}, None)  # the whole list would drown the tables
    if sweep.wrong:
        raise SystemExit(f"{len(sweep.wrong)} variants are wrong: the run is void")


if __name__ == "__main__":
    main()
