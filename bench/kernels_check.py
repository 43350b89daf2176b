"""The kernels at the 8B shape on a GPU: checked against their references, then timed.

    python bench/kernels_check.py --out bench/results/h200-kernels.json
    python bench/kernels_check.py --sweep decode_1x512 turn_64@8192   # and tries other tunings

A figure is the median time of a call inside a replayed CUDA graph. Attention walks the layers of
a pool larger than the L2 cache, as a step does. Beside each figure stand the bytes a call must
move, the rate that makes, and its share of the device-copy rate measured in the same run (`share`
above 1 means the L2 cache helped: the pointwise kernels at few tokens).
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common import copy_ceiling_bytes_s, finish, report
from hillstar.kernels.activation import swiglu, swiglu_reference
from hillstar.kernels.attention import paged_attention, paged_attention_reference
from hillstar.kernels.attention_tuning import Tiling, Tuning, choose_tuning
from hillstar.kernels.norm import rms_norm, rms_norm_reference
from hillstar.kernels.rope import rope_store, rope_store_reference

HIDDEN, INTERMEDIATE = 4096, 14336
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
KV_BYTES_PER_TOKEN = 2 * NUM_KV_HEADS * HEAD_DIM * 2  # of one layer
ATOL, RTOL = 2e-2, 2e-2  # bfloat16 results against float32 arithmetic rounded once
MAX_RELATIVE_ERROR = 2e-2  # of a head's output vector; its values shrink as contexts grow


@dataclass(frozen=True)
class Timing:
    """A call to time: `runs` are the same call on different memory, `num_bytes` each moves."""

    runs: list[Callable[[], object]]
    num_bytes: int
    num_flops: int = 0


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


def matmul_ceiling() -> float:
    """FLOP a second of a bf16 product of two random 8192 x 8192 matrices."""
    a, b = torch.randn((2, 8192, 8192), device="cuda").bfloat16()
    return 2 * 8192**3 / time_s([lambda: a @ b] * 4)


# ---- attention ---------------------------------------------------------------------------------

Rows = list[tuple[int, int]]  # (new tokens, context) of each sequence

ATTENTION: dict[str, Rows] = {
    **{f"decode_1x{n}": [(1, n)] for n in (128, 512, 2048, 8192, 32768)},
    **{f"decode_{b}x{n}": [(1, n)] * b for b in (16, 64) for n in (512, 2048)},
    "decode_256x640": [(1, 640)] * 256,
    "decode_64_uneven": [(1, 32 * (i + 1)) for i in range(64)],
    **{f"turn_64@{n}": [(64, n)] for n in (2048, 8192, 32768)},
    "prefill_1x2048": [(2048, 2048)],
    "prefill_4x512@2048": [(512, 2048)] * 4,
    "mixed_63x1024+512@1024": [*[(1, 1024)] * 63, (512, 1024)],
    "mixed_255x640+768": [*[(1, 640)] * 255, (768, 768)],
}


def make_pool(num_blocks: int, num_layers: int, device: str) -> torch.Tensor:
    """A random pool `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`."""
    shape = (num_blocks, num_layers, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    pool = torch.empty(shape, dtype=torch.bfloat16, device=device)
    for part in pool.split(256):
        part.normal_()
    return pool


def attention_arguments(rows: Rows, num_blocks: int, device: str) -> dict[str, Any]:
    """Random queries and scattered blocks for `rows`; everything but `kv`."""
    counts = [-(-context // BLOCK_SIZE) for _, context in rows]
    order = torch.randperm(num_blocks)[: sum(counts)].to(torch.int32)
    tables = torch.zeros((len(rows), max(counts)), dtype=torch.int32)
    for row, part in enumerate(order.split(counts)):
        tables[row, : counts[row]] = part
    q_lens = torch.tensor([0, *(q_len for q_len, _ in rows)])
    num_tokens = int(q_lens.sum())
    return {
        "q": torch.randn((num_tokens, NUM_HEADS, HEAD_DIM), device=device).bfloat16(),
        "block_tables": tables.to(device),
        "cu_seqlens_q": q_lens.cumsum(0).to(torch.int32).to(device),
        "context_lens": torch.tensor([c for _, c in rows], dtype=torch.int32).to(device),
        "scale": HEAD_DIM**-0.5,
        "max_q_len": max(q_len for q_len, _ in rows),
        "max_context_len": max(context for _, context in rows),
    }


def attention_timing(rows: Rows, pool: torch.Tensor, arguments: dict[str, Any]) -> Timing:
    """All layers of the pool one after the other; bytes and products of one call."""
    runs = [
        partial(paged_attention, kv=pool[:, layer], **arguments) for layer in range(pool.shape[1])
    ]
    num_tokens = sum(q_len for q_len, _ in rows)
    num_bytes = sum(context for _, context in rows) * KV_BYTES_PER_TOKEN
    num_bytes += 2 * num_tokens * NUM_HEADS * HEAD_DIM * 2
    pairs = sum(q_len * (context - (q_len - 1) / 2) for q_len, context in rows)
    return Timing([*runs], num_bytes, int(4 * pairs * NUM_HEADS * HEAD_DIM))


def attention_error(pool: torch.Tensor, arguments: dict[str, Any]) -> float:
    """The largest |kernel - reference| / |reference| of any token's and head's vector."""
    wanted = paged_attention_reference(kv=pool[:, -1], **arguments).float()
    out = paged_attention(kv=pool[:, -1], **arguments).float()
    error = float(((out - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())
    assert error < MAX_RELATIVE_ERROR, error  # also fails for NaN
    return error


def tunings(rows: Rows) -> Iterator[Tuning]:
    """What the sweep tries around the chosen tuning, one change at a time."""
    group = NUM_HEADS // NUM_KV_HEADS
    chosen = choose_tuning(group, HEAD_DIM, 2)
    has_short, has_long = (
        any((q_len <= chosen.short.block_m // group) == short for q_len, _ in rows)
        for short in (True, False)
    )
    for num_splits in (1, 2, 4, 8, 16, 32):
        yield replace(chosen, num_splits=num_splits)
    for block_n, num_warps, num_stages in (
        (64, 2, 4),
        (64, 4, 2),
        (64, 4, 3),
        (64, 4, 5),
        (128, 4, 2),
        (128, 4, 3),
        (32, 2, 5),
        (32, 4, 6),
        (128, 8, 3),
    ):
        if has_short:
            yield replace(chosen, short=Tiling(16, block_n, num_warps, num_stages))
    for block_m, block_n, num_warps, num_stages in (
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
        (128, 64, 4, 3),
        (128, 64, 8, 2),
        (128, 64, 8, 4),
        (128, 128, 8, 2),
    ):
        if has_long:
            yield replace(chosen, long=Tiling(block_m, block_n, num_warps, num_stages))


# ---- the others --------------------------------------------------------------------------------


def pointwise(num_tokens: int, pool: torch.Tensor, device: str) -> dict[str, Timing]:
    """Norm, RoPE and KV store, and SwiGLU of `num_tokens`: checked here, timed later."""
    x, residual = torch.randn((2, num_tokens, HIDDEN), device=device).bfloat16()
    weight = torch.randn(HIDDEN, device=device).bfloat16()
    got, wanted = rms_norm(x, weight, 1e-5, residual), rms_norm_reference(x, weight, 1e-5, residual)
    for have, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(have, want, atol=ATOL, rtol=RTOL)

    rotate = rotation(num_tokens, pool, device)

    gate_up = torch.randn((num_tokens, 2 * INTERMEDIATE), device=device).bfloat16()
    torch.testing.assert_close(swiglu(gate_up), swiglu_reference(gate_up), atol=ATOL, rtol=RTOL)

    row = num_tokens * 2  # bytes of one bf16 column
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "rms_norm": (partial(rms_norm, x, weight, 1e-5, residual), 4 * row * HIDDEN),
        "rope_store": (rotate, 2 * row * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM),
        "swiglu": (partial(swiglu, gate_up), 3 * row * INTERMEDIATE),
    }
    return {name: Timing([run] * 32, num_bytes) for name, (run, num_bytes) in calls.items()}


def rotation(num_tokens: int, pool: torch.Tensor, device: str) -> Callable[[], None]:
    """RoPE and the store of keys and values, checked."""
    qkv = torch.randn((num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM), device=device)
    qkv, kv = qkv.bfloat16(), pool[:, -1]
    angles = torch.rand((4096, HEAD_DIM // 2), device=device) * 6.2831853
    positions = torch.randint(0, 4096, (num_tokens,), device=device).to(torch.int32)
    slots = torch.randperm(pool.shape[0] * BLOCK_SIZE, device=device)[:num_tokens]
    given = (kv, positions, slots, torch.cat((angles.cos(), angles.sin()), dim=-1))

    def parts(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return matrix.split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)

    places = (slots // BLOCK_SIZE, slice(None), slice(None), slots % BLOCK_SIZE)
    found = []
    for function in (rope_store, rope_store_reference):
        copy = qkv.clone()
        kv[places] = 0
        function(*parts(copy), *given)
        found += [copy, kv[places].clone()]
    torch.testing.assert_close(found[:2], found[2:], atol=ATOL, rtol=RTOL)
    return partial(rope_store, *parts(qkv), *given)


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
        if timing.num_flops:
            figure["TFLOPs"] = round(timing.num_flops / seconds / 1e12, 1)
        self.figures[name] = figure
        print(f"{name:44}", "  ".join(f"{key} {value:>9}" for key, value in figure.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="recorded in the result (default: git rev-parse HEAD)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=32, help="layers of the pool")
    parser.add_argument(
        "--sweep", nargs="+", default=[], choices=ATTENTION, metavar="CASE", help="try tunings"
    )
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    ceilings = {"copy_TBps": copy_ceiling_bytes_s() / 1e12, "bf16_TFLOPs": matmul_ceiling() / 1e12}
    print(f"ceilings: {ceilings}")
    table = Table(ceilings["copy_TBps"] * 1e12)
    num_blocks = 256 + max(sum(-(-c // BLOCK_SIZE) for _, c in r) for r in ATTENTION.values())
    pool = make_pool(num_blocks, options.layers, "cuda")
    largest_error = 0.0
    for name, rows in ATTENTION.items():
        arguments = attention_arguments(rows, num_blocks, "cuda")
        largest_error = max(largest_error, attention_error(pool, arguments))
        table.add(f"attention {name}", attention_timing(rows, pool, arguments))
        for tuning in tunings(rows) if name in options.sweep else ():
            tuned = arguments | {"tuning": tuning}
            attention_error(pool, tuned)
            table.add(f"  {name} {tuning}", attention_timing(rows, pool, tuned))
    for num_tokens in (1, 16, 64, 256, 2048):
        for name, timing in pointwise(num_tokens, pool, "cuda").items():
            table.add(f"{name} T={num_tokens}", timing)
    result = report(
        options.seed,
        ceilings={name: round(value, 3) for name, value in ceilings.items()},
        checked="every kernel against its reference at these shapes: attention's vectors within"
        f" {MAX_RELATIVE_ERROR}, the others within atol {ATOL}, rtol {RTOL}",
        attention_max_relative_error=round(largest_error, 5),
        figures=table.figures,
    )
    finish(result | ({"commit": options.commit} if options.commit else {}), options.out)


if __name__ == "__main__":
    main()
