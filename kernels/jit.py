"""`triton.jit` with a type the type checkers can follow.

A kernel's parameters are pointers and scalars inside it and tensors and numbers at its launch,
and the launch takes options (`num_warps`, …) that are no parameters: no signature says both, so
a kernel is `Any` to its callers and its checked launcher carries the types.
"""

from collections.abc import Callable, Sequence
from typing import Any

import triton


def jit(function: Callable[..., Any]) -> Any:
    """Compile a Triton kernel, or a function called by kernels, at its first launch."""
    return triton.jit(function)


def jit_with(*, do_not_specialize: Sequence[str]) -> Callable[[Callable[..., Any]], Any]:
    """`jit`, without a version of the kernel for each kind of value of the named integers.

    Triton compiles anew for an integer that is 1, or a multiple of 16, or neither; for one that
    changes with every batch that would stall steps for seconds.
    """

    decorate: Callable[[Callable[..., Any]], Any]
    decorate = triton.jit(do_not_specialize=list(do_not_specialize))
    return decorate
