"""Sampling at a vocabulary of 128,256 on a GPU: checked against its references, then timed.

    python bench/sampling_check.py --out bench/results/h200-sampling.json

A figure is the median time of a call inside a replayed CUDA graph. Logits of a few rows stay in the
L2 cache, as those that a step has just computed do. Three kinds of rows: *model*, a few tokens far
above the rest; *wide*, normal with deviation 3; *flat*, with deviation 0.3, where nearly every
token counts. Bars: 120 us for 1 row, 360 us for 256 (3 % of a step of the 8B shape).
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from common import finish, report
from gpu_timing import Table, Timing, copy_ceiling_bytes_s
from hillstar.kernels.logprobs import logprobs, logprobs_reference
from hillstar.kernels.noise import noise_keys
from hillstar.kernels.penalties import (
    add_bias,
    apply_penalties,
    apply_penalties_reference,
    count_tokens,
)
from hillstar.kernels.sampling import sample, sample_reference

VOCAB = 128256
MAX_CHECKED = 32  # rows: the reference sorts each
NUM_TOP, NUM_BIASES = 20, 300

# Temperature, top-k, top-p, min-p.
CASES: dict[str, tuple[float, int, float, float]] = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.8, 0, 1.0, 0.0),
    "min_p 0.05": (0.8, 0, 1.0, 0.05),
    "top_k 50": (0.8, 50, 1.0, 0.0),
    "top_k 1000": (0.8, 1000, 1.0, 0.0),
    "top_p 0.9": (0.8, 0, 0.9, 0.0),
    "top_p 0.3": (0.8, 0, 0.3, 0.0),
    "top_k 20, top_p 0.95": (0.8, 20, 0.95, 0.0),
    "top_k 64, top_p 0.9, min_p 0.02": (0.8, 64, 0.9, 0.02),
}


def make_logits(kind: str, num_rows: int) -> torch.Tensor:
    logits = torch.randn((num_rows, VOCAB), device="cuda")
    if kind == "flat":
        return logits * 0.3
    if kind == "wide":
        return logits * 3
    likely = torch.randint(0, VOCAB, (40,), device="cuda")
    logits *= 2
    logits[:, likely] += torch.linspace(8, 18, 40, device="cuda")
    return logits


def parameters(
    num_rows: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> dict[str, torch.Tensor]:
    seeds = torch.arange(num_rows, device="cuda")
    return {
        "temperature": torch.full((num_rows,), temperature, device="cuda"),
        "top_k": torch.full((num_rows,), top_k, dtype=torch.int32, device="cuda"),
        "top_p": torch.full((num_rows,), top_p, device="cuda"),
        "min_p": torch.full((num_rows,), min_p, device="cuda"),
        "keys": noise_keys(seeds, seeds * 0 + 5),
    }


def choices(num_rows: int) -> Iterator[tuple[str, Timing]]:
    """Every case on every kind of rows, and with bfloat16 logits on one: checked, then timed."""
    kinds = [(kind, torch.float32) for kind in ("model", "wide", "flat")]
    for kind, dtype in [*kinds, ("model", torch.bfloat16)]:
        logits = make_logits(kind, num_rows).to(dtype)
        for name, case in CASES.items():
            given = parameters(num_rows, *case)
            some = {key: value[:MAX_CHECKED] for key, value in given.items()}
            wanted = sample_reference(logits[:MAX_CHECKED], **some)
            assert torch.equal(sample(logits, **given)[:MAX_CHECKED], wanted), (kind, name)
            label = f"{kind}{' bf16' if dtype == torch.bfloat16 else ''}: {name}"
            yield label, timing(partial(sample, logits, **given), logits.nbytes)


def others(num_rows: int) -> Iterator[tuple[str, Timing]]:
    """Log-probabilities, biases, penalties, and the count of what was chosen."""
    logits = make_logits("wide", num_rows)
    rows = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    tokens = torch.randint(0, VOCAB, (num_rows,), device="cuda").int()
    num_top = torch.full_like(rows, NUM_TOP)
    found = logprobs(logits, tokens, num_top, NUM_TOP)
    for have, want in zip(found, logprobs_reference(logits, tokens, num_top, NUM_TOP), strict=True):
        torch.testing.assert_close(have, want, atol=2e-5, rtol=1e-5)
    run = partial(logprobs, logits, tokens, num_top, NUM_TOP)
    yield f"logprobs of {NUM_TOP}", timing(run, logits.nbytes)

    given = {
        "slots": rows,
        "history": (torch.rand((num_rows, VOCAB), device="cuda") < 0.01).int() * 3,
        "repetition": torch.full((num_rows,), 1.1, device="cuda"),
        "presence": torch.full((num_rows,), 0.5, device="cuda"),
        "frequency": torch.full((num_rows,), 0.2, device="cuda"),
    }
    changed, wanted = logits.clone(), logits.clone()
    apply_penalties(changed, **given)
    apply_penalties_reference(wanted, **given)
    torch.testing.assert_close(changed, wanted, atol=1e-5, rtol=1e-5)
    yield "penalties", timing(partial(apply_penalties, changed, **given), logits.nbytes)

    biased = rows.repeat_interleave(NUM_BIASES)
    bias = torch.randn(len(biased), device="cuda")
    run = partial(add_bias, changed, biased, torch.randint_like(biased, VOCAB), bias)
    yield f"{NUM_BIASES} biases", timing(run, 12 * len(biased))
    yield "count", timing(partial(count_tokens, given["history"], rows, tokens), 16 * num_rows)


def timing(run: Callable[[], object], num_bytes: int) -> Timing:
    return Timing([run] * 4, num_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    copy_bytes_s = copy_ceiling_bytes_s()
    table = Table(copy_bytes_s)
    for num_rows in (1, 8, 64, 256):
        for cases in (choices, others):
            for name, case in cases(num_rows):
                table.add(f"S={num_rows} {name}", case)
    result = report(
        options.seed,
        copy_TBps=round(copy_bytes_s / 1e12, 3),
        checked=f"tokens of up to {MAX_CHECKED} rows a case equal to the reference's",
        figures=table.figures,
    )
    finish(result, options.out)


if __name__ == "__main__":
    main()
