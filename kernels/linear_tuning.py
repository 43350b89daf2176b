"""How the skinny products of `kernels/linear.py` are cut, and which cut a shape gets.

The choices were measured with `bench/linear_sweep.py` on an H200, bf16, at the shapes of an 8B
Llama and 1, 16 and 64 tokens (torch 2.11, triton 3.6, 2026-11-29); where cuBLAS was as fast, it
is taken. 32 tokens lie between: each choice there is the one that loses least at both ends.
"""

from dataclasses import dataclass

import triton

MAX_TOKENS = 64  # beyond, a product is no longer bound by reading its weights: cuBLAS

_NUM_SMS = 132  # multiprocessors of an H100 or H200
_THREAD_BYTES = 128  # weights that a thread of the vector kernel holds at once: 32 registers


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
        (`kernels/pdl.py`; no effect before sm_90).
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    num_splits: int = 1
    pdl: bool = False


@dataclass(frozen=True, slots=True)
class DenseTuning:
    """One way to cut a GLU of many tokens (`linear_dense`).

    block_m: tokens of a program. block_n: weight rows of each half. block_k: weight columns of a
    stage. num_stages: blocks in flight, in shared memory.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 4


def choose_tuning(
    num_tokens: int, num_outputs: int, num_inputs: int, *, itemsize: int = 2, glu: bool = False
) -> Tuning | None:
    """The tuning for a product's shape, or None where cuBLAS is at least as fast.

    num_outputs: rows of the weight, or with `glu` columns of the result (half the rows).
    """
    if num_tokens > MAX_TOKENS or (itemsize != 2 and num_tokens > 1):
        return None
    if num_tokens == 1:
        return _vector_tuning(num_inputs, itemsize)
    block_m = max(16, triton.next_power_of_2(num_tokens))
    if glu:
        return _glu_tuning(block_m)
    if triton.cdiv(num_outputs, 128) >= 2 * _NUM_SMS:
        return _head_tuning(block_m)
    return _split_tuning(block_m, num_outputs, num_inputs)


def folds_norm(num_tokens: int) -> bool:
    """Whether the norm before a product costs less inside it than as a kernel of its own.

    At one token 32 layers took 3,342 µs with norms inside and 3,472 with norms apart. With more,
    every program would norm all of them again.
    """
    return num_tokens == 1


def _vector_tuning(num_inputs: int, itemsize: int) -> Tuning:
    """Rows that fit are read whole, all of a program's loads before the first product.

    2 rows of 4,096 (4 with a GLU) on 4 warps, of 14,336 on 16. Alone, 4 rows are as fast; in a
    whole step small programs let the next kernel's begin earlier (4.16 ms to 4.13). Their loads
    start before the kernel before is done, which made every shape faster.
    """
    longest = 32768 // itemsize
    block_k = triton.next_power_of_2(num_inputs)
    if block_k > longest:
        # The largest part that divides the row needs no mask.
        block_k = max(longest // 16, min(longest // 4, num_inputs & -num_inputs))
        return Tuning(1, 4, block_k, num_warps=4, num_stages=4, pdl=True)
    block_n = 2
    num_warps = max(1, min(16, block_n * block_k * itemsize // (32 * _THREAD_BYTES)))
    return Tuning(1, block_n, block_k, num_warps, pdl=True)


def _glu_tuning(block_m: int) -> Tuning:
    """Two halves of 64 rows; at more tokens shorter blocks, so that two programs fit an SM."""
    if block_m == 16:
        return Tuning(block_m, 64, 128, num_warps=4, num_stages=3)
    return Tuning(block_m, 64, 64, num_warps=4, num_stages=5)


def _head_tuning(block_m: int) -> Tuning:
    """More tiles than the device holds at once: larger ones."""
    if block_m == 16:
        return Tuning(block_m, 128, 128, num_warps=4, num_stages=3)
    return Tuning(block_m, 128, 128, num_warps=8, num_stages=4)


def _split_tuning(block_m: int, num_outputs: int, num_inputs: int) -> Tuning | None:
    """Tiles of 64 rows, the tensor cores' own; columns are split where tiles are too few.

    cuBLAS keeps what leaves a quarter of the SMs without work in the last wave (6,144 rows), and
    64 tokens by rows that are short.
    """
    block_n, block_k = 64, 128
    tiles = triton.cdiv(num_outputs, block_n)
    slots = _NUM_SMS * (2 if block_m == 16 else 1)
    num_splits = 1
    while tiles * num_splits * 2 <= slots and num_inputs >= num_splits * 8 * block_k:
        num_splits *= 2
    programs = tiles * num_splits
    waves = triton.cdiv(programs, _NUM_SMS)
    if programs < 0.8 * waves * _NUM_SMS or (block_m > 32 and num_inputs < 8192):
        return None
    return Tuning(block_m, block_n, block_k, 4, num_stages=4, num_splits=num_splits)


def choose_dense_glu(num_tokens: int, num_outputs: int) -> DenseTuning | None:
    """How `gate_up_swiglu` of more than MAX_TOKENS tokens is cut; None: cuBLAS, and `swiglu`.

    num_outputs: columns of the result. One or two full tiles of tokens, which are the graphs of 128
    and 256 rows: 68 µs instead of 76 and 110 instead of 113 at the 8B shape, in turns on a warm
    H200 (`bench/linear_many.py`, 2026-11-29). At 192 tokens, 512 and from 2,048 on cuBLAS is the
    faster one.
    """
    tuning = DenseTuning()
    num_m = triton.cdiv(num_tokens, tuning.block_m)
    num_tiles = num_m * triton.cdiv(num_outputs, tuning.block_n)
    is_full = num_m <= 2 and num_m * tuning.block_m - num_tokens <= 16
    return tuning if is_full and num_tiles >= 0.8 * _NUM_SMS else None
