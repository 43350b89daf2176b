"""The parts of a split context put together: for `kernels/attention.py`."""

from typing import Any

import triton.language as tl

from hillstar.kernels.jit import jit

AT_ONCE = 8  # parts that are loaded before any is weighed


@jit
def merge(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    first: tl.tensor,
    gap: tl.tensor,
    num_parts: tl.tensor,
    query: tl.tensor,
    part_rows: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> Any:
    """`[GROUP, DIM]` of one query of a tile, padded to a power of two: its parts weighed together
    in their order, AT_ONCE in flight. The first lies at `first`, the others
    follow after a gap."""
    heads = tl.arange(0, HEADS)
    columns = tl.arange(0, DIM)
    in_group = heads < GROUP
    in_part = in_group[:, None] & (columns < HEAD_DIM)[None, :]
    maximum = tl.full([HEADS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([HEADS], dtype=tl.float32)
    acc = tl.zeros([HEADS, DIM], dtype=tl.float32)
    for begin in tl.range(0, num_parts, AT_ONCE):  # pyright: ignore[reportGeneralTypeIssues]
        highest = maximum
        for index in tl.static_range(AT_ONCE):  # pyright: ignore[reportGeneralTypeIssues]
            part = begin + index
            row = (first + part + tl.where(part > 0, gap, 0)).to(tl.int64) * part_rows
            # Other programs wrote the parts: they are in the L2 cache, not in this SM's own.
            lse = tl.load(
                partial_lse + row + query * GROUP + heads,
                mask=tl.where(in_group, part, num_parts) < num_parts,
                other=float("-inf"),
                cache_modifier=".cg",
            )
            highest = tl.maximum(highest, lse)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        decay = tl.exp2(maximum - base)
        total = total * decay
        acc = acc * decay[:, None]
        for index in tl.static_range(AT_ONCE):  # pyright: ignore[reportGeneralTypeIssues]
            part = begin + index
            row = (first + part + tl.where(part > 0, gap, 0)).to(tl.int64) * part_rows
            row += query * GROUP + heads
            lse = tl.load(
                partial_lse + row,
                mask=tl.where(in_group, part, num_parts) < num_parts,
                other=float("-inf"),
                cache_modifier=".cg",
            )
            values = tl.load(
                partial_out + (row * HEAD_DIM)[:, None] + columns[None, :],
                mask=tl.where(in_part, part, num_parts) < num_parts,
                other=0.0,
                cache_modifier=".cg",
            )
            weight = tl.exp2(lse - base)
            total += weight
            acc += weight[:, None] * values
        maximum = highest
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@jit
def store_heads(
    out: tl.tensor,
    values: tl.tensor,
    token: tl.tensor,
    kv_head: tl.tensor,
    num_kv_heads: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Write what `merge` gave for a token."""
    heads = tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, DIM)[None, :]
    where = out + ((token * num_kv_heads + kv_head) * GROUP + heads) * HEAD_DIM + columns
    tl.store(where, values, mask=(heads < GROUP) & (columns < HEAD_DIM))
