"""What a step of the GPU engine takes, and what a prompt beside it costs those who listen.

    python bench/gpu_steps.py [--out bench/results/h200-steps.json]

The 8B shape as in `gpu_engine`, greedy, random prompts, the whole engine but its process boundary.

* step_ms: a decode step at (batch, context), the median of 32 after 8, with its floor beside it:
  the weights' and the context's bytes over the copy bandwidth measured in the same run.
* breakdown: of a decode step, the milliseconds in which the device is busy and idle (traced) and in
  which the host works: its time in the loop, less what it waits for results.
* mixed: intervals between tokens of 32 sequences at 512 tokens while a prompt of 32,768 tokens is
  read, beside the same sequences alone, and how many tokens of the prompt a step took; for each
  stated target of the interval, and without one.

The tokens of `mixed`, where prefill chunks and decoders share steps, are checked by the rule of
`gpu_engine`; the run is void when it does not hold.
"""

import argparse
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import finish, report
from gpu_driver import Driver, idle_share, make_reference, take_weights
from gpu_generation import check
from gpu_timing import copy_ceiling_bytes_s
from hillstar.engine.models.config import ModelConfig
from shape_8b import SEED, VOCAB

BATCHES = (1, 4, 16, 64, 128, 256)
CONTEXTS = (512, 2048, 8192, 32768)
MOST_TOKENS = 300_000  # of KV at 128 KiB each
WARM_STEPS, STEPS = 8, 32
ENDLESS = 4096  # output tokens; cancelled when measured
TARGETS_MS = (None, 25, 50, 100)
MIXED_BATCH, MIXED_CONTEXT, MIXED_PROMPT = 32, 512, 32768
KV_BYTES_PER_TOKEN = 128 << 10
CHECKED = 96  # tokens of a sequence: those of its prefill's neighbours and of the long prompt's

Sample = tuple[np.ndarray, list[int]]
"""A prompt and the tokens that followed it."""


class Steps:
    """Measures one engine; its prompts come from one generator."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._rng = np.random.default_rng(SEED)
        self.samples: list[Sample] = []  # of the last `mixed`, to be checked

    def prompts(self, count: int, length: int) -> list[np.ndarray]:
        return list(self._rng.integers(0, VOCAB, size=(count, length)).astype(np.int32))

    def decode_ms(self, batch: int, context: int) -> float:
        """The median step once all prompts are read; contexts grow to `context` meanwhile."""
        self._start(batch, context - WARM_STEPS - STEPS)
        self._steps(WARM_STEPS)
        median = statistics.median(self._steps(STEPS))
        self._driver.cancel()
        return median * 1e3

    def breakdown(self, batch: int, context: int) -> dict[str, float]:
        """Milliseconds a decode step: in all, device busy, device idle, host at work."""
        self._start(batch, context - WARM_STEPS - STEPS)
        self._steps(WARM_STEPS)
        with _Waits() as waits:
            times = self._steps(STEPS)
        step_ms = statistics.mean(times) * 1e3
        host_ms = step_ms - waits.seconds / STEPS * 1e3
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            self._steps(STEPS // 2)
        self._driver.cancel()
        idle = idle_share(profile)
        return {
            "step_ms": round(step_ms, 3),
            "device_busy_ms": round(step_ms * (1 - idle), 3),
            "device_idle_ms": round(step_ms * idle, 3),
            "host_busy_ms": round(host_ms, 3),
        }

    def mixed(self) -> dict[str, Any]:
        """Decoders' intervals in ms: alone, and while the long prompt is read."""
        prompts = self._start(MIXED_BATCH, MIXED_CONTEXT)
        self._steps(WARM_STEPS)
        alone = self._steps(64)
        self._driver.add(self.prompts(1, MIXED_PROMPT), 1)
        beside = []
        while not self._driver.has_first_token(MIXED_BATCH):
            beside += self._steps(1)
        tokens = self._driver.cancel()
        self.samples = [(prompts[i], tokens[i][:CHECKED]) for i in (0, MIXED_BATCH - 1)]
        return {
            "alone_p50_ms": _percentile(alone, 50),
            "alone_p99_ms": _percentile(alone, 99),
            "beside_p50_ms": _percentile(beside, 50),
            "beside_p99_ms": _percentile(beside, 99),
            "beside_max_ms": _percentile(beside, 100),
            "prompt_s": round(sum(beside), 3),
            "tokens_a_step": round(MIXED_PROMPT / len(beside)),
        }

    def _start(self, batch: int, context: int) -> list[np.ndarray]:
        """Submit, and step until every prompt is read. Returns the prompts."""
        prompts = self.prompts(batch, context)
        self._driver.submit(prompts, ENDLESS)
        while not all(map(self._driver.has_first_token, range(batch))):
            self._driver.step()
        return prompts

    def _steps(self, count: int) -> list[float]:
        """Seconds of each: every round of the loop waits for one step."""
        times = []
        for _ in range(count):
            start = time.perf_counter()
            self._driver.step()
            times.append(time.perf_counter() - start)
        return times


class _Waits:
    """Counts the seconds that this thread waits for events of the device."""

    def __enter__(self) -> "_Waits":
        self.seconds = 0.0
        self._wait = wait = torch.cuda.Event.synchronize

        def timed(event: torch.cuda.Event) -> None:
            start = time.perf_counter()
            wait(event)
            self.seconds += time.perf_counter() - start

        torch.cuda.Event.synchronize = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.Event.synchronize = self._wait  # type: ignore[method-assign]


def _percentile(seconds: list[float], percent: int) -> float:
    return round(float(np.percentile(seconds, percent)) * 1e3, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    copy_bytes_s = copy_ceiling_bytes_s()
    reference = make_reference()
    weights = take_weights(reference)
    model = ModelConfig.from_dict(reference.config.to_dict(), "random-8b")
    weight_bytes = sum(p.numel() * 2 for p in reference.parameters()) - weights.embedding.nbytes
    steps = Steps(Driver(model, weights, num_blocks=MOST_TOKENS // 16))
    steps.decode_ms(2, 128)
    grid: dict[str, float] = {}
    floors: dict[str, float] = {}
    for batch in BATCHES:
        for context in CONTEXTS:
            if batch * context > MOST_TOKENS:
                continue
            key = f"{batch}x{context}"
            num_bytes = weight_bytes + batch * context * KV_BYTES_PER_TOKEN
            grid[key] = round(steps.decode_ms(batch, context), 3)
            floors[key] = round(num_bytes / copy_bytes_s * 1e3, 3)
            print(f"{key:10} {grid[key]:8.3f} ms, floor {floors[key]:8.3f}", flush=True)
    breakdown = {str(batch): steps.breakdown(batch, 512) for batch in (1, 64, 256)}
    print(breakdown, flush=True)
    mixed: dict[str, Any] = {}
    samples: list[Sample] = []
    for target_ms in TARGETS_MS:
        del steps
        gc.collect()
        torch.cuda.empty_cache()
        steps = Steps(Driver(model, weights, inter_token_target_ms=target_ms))
        steps.mixed()  # an engine learns what its steps cost
        mixed[str(target_ms)] = steps.mixed()
        samples += steps.samples
        print(f"target {target_ms} ms: {mixed[str(target_ms)]}", flush=True)
    del steps
    torch.cuda.empty_cache()
    checked = check(reference, [p for p, _ in samples], [t for _, t in samples])
    result = report(
        SEED,
        ceilings={"copy_TBps": round(copy_bytes_s / 1e12, 3)},
        checked=checked,
        step_ms=grid,
        floor_ms=floors,
        breakdown=breakdown,
        mixed=mixed,
    )
    finish(result, args.out)
    if not checked["within_2_epsilon"]:
        raise SystemExit("the output is not the reference's: the run is void")


if __name__ == "__main__":
    main()
