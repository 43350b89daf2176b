"""How the skinny products of `kernels/linear.py` are cut, and which cut a shape gets."""

from dataclasses import dataclass

import triton

MAX_TOKENS = 64  # beyond, a product is no longer bound by reading its weights: cuBLAS

_SM_SLOTS = 264  # two programs on each of an H100's or H200's 132 multiprocessors


@dataclass(frozen=True, slots=True)
class Tuning:
    """One way to cut a product.

    block_m: tokens of a program. 1 multiplies on the vector units (`linear_vector`), 16 and more
        on the tensor cores (`linear_tile`), padding the tokens there are.
    block_n: weight rows of a program; for `gate_up_swiglu` as many of each half.
    block_k: weight columns in flight at once.
    num_stages: blocks of columns in flight, in shared memory; 1: in registers (vectors only, and
        the loop is unrolled).
    num_splits: programs that share a tile's columns (tiles only, not for `gate_up_swiglu`).
    pdl: launch while the kernel before still runs, and fetch weights until it is done
        (programmatic dependent launch, sm_90 and later). Every kernel so launched waits before
        it touches anything but weights; the weights must be older than the kernel before.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    num_splits: int = 1
    pdl: bool = False


def choose_tuning(
    num_tokens: int, num_outputs: int, num_inputs: int, *, itemsize: int = 2, glu: bool = False
) -> Tuning | None:
    """The tuning for a product's shape, or None where cuBLAS is at least as fast.

    num_outputs: rows of the weight, or with `glu` columns of the result (half the rows).
    """
    if num_tokens > MAX_TOKENS or (itemsize != 2 and num_tokens > 1):
        return None
    if num_tokens == 1:
        return _vector_tuning(num_inputs, itemsize, glu)
    return _tile_tuning(num_tokens, num_outputs, num_inputs, glu)


def _vector_tuning(num_inputs: int, itemsize: int, glu: bool) -> Tuning:
    """Rows that fit are read whole, all of a program's loads before the first product."""
    longest = 8192 // itemsize
    block_k = min(longest, triton.next_power_of_2(num_inputs))
    num_stages = 1
    if num_inputs > longest:
        # The largest part that divides the row needs no mask.
        block_k = max(longest // 4, min(longest, num_inputs & -num_inputs))
        num_stages = 4
    return Tuning(1, 2 if glu else 4, block_k, num_warps=4, num_stages=num_stages)


def _tile_tuning(num_tokens: int, num_outputs: int, num_inputs: int, glu: bool) -> Tuning:
    """Tiles of 64 rows, the tensor cores' own; columns are split where tiles are too few."""
    block_m = max(16, triton.next_power_of_2(num_tokens))
    block_n, block_k, num_splits = 64, 128, 1
    tiles = triton.cdiv(num_outputs, block_n)
    if not glu:
        while tiles * num_splits * 2 <= _SM_SLOTS and num_inputs >= num_splits * 8 * block_k:
            num_splits *= 2
    num_stages = 3 if glu else 5 if block_m == 16 else 4
    return Tuning(block_m, block_n, block_k, 4, num_stages, num_splits)
