"""`paged_attention` against its reference, and the reference against torch's own attention."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from hillstar.kernels.attention import paged_attention, paged_attention_reference
from hillstar.kernels.attention_tuning import Tiling, Tuning, choose_tuning

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SMALL = Tuning(
    short=Tiling(16, 16, 4, 2, programs_per_sm=1, min_share=1 << 20),
    long=Tiling(16, 16, 4, 2, programs_per_sm=1, min_share=1 << 20),
)
SPLIT = Tuning(
    short=Tiling(16, 32, 2, 2, programs_per_sm=7, min_share=16),
    long=Tiling(16, 16, 4, 2, programs_per_sm=24, min_share=16),
)


@dataclass(frozen=True)
class Shape:
    """A model's attention: query heads, KV heads, head dim, block size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


def case(
    shape: Shape,
    rows: list[tuple[int, int]],
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Arguments for rows of (q_len, context): scattered blocks, NaN wherever nothing is stored."""
    device, size = generator.device, shape.block_size
    counts = [-(-context // size) for _, context in rows]
    pool_shape = (sum(counts) + 2, 3, 2, shape.num_kv_heads, size, shape.head_dim)
    pool = torch.full(pool_shape, float("nan"), device=device, dtype=dtype)
    free = (torch.randperm(sum(counts), device=device, generator=generator) + 2).tolist()
    tables = torch.zeros((len(rows), max(1, *counts) + 1), dtype=torch.int32, device=device)
    for row, (_, context) in enumerate(rows):
        for index in range(counts[row]):
            block = free.pop()
            tables[row, index] = block
            filled = min(size, context - index * size)
            values = torch.randn(
                (2, shape.num_kv_heads, filled, shape.head_dim), device=device, generator=generator
            )
            pool[block, 1, :, :, :filled] = values.to(dtype)
    num_tokens = sum(q_len for q_len, _ in rows)
    qkv = torch.randn(
        (num_tokens, shape.num_heads + 1, shape.head_dim), device=device, generator=generator
    )
    lengths = torch.tensor([0, *(q_len for q_len, _ in rows)], device=device)
    return {
        "q": qkv.to(dtype)[:, : shape.num_heads],
        "kv": pool[:, 1],
        "block_tables": tables,
        "cu_seqlens_q": lengths.cumsum(0).to(torch.int32),
        "context_lens": torch.tensor([c for _, c in rows], dtype=torch.int32, device=device),
        "scale": shape.head_dim**-0.5,
        "max_q_len": max(q_len for q_len, _ in rows),
        "max_context_len": max(context for _, context in rows),
    }


def check(arguments: dict[str, Any]) -> torch.Tensor:
    """Run the kernel and its reference on the same arguments; return the kernel's output."""
    out = paged_attention(**arguments)
    tolerance = TOLERANCE[out.dtype]
    wanted = paged_attention_reference(**arguments)
    torch.testing.assert_close(out, wanted, atol=tolerance, rtol=tolerance)
    return out


MIXED = [(1, 37), (11, 11), (1, 1), (9, 60), (2, 16)]
DECODE = [(1, 1), (1, 16), (1, 17), (1, 95)]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("tuning", [SMALL, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
def test_agrees_with_the_reference(
    generator: torch.Generator, dtype: torch.dtype, tuning: Tuning, rows: list[tuple[int, int]]
) -> None:
    """Decode rows and prefill chunks, first and continued, in one call, split or not."""
    arguments = case(Shape(6, 2, 32, 16), rows, generator, dtype)
    check(arguments | {"tuning": tuning})


@pytest.mark.parametrize(
    "shape",
    [
        Shape(4, 4, 64, 8),  # no grouping
        Shape(5, 1, 80, 16),  # one KV head, a head dim that needs padding
        Shape(8, 2, 96, 32),
        Shape(4, 1, 128, 64),
        Shape(34, 1, 16, 16),  # a group wider than a tile of 16
    ],
    ids=str,
)
def test_shapes_of_models(generator: torch.Generator, shape: Shape) -> None:
    """Any grouping of heads, head dim and block size, with the tuning chosen for it."""
    check(case(shape, [(1, 50), (20, 33), (1, 3)], generator))


@pytest.mark.parametrize("window", [1, 7, 16, 40, 1000])
@pytest.mark.parametrize("tuning", [SMALL, SPLIT], ids=["whole", "split"])
def test_window(generator: torch.Generator, window: int, tuning: Tuning) -> None:
    """With a window a query sees that many tokens, itself included, and no older one."""
    arguments = case(Shape(3, 1, 32, 16), [(1, 60), (1, 5), (9, 61), (12, 12)], generator)
    check(arguments | {"window": window, "tuning": tuning})


def test_reference_is_softmax_attention(generator: torch.Generator) -> None:
    """The reference equals torch's causal attention over the gathered keys and values."""
    arguments = case(Shape(4, 2, 32, 16), [(45, 45)], generator)
    blocks = arguments["kv"][arguments["block_tables"][0, :3].long()]
    keys, values = blocks.permute(1, 2, 0, 3, 4).reshape(2, 2, 48, 32)[:, :, :45]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        arguments["q"].transpose(0, 1)[None],
        keys.repeat_interleave(2, dim=0)[None],
        values.repeat_interleave(2, dim=0)[None],
        is_causal=True,
    )
    out = paged_attention_reference(**arguments)
    torch.testing.assert_close(out, wanted[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_padded_rows_and_tokens(generator: torch.Generator) -> None:
    """Rows without queries are skipped, a query without context gives zeros, and tokens past
    the last row disturb nothing: what a CUDA graph pads a batch with."""
    arguments = case(Shape(4, 2, 32, 16), [(1, 20), (0, 0), (1, 0), (18, 18), (0, 0)], generator)
    out = check(arguments | {"tuning": SMALL})
    assert not out[1].any()
    padded = torch.cat((arguments["q"], torch.full_like(arguments["q"][:7], float("nan"))))
    again = paged_attention(**arguments | {"q": padded, "tuning": SMALL})
    assert torch.equal(again[:20], out)


def test_bounds_may_be_loose(generator: torch.Generator) -> None:
    """The host bounds choose grids, never results: any upper bound is right."""
    arguments = case(Shape(4, 2, 32, 16), [(1, 20), (3, 90)], generator)
    for tuning in (SPLIT, replace(SPLIT, split_tokens=16)):
        arguments["tuning"] = tuning
        loose = arguments | {"max_q_len": 64, "max_context_len": 96}
        assert torch.equal(paged_attention(**loose), check(arguments))


def test_a_launch_leaves_the_counters_as_it_found_them(generator: torch.Generator) -> None:
    """One tensor of zeros serves one launch after the other, with the same bits each time; one
    too small is refused by size."""
    arguments = case(Shape(4, 2, 32, 16), [(1, 60), (0, 0), (3, 40)], generator)
    arguments["tuning"] = SPLIT
    counters = torch.zeros(3 * 2 * 4, dtype=torch.int32, device=generator.device)
    first, second = (check(arguments | {"counters": counters}) for _ in range(2))
    assert not counters.any()
    assert torch.equal(first, second)
    with pytest.raises(ValueError, match=r"^counters: 6 elements; expected at least \d+$"):
        paged_attention(**arguments | {"counters": counters[:6]})


@pytest.mark.parametrize("tuning", [SMALL, SPLIT], ids=["whole", "split"])
def test_uneven_contexts(generator: torch.Generator, tuning: Tuning) -> None:
    """Rows of every length share the programs, also where a program walks over many of them."""
    rows = [(1, 3 * i + 1) for i in range(20)] + [(0, 0), (2, 200)]
    check(case(Shape(4, 2, 16, 16), rows, generator) | {"tuning": tuning})


def test_no_tokens_is_no_work(generator: torch.Generator) -> None:
    """A batch without tokens gives an empty result."""
    arguments = case(Shape(4, 2, 32, 16), [(0, 20)], generator)
    assert paged_attention(**arguments).shape == (0, 4, 32)


def test_tilings_hold_a_group() -> None:
    """Every tuning's tile has room for one token of all heads of a group, in powers of two."""
    for group in (1, 3, 4, 8, 17, 71):
        for head_dim in (16, 64, 80, 128, 256):
            for itemsize in (2, 4):
                tuning = choose_tuning(group, head_dim, itemsize)
                for tiling in (tuning.short, tuning.long):
                    assert tiling.block_m >= group
                    for size in (tiling.block_m, tiling.block_n):
                        assert size >= 16
                        assert size & (size - 1) == 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 6 GiB of device memory")
def test_offsets_pass_32_bits(generator: torch.Generator) -> None:
    """Blocks that lie beyond 2^31 elements in the pool are read where they are."""
    arguments = case(Shape(8, 8, 128, 32), [(1, 70), (40, 70)], generator, torch.bfloat16)
    pool = torch.zeros((1100, 32, 2, 8, 32, 128), dtype=torch.bfloat16, device=generator.device)
    far = pool[1100 - arguments["kv"].shape[0] :, 31]
    far.copy_(arguments["kv"])
    wanted = paged_attention(**arguments)
    tables = arguments["block_tables"] + (1100 - far.shape[0])
    out = paged_attention(**arguments | {"kv": pool[:, 31], "block_tables": tables})
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        ("q", torch.zeros((1, 4, 24))),
        ("q", torch.zeros((1, 4, 32), dtype=torch.float64)),
        ("kv", torch.zeros((3, 2, 3, 16, 32))),
        ("kv", torch.zeros((3, 2, 2, 12, 32))),
        ("kv", torch.zeros((3, 2, 2, 16, 32), dtype=torch.bfloat16)),
        ("kv", torch.zeros((3, 2, 2, 16, 64))[..., ::2]),
        ("block_tables", torch.zeros((1, 4), dtype=torch.int64)),
        ("cu_seqlens_q", torch.zeros(1, dtype=torch.int32)),
        ("context_lens", torch.zeros(2, dtype=torch.int32)),
        ("max_context_len", 1000),
        ("window", -1),
        ("scale", 0.0),
        ("counters", torch.zeros(9, dtype=torch.float16)),
    ],
)
def test_a_wrong_argument_is_named(
    generator: torch.Generator,
    moved: Callable[[torch.Tensor], torch.Tensor],
    argument: str,
    bad: Any,
) -> None:
    """A wrong shape, dtype, stride or value raises a ValueError that names the argument."""
    arguments = case(Shape(4, 2, 32, 16), [(1, 20)], generator)
    wrong = moved(bad) if isinstance(bad, torch.Tensor) else bad
    with pytest.raises(ValueError, match=f"^{argument}: "):
        paged_attention(**arguments | {argument: wrong})
