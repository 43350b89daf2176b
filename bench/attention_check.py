"""Paged attention at the 8B shape on a GPU: checked against its reference, timed, beside torch's.

    python bench/attention_check.py --out bench/results/h200-attention.json

A figure is the median time of a call inside a replayed CUDA graph whose calls read different
blocks of the cache, more of them than the L2 cache holds. `after_rope_us` is what a call adds to
a graph of rotations and KV stores, which precede it in a step and hide its launch. `share` is of
the device-copy rate measured in the same run. Torch's attention reads contiguous keys and values
of the same sizes: its FlashAttention-2 with the same mask; cuDNN's without a mask where there is
a prefix (it has none for that), so compare its TFLOPs.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import finish, report
from gpu_timing import measure_ceilings, time_s
from hillstar.kernels.attention import paged_attention, paged_attention_reference
from hillstar.kernels.rope import rope_store

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
KV_BYTES_PER_TOKEN = 2 * NUM_KV_HEADS * HEAD_DIM * 2  # of one layer
MAX_RELATIVE_ERROR = 2e-2  # of a head's output vector; its values shrink as contexts grow
ROTATED_BYTES = 400e6  # read by the calls of one graph
NUM_BLOCKS = 140_000  # of one layer; two layers make 18 GB

Rows = list[tuple[int, int]]  # (new tokens, context) of each sequence

DECODE: dict[str, Rows] = {
    f"decode_{b}x{n}": [(1, n)] * b
    for b, n in [
        *((1, n) for n in (128, 512, 2048, 8192, 32768, 131072)),
        *((b, n) for b in (4, 16, 64, 256) for n in (512, 2048)),
        *((16, 8192), (40, 1000), (256, 8192)),
    ]
} | {
    "decode_64_uneven": [(1, 32 * (i + 1)) for i in range(64)],
    "decode_63x512+32768": [*[(1, 512)] * 63, (1, 32768)],
}
PREFILL: dict[str, Rows] = {
    **{f"prefill_2048@{n}": [(2048, 2048 + n)] for n in (0, 2048, 8192, 30720)},
    **{f"turn_64@{n}": [(64, 64 + n)] for n in (2048, 8192, 32768)},
    "prefill_8192@0": [(8192, 8192)],
    "prefill_16x512@0": [(512, 512)] * 16,
    "prefill_4x512@2048": [(512, 2560)] * 4,
    "mixed_63x1024+512@1024": [*[(1, 1024)] * 63, (512, 1536)],
    "mixed_255x640+768@0": [*[(1, 640)] * 255, (768, 768)],
}


def arguments(rows: Rows, run: int, device: str) -> dict[str, Any]:
    """Random queries, and blocks that no other run reads as long as there are some."""
    counts = [-(-context // BLOCK_SIZE) for _, context in rows]
    first = run * sum(counts) % (NUM_BLOCKS - sum(counts))
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0))
    tables = torch.zeros((len(rows), max(counts)), dtype=torch.int32)
    for row, part in enumerate(order[first : first + sum(counts)].split(counts)):
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


def largest_error(kv: torch.Tensor, given: dict[str, Any]) -> float:
    """The largest |kernel - reference| / |reference| of any head's vector in the last 64 tokens of
    the first, a middle and the last row."""
    out = paged_attention(kv=kv, **given).float()
    num_rows = len(given["context_lens"])
    error = 0.0
    for row in sorted({0, num_rows // 2, num_rows - 1}):
        begin, end = given["cu_seqlens_q"][row : row + 2].tolist()
        begin = max(begin, end - 64)
        alone = given | {
            "q": given["q"][begin:end],
            "block_tables": given["block_tables"][row : row + 1],
            "cu_seqlens_q": torch.tensor([0, end - begin], device=kv.device),
            "context_lens": given["context_lens"][row : row + 1],
        }
        wanted = paged_attention_reference(kv=kv, **alone).float()
        off = (out[begin:end] - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        error = max(error, float(off.max()))
        assert error < MAX_RELATIVE_ERROR, error  # also fails for NaN
    return error


def rotation(kv: torch.Tensor, given: dict[str, Any]) -> Callable[[], object]:
    """The rotation and KV store of a decode step's tokens, which precede attention."""
    device, num_rows = kv.device, len(given["context_lens"])
    qkv = torch.randn((num_rows, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM), device=device)
    positions = given["context_lens"] - 1
    last = (positions // BLOCK_SIZE).long()[:, None]
    slots = given["block_tables"].gather(1, last)[:, 0] * BLOCK_SIZE + positions % BLOCK_SIZE
    angles = torch.rand((131072, HEAD_DIM // 2), device=device)
    parts = qkv.bfloat16().split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)
    return partial(
        rope_store, *parts, kv, positions, slots, torch.cat((angles.cos(), angles.sin()), dim=-1)
    )


def peers(rows: Rows, device: str) -> dict[str, float]:
    """TFLOP a second of torch's attention at the same lengths, rows as a batch."""
    (q_len, context), batch = rows[0], len(rows)
    shape = (batch, context, NUM_KV_HEADS, HEAD_DIM)
    k, v = torch.randn((2, *shape), device=device).bfloat16().transpose(2, 3).unbind()
    q = torch.randn((batch, q_len, NUM_HEADS, HEAD_DIM), device=device).bfloat16().transpose(1, 2)
    flash = partial(
        torch.ops.aten._scaled_dot_product_flash_attention, q, k, v, 0.0, is_causal=True
    )

    def cudnn() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=q_len == context, enable_gqa=True
            )

    masked = num_flops(rows)
    whole = masked if q_len == context else 4 * batch * q_len * context * NUM_HEADS * HEAD_DIM
    return {
        "flash2_TFLOPs": round(masked / time_s([flash] * 4) / 1e12, 1),
        "cudnn_TFLOPs": round(whole / time_s([cudnn] * 4) / 1e12, 1),
    }


def num_flops(rows: Rows) -> float:
    pairs = sum(q_len * (context - (q_len - 1) / 2) for q_len, context in rows)
    return 4 * pairs * NUM_HEADS * HEAD_DIM


def measure(rows: Rows, pool: torch.Tensor, copy_bytes_s: float, bound: int = 0) -> dict[str, Any]:
    """bound: on the context, at the capture, where it is not the longest."""
    num_tokens = sum(q_len for q_len, _ in rows)
    num_bytes = sum(context for _, context in rows) * KV_BYTES_PER_TOKEN
    num_runs = max(2, min(64, int(ROTATED_BYTES / num_bytes)))
    layers = [pool[:, run % pool.shape[1]] for run in range(num_runs)]
    given = [arguments(rows, run // pool.shape[1], "cuda") for run in range(num_runs)]
    for one in given if bound else ():
        tables = torch.zeros((len(rows), bound // BLOCK_SIZE), dtype=torch.int32, device="cuda")
        tables[:, : one["block_tables"].shape[1]] = one["block_tables"]
        one |= {"block_tables": tables, "max_context_len": bound}
    error = largest_error(layers[0], given[0])
    counters = torch.zeros(4096, dtype=torch.int32, device="cuda")  # shared, as in the engine
    calls = [
        partial(paged_attention, kv=kv, counters=counters, **one)
        for kv, one in zip(layers, given, strict=True)
    ]
    seconds = time_s([*calls])
    rate = (num_bytes + 2 * num_tokens * NUM_HEADS * HEAD_DIM * 2) / seconds
    figure: dict[str, Any] = {"us": round(seconds * 1e6, 2), "error": round(error, 4)}
    if num_tokens == len(rows):
        figure |= {"TBps": round(rate / 1e12, 3), "share": round(rate / copy_bytes_s, 3)}
        rotations = [rotation(kv, one) for kv, one in zip(layers, given, strict=True)]
        both = [call for pair in zip(rotations, calls, strict=True) for call in pair]
        alone, after = time_s([*rotations]), 2 * time_s(both)
        figure["after_rope_us"] = round((after - alone) * 1e6, 2)
    else:
        figure["TFLOPs"] = round(num_flops(rows) / seconds / 1e12, 1)
        if len(set(rows)) == 1:
            figure |= peers(rows, "cuda")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    ceilings = measure_ceilings()
    copy_bytes_s = ceilings["copy_TBps"] * 1e12
    shape = (NUM_BLOCKS, 2, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    pool = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    for part in pool.split(4096):
        part.normal_()
    figures = {}
    for name, rows in (DECODE | PREFILL).items():
        figures[name] = measure(rows, pool, copy_bytes_s)
        print(f"{name:26}", figures[name], flush=True)
    for context in (512, 2048):
        name = f"decode_1x{context}_captured_for_32768"
        figures[name] = measure([(1, context)], pool, copy_bytes_s, bound=32768)
        print(f"{name:26}", figures[name])
    result = report(
        options.seed,
        ceilings=ceilings,
        checked="rows of every case against the reference: each vector within"
        f" {MAX_RELATIVE_ERROR}",
        figures=figures,
    )
    finish(result, options.out)


if __name__ == "__main__":
    main()
