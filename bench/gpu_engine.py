"""The GPU engine on the workloads A, A0, B, C and a session's next turn, one run on one machine.

    python bench/gpu_engine.py [--out bench/results/h200-engine.json] [--only A,B,...]

A model of the Llama-3-8B shape, bf16, random weights, greedy, EOS ignored; random prompts, new
ones each time, so nothing is found in the prefix cache but what the next turn's session holds.
The engine is the whole of it but the process boundary: messages, scheduler, batches, runner.

* A: 1 request, 128 in / 256 out; output tokens over the whole time. A0: first token of 2,048 in.
* B: 256 requests at once, 512 in / 256 out. C: 64 at once, 2,048 in / 128 out.
* next turn: a session's context lies in the GPU's blocks; 64 new tokens; time to the first token.
* peer: transformers' `generate` with its compiled static cache on A, the same weights and prompts.
* idle share: of a span of decode steps, the part in which no kernel or copy ran (torch profiler).

Floors stand beside the figures: bytes of weights over the copy bandwidth measured in the same run.
The run is void unless its tokens hold (DESIGN.md, rule 6): forced along our own tokens, each one's
fp32 reference logit lies within 2 epsilon of the largest.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from common import finish, report
from gpu_driver import Driver, idle_share, make_reference, take_weights
from gpu_generation import check
from gpu_timing import measure_ceilings
from hillstar.engine.models.config import ModelConfig
from shape_8b import SEED, VOCAB

TURN_CONTEXTS = (2048, 8192, 32768)
TURN_TOKENS = 64


class Bench:
    """The workloads; each returns figures by name."""

    def __init__(self, driver: Driver, repeats: int) -> None:
        self._driver = driver
        self._repeats = repeats
        self._rng = np.random.default_rng(SEED)
        self.samples: list[tuple[np.ndarray, list[int]]] = []  # to be checked: prompt, tokens

    def prompts(self, count: int, length: int) -> list[np.ndarray]:
        shape = (count, length)
        return list(self._rng.integers(0, VOCAB, size=shape).astype(np.int32))

    def throughput(self, count: int, num_in: int, num_out: int) -> float:
        """Output tokens a second, median of the repeats after one warm-up."""
        rates = []
        for _ in range(1 + self._repeats):
            prompts = self.prompts(count, num_in)
            result = self._driver.run(prompts, num_out)
            rates.append(count * num_out / result.total_s)
        self.samples.append((prompts[0], result.tokens[0]))
        self.samples.append((prompts[-1], result.tokens[-1]))
        print(f"  {count} x {num_in} in / {num_out} out: {[round(r, 1) for r in rates]} tok/s")
        return statistics.median(rates[1:])

    def peer_throughput(self, reference: LlamaForCausalLM, num_in: int, num_out: int) -> float:
        """As `throughput` of one request, by transformers."""
        generate: Any = reference.generate  # its type says neither this call nor its result
        rates = []
        for _ in range(2 + self._repeats):  # the first two compile
            prompt = torch.from_numpy(self.prompts(1, num_in)[0])[None].long().cuda()
            torch.cuda.synchronize()
            start = time.perf_counter()
            output = generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                min_new_tokens=num_out,
                max_new_tokens=num_out,
                do_sample=False,
                pad_token_id=0,
                cache_implementation="static",
            )
            torch.cuda.synchronize()
            rates.append(num_out / (time.perf_counter() - start))
            assert output.shape[1] == num_in + num_out, output.shape
        print(f"  transformers, 1 x {num_in} in / {num_out} out: {[round(r, 1) for r in rates]}")
        return statistics.median(rates[2:])

    def first_token_ms(self, num_in: int) -> float:
        times = [
            self._driver.run(self.prompts(1, num_in), 1).first_s[0]
            for _ in range(1 + self._repeats)
        ]
        return statistics.median(times[1:]) * 1e3

    def next_turn_ms(self, context: int) -> float:
        """Each repeat is a further turn of one session; its context grows by 65 tokens."""
        lease = f"session-{context}"
        history = self.prompts(1, context)[0]
        times = []
        for _ in range(2 + self._repeats):
            result = self._driver.run([history], 1, lease)
            times.append(result.first_s[0])
            new = self._rng.integers(0, VOCAB, size=TURN_TOKENS)
            history = np.concatenate([history, result.tokens[0], new]).astype(np.int32)
        print(f"  next turn at {context}: {[round(t * 1e3, 2) for t in times]} ms")
        return statistics.median(times[2:]) * 1e3

    def idle_share(self, count: int) -> float:
        """Of a span of decode steps, the share in which no kernel and no copy ran.

        The device's activity is traced for some steps in the middle of a run; tracing slows the
        host, so the share is an upper bound.
        """
        schedule = torch.profiler.schedule(wait=0, warmup=0, active=1)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        self._driver.submit(self.prompts(count, 64), 96)
        for _ in range(24):
            self._driver.step()
        with torch.profiler.profile(activities=activities, schedule=schedule) as profile:
            for _ in range(32):
                self._driver.step()
        self._driver.drain()
        return idle_share(profile)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="A,A0,turn,C,B,peer,idle")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-batched-tokens", type=int, default=8192)
    args = parser.parse_args()
    only = args.only.split(",")
    if not {"A", "B", "C"} & set(only):
        parser.error("--only: nothing to check the tokens by; name A, B or C too")
    ceilings = measure_ceilings()
    reference = make_reference()
    weights = take_weights(reference)
    model = ModelConfig.from_dict(reference.config.to_dict(), "random-8b")
    num_bytes = sum(p.numel() * 2 for p in reference.parameters()) - weights.embedding.numel() * 2
    started = time.perf_counter()
    driver = Driver(model, weights, max_batched_tokens=args.max_batched_tokens)
    assembled_s = time.perf_counter() - started
    bench = Bench(driver, args.repeats)
    bench.throughput(2, 100, 8)  # compiles and warms up
    bench.samples.clear()
    workloads: dict[str, tuple[str, Callable[[], Any]]] = {
        "A": ("A_tok_s", lambda: bench.throughput(1, 128, 256)),
        "A0": ("A0_ms", lambda: bench.first_token_ms(2048)),
        "turn": (
            "next_turn_gpu_ms",
            lambda: {str(n): round(bench.next_turn_ms(n), 2) for n in TURN_CONTEXTS},
        ),
        "C": ("C_tok_s", lambda: bench.throughput(64, 2048, 128)),
        "B": ("B_tok_s", lambda: bench.throughput(256, 512, 256)),
    }
    figures: dict[str, Any] = {"assemble_s": round(assembled_s, 2)}
    for name in only:
        if name in workloads:
            key, workload = workloads[name]
            value = workload()
            figures[key] = round(value, 2) if isinstance(value, float) else value
            print(f"{key}: {figures[key]}", flush=True)
    if "peer" in only:
        rate = bench.peer_throughput(reference, 128, 256)
        figures["peer"] = {"transformers_A_tok_s": round(rate, 1)}
    if "idle" in only:
        for count, key in ((1, "idle_share_b1"), (256, "idle_share_b256")):
            figures[key] = round(bench.idle_share(count), 4)
            print(f"{key}: {figures[key]}", flush=True)
    samples = [sample for sample in bench.samples if len(sample[0]) <= 2048]
    checked = check(reference, [p for p, _ in samples], [t for _, t in samples])
    result = report(
        SEED,
        ceilings=ceilings,
        floor_ms_per_step=round(num_bytes / ceilings["copy_TBps"] / 1e9, 3),
        checked=checked,
        **figures,
    )
    finish(result, args.out)
    if not checked["within_2_epsilon"]:
        raise SystemExit("the output is not the reference's: the run is void")


if __name__ == "__main__":
    main()
