"""Programmatic dependent launch: a kernel that starts while the kernel before it still runs.

A kernel so launched may start once every program of the kernel before has called
`gdc_launch_dependents`, or has ended; its `gdc_wait` returns when that kernel is done and what it
wrote can be seen. Ours call the first at their start, so that a launch, the arithmetic of
addresses and loads of what no kernel writes are hidden behind the kernel before.

Why results do not change. Let kernels 1 … n be launched so, one after the other, behind a kernel 0
that was launched plainly. Every program of theirs waits before it ends, also one that has nothing
to do, so kernel i is not done before kernel i - 1: by induction a wait of kernel i returns when
all kernels before it are done. Whatever is touched after the wait is ordered as if all had been
launched plainly: inputs, outputs (memory that an allocator hands out again), the KV cache,
workspaces, counters. Before its wait, kernel i may run beside any of the kernels 1 … i - 1, for
each may have started as early as this one. It may read what none of them writes, and writes
nothing: it reads weights, and the step's positions, slots, block tables and lengths.

Hence a rule for callers: weights and those integers are written before a kernel that is launched
plainly (as all of torch's are), and that one before the first of these.
"""

import torch
import triton.language as tl

from hillstar.kernels.jit import jit


def has_pdl(device: torch.device) -> bool:
    """Whether kernels on the device may be launched so: from sm_90 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@jit
def prefetch(where: tl.tensor, num_bytes: tl.tensor) -> None:
    """Ask the L2 cache for `num_bytes` from each of the addresses, both multiples of 16.

    The program reads nothing by it: it is no harm where another kernel still writes.
    """
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [where, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
