"""How `kernels/attention.py` is cut, by the model's shape, and how far contexts are split."""

from dataclasses import dataclass

import triton


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one launch is cut: query rows and context tokens of a tile, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """The tilings of both launches, and the splits of the context (None: from the grid).

    split_tokens: a split covers so many tokens, between two multiples of it, instead of a share of
        the row's own context: with one tiling for both launches, a token's result is then the same
        bits in any batch and any chunk. A multiple of both tilings' block_n.
    """

    short: Tiling
    long: Tiling
    num_splits: int | None = None
    split_tokens: int | None = None


def choose_tuning(group_size: int, head_dim: int, itemsize: int) -> Tuning:
    """The tuning for a shape; it depends on the model alone, never on the batch.

    A stage of the pipeline holds 32 KiB of keys and values: three of them in flight hide the
    latency of HBM, and two programs still fit an SM. float32 has no tensor cores at full
    precision, so its tiles are bounded by registers instead.
    """
    dim = triton.next_power_of_2(head_dim)
    group = triton.next_power_of_2(group_size)
    block_n = max(16, min(128, 32768 // (2 * dim * itemsize)))
    if itemsize == 4:
        return Tuning(
            short=Tiling(max(16, group), min(32, block_n), num_warps=8, num_stages=2),
            long=Tiling(max(32, group), min(32, block_n), num_warps=8, num_stages=2),
        )
    block_m, num_warps = (128, 8) if dim <= 128 else (64, 4)
    return Tuning(
        short=Tiling(max(16, group), block_n, num_warps=4, num_stages=4),
        long=Tiling(max(block_m, group), min(64, block_n), num_warps=num_warps, num_stages=3),
    )


def fixed_tuning(group_size: int, head_dim: int, itemsize: int) -> Tuning:
    """One tiling for all rows, with splits of fixed tokens: see `Tuning.split_tokens`.

    64 query rows waste most of a decode's products, which wait for memory anyway.
    """
    dim = triton.next_power_of_2(head_dim)
    block_n = max(16, min(64, 32768 // (2 * dim * itemsize)))
    block_m, num_warps = (64, 4) if itemsize == 2 else (32, 8)
    tiling = Tiling(max(block_m, triton.next_power_of_2(group_size)), block_n, num_warps, 3)
    return Tuning(short=tiling, long=tiling, split_tokens=1024)


def choose_num_splits(num_programs: int, max_context_len: int, block_n: int, num_sms: int) -> int:
    """A power of two that fills the device, with at least a tile a split.

    Two programs an SM; one where few rows are split so often that merging the parts costs more
    than the second program brings (one row in 16 parts instead of 32: 4.16 ms a step to 4.14).
    """
    slots = num_sms if 8 * num_programs <= num_sms else 2 * num_sms
    splits = min(slots // num_programs, max_context_len // block_n, 64)
    return 1 << max(0, splits.bit_length() - 1)
