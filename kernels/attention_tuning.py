"""How `kernels/attention.py` is cut, by the model's shape, and how far contexts are split."""

from dataclasses import dataclass, replace

import triton


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one launch is cut: query rows and context tokens of a tile, warps, pipeline stages;
    how many programs share an SM; the fewest tokens of a context worth a program."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 2
    min_share: int = 128


@dataclass(frozen=True, slots=True)
class Tuning:
    """The tilings of both launches, and how contexts are split (None: for the grid at hand).

    split_tokens: where they are split, at its multiples. With one tiling for both launches a
        token's result is then the same bits in any batch and any chunk. A multiple of both
        tilings' block_n and of the cache's block size.
    """

    short: Tiling
    long: Tiling
    split_tokens: int | None = None


def choose_tuning(group_size: int, head_dim: int, itemsize: int) -> Tuning:
    """The tuning for a shape; it depends on the model alone, never on the batch.

    Tiles of 64 rows even where decode fills four of them: `wgmma` reads keys and values from
    shared memory as they lie, and a warp reduces its own rows, so a tile takes 420 instructions
    and two barriers instead of 520 and nine (`mma.sync`, 16 rows). A stage of the pipeline holds
    32 KiB of keys and values. float32 has no tensor cores at full precision, so its tiles are
    bounded by registers instead. Measured with bench/attention_check.py, H200, 2026-11-29.
    """
    dim = triton.next_power_of_2(head_dim)
    group = triton.next_power_of_2(group_size)
    block_n = max(16, min(64, 16384 // (dim * itemsize)))
    if itemsize == 4:
        return Tuning(
            short=Tiling(max(16, group), min(32, block_n), 8, 2, programs_per_sm=2, min_share=128),
            long=Tiling(max(32, group), min(32, block_n), 8, 2, programs_per_sm=1, min_share=256),
        )
    small = dim <= 128
    long = (128, 8) if small else (64, 4)
    return Tuning(
        short=Tiling(
            max(64, group), block_n, 4, 3, programs_per_sm=2 if small else 1, min_share=128
        ),
        long=Tiling(max(long[0], group), block_n, long[1], 3, programs_per_sm=1, min_share=256),
    )


def fixed_tuning(group_size: int, head_dim: int, itemsize: int) -> Tuning:
    """One tiling for all rows, with splits of fixed tokens: see `Tuning.split_tokens`."""
    tiling = choose_tuning(group_size, head_dim, itemsize).short
    if itemsize == 4:
        tiling = replace(tiling, block_m=max(32, tiling.block_m))
    return Tuning(short=tiling, long=tiling, split_tokens=1024)
