"""The pointwise kernels at the 8B shape on a GPU: checked against their references, then timed.

    python bench/kernels_check.py --out bench/results/h200-kernels.json

A figure is the median time of a call inside a replayed CUDA graph. Beside each figure stand the
bytes a call must move, the rate that makes, and its share of the device-copy rate measured in the
same run (`share` above 1 means the L2 cache helped: few tokens).
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from common import finish, report
from gpu_timing import Table, Timing, measure_ceilings
from hillstar.kernels.activation import swiglu, swiglu_reference
from hillstar.kernels.norm import rms_norm, rms_norm_reference
from hillstar.kernels.rope import rope_store, rope_store_reference

HIDDEN, INTERMEDIATE = 4096, 14336
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
ATOL, RTOL = 2e-2, 2e-2  # bfloat16 results against float32 arithmetic rounded once


def pointwise(num_tokens: int, pool: torch.Tensor, device: str) -> dict[str, Timing]:
    """Norm, RoPE and KV store, and SwiGLU of `num_tokens`: checked here, timed later."""
    x = torch.randn((num_tokens, HIDDEN), device=device).bfloat16()
    weight = torch.randn(HIDDEN, device=device).bfloat16()
    wanted = rms_norm_reference(x, weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), wanted, atol=ATOL, rtol=RTOL)

    rotate = rotation(num_tokens, pool, device)

    gate_up = torch.randn((num_tokens, 2 * INTERMEDIATE), device=device).bfloat16()
    torch.testing.assert_close(swiglu(gate_up), swiglu_reference(gate_up), atol=ATOL, rtol=RTOL)

    row = num_tokens * 2  # bytes of one bf16 column
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "rms_norm": (partial(rms_norm, x, weight, 1e-5), 2 * row * HIDDEN),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    ceilings = measure_ceilings()
    table = Table(ceilings["copy_TBps"] * 1e12)
    pool = torch.randn((256, 1, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM), device="cuda").bfloat16()
    for num_tokens in (1, 16, 64, 256, 2048):
        for name, timing in pointwise(num_tokens, pool, "cuda").items():
            table.add(f"{name} T={num_tokens}", timing)
    result = report(
        options.seed,
        ceilings=ceilings,
        checked="every kernel against its reference at these shapes, within"
        f" atol {ATOL}, rtol {RTOL}",
        figures=table.figures,
    )
    finish(result, options.out)


if __name__ == "__main__":
    main()
