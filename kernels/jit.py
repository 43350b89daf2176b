"""`triton.jit` with a type the type checkers can follow.

A kernel's parameters are pointers and scalars inside it and tensors and numbers at its launch,
and the launch takes options (`num_warps`, …) that are no parameters: no signature says both, so
a kernel is `Any` to its callers and its checked launcher carries the types.
"""

from collections.abc import Callable
from typing import Any

import triton


def jit(function: Callable[..., Any]) -> Any:
    """Compile a Triton kernel, or a function called by kernels, at its first launch."""
    return triton.jit(function)
