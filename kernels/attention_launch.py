"""The launches of `kernels/attention.py`: how many programs, and the memory for their parts."""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from hillstar.kernels.attention_long import long_kernel, reduce_kernel
from hillstar.kernels.attention_merge import AT_ONCE
from hillstar.kernels.attention_short import PIECE_UNITS, short_kernel
from hillstar.kernels.attention_tuning import Tiling
from hillstar.kernels.checks import take_counters


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launches of a call have in common: arguments in the kernels' order, options of all
    kernels, and options of those that read the cache."""

    inputs: tuple[torch.Tensor, ...]
    scalars: tuple[float, ...]
    options: dict[str, Any]
    reads: dict[str, Any]


def launch_short(
    launch: Launch,
    tiling: Tiling,
    counters: torch.Tensor | None,
    max_q_len: int,
    max_context_len: int,
    split_tokens: int,
) -> None:
    """Fill the short rows of the output."""
    q, kv, block_tables = launch.inputs[:3]
    num_rows, num_kv_heads = len(block_tables), kv.shape[2]
    group, head_dim = launch.options["GROUP"], launch.options["HEAD_DIM"]
    unit = split_tokens or tiling.block_n
    fewest = split_tokens or tiling.min_share
    # No share is smaller, so more programs than this would find nothing to do.
    num_programs = num_rows * num_kv_heads * max(1, triton.cdiv(max_context_len, fewest))
    if not split_tokens:
        num_programs = min(num_programs, _num_sms(q.device) * tiling.programs_per_sm)
    # A share can hold the end of a segment and the beginning of another; a split of its own not.
    gap = 0 if split_tokens else num_programs
    part_rows = group * min(launch.options["SHORT_Q"], max_q_len)
    short_kernel[(num_programs,)](
        *launch.inputs,
        *_parts((num_programs + gap) * part_rows, head_dim, q.device),
        take_counters(counters, gap or num_rows * num_kv_heads, q.device),
        *launch.scalars,
        gap,
        part_rows,
        HEADS=triton.next_power_of_2(group),
        AT_ONCE=1 if split_tokens else AT_ONCE,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        UNIT=unit,
        MIN_UNITS=triton.cdiv(fewest, unit),
        PIECE_UNITS=0 if split_tokens else PIECE_UNITS,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **launch.options,
        **launch.reads,
    )


def launch_long(launch: Launch, tiling: Tiling, max_context_len: int, split_tokens: int) -> None:
    """Fill the long rows of the output."""
    q, kv, block_tables, cu_seqlens_q, context_lens, out = launch.inputs
    num_rows, num_kv_heads = len(block_tables), kv.shape[2]
    group, head_dim = launch.options["GROUP"], launch.options["HEAD_DIM"]
    block_q = tiling.block_m // group
    # As many as there can be: a row has q_len // block_q whole tiles and at most one more.
    num_tiles = len(q) // block_q + num_rows
    num_programs = num_tiles * num_kv_heads
    if split_tokens:
        max_splits = max(1, triton.cdiv(max_context_len, split_tokens))
        num_programs *= max_splits
        splits = max_splits > 1
    else:
        max_splits = _num_sms(q.device) * tiling.programs_per_sm
        # Not where even the whole tiles leave no room for a second program each.
        splits = 2 * (len(q) // block_q) * num_kv_heads <= max_splits
        if splits:
            num_programs = max(num_programs, max_splits)
    partial_out = partial_lse = None
    if splits:
        partial_out, partial_lse = _parts(num_programs * tiling.block_m, head_dim, q.device)
    cut: dict[str, Any] = {
        "split_tokens": split_tokens,
        "max_splits": max_splits,
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "MIN_SHARE": tiling.min_share,
    }
    long_kernel[(num_programs,)](
        *launch.inputs,
        partial_out,
        partial_lse,
        *launch.scalars,
        SPLITS=splits,
        PEEL=not launch.options["HAS_WINDOW"] and not split_tokens,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **cut,
        **launch.options,
        **launch.reads,
    )
    if splits:
        reduce_kernel[(num_tiles, num_kv_heads, block_q)](
            partial_out,
            partial_lse,
            cu_seqlens_q,
            context_lens,
            out,
            num_rows,
            num_kv_heads,
            launch.scalars[-1],
            HEADS=triton.next_power_of_2(group),
            AT_ONCE=1 if split_tokens else AT_ONCE,
            num_warps=4,
            **cut,
            **launch.options,
        )


def _parts(num_rows: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for parts of results and their log-sum-exp."""
    return (
        torch.empty((num_rows, head_dim), dtype=torch.float32, device=device),
        torch.empty(num_rows, dtype=torch.float32, device=device),
    )


def _num_sms(device: torch.device) -> int:
    """Streaming multiprocessors; the interpreter runs one program at a time."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
