"""`rope_store` against its reference, and the reference against transformers' rotation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hillstar.kernels.rope import rope_store, rope_store_reference

TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def tables(max_pos: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """float32 `[max_pos, head_dim]`: cosines, then sines, theta 10000."""
    inverse = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.arange(max_pos, device=device)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(1, 9, 3, 64, 8), (5, 4, 4, 80, 16), (2, 20, 10, 32, 16)],
)
def test_agrees_with_the_reference(
    device: torch.device,
    generator: torch.Generator,
    dtype: torch.dtype,
    with_norm: bool,
    index_dtype: torch.dtype,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    """Of views of one qkv matrix, q is rotated in place and k and v stay; the slots of one layer
    of the pool are written, and nothing else of it."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    width = num_heads + 2 * num_kv_heads
    qkv, pool = (
        draw(num_tokens, width, head_dim),
        draw(5, 2, 2, num_kv_heads, block_size, head_dim),
    )
    wanted_qkv, wanted_pool = qkv.clone(), pool.clone()
    norms = {"q_norm": draw(head_dim), "k_norm": draw(head_dim)} if with_norm else {}
    positions = torch.randint(0, 100, (num_tokens,), device=device, generator=generator)
    slots = torch.randperm(5 * block_size, device=device, generator=generator)[:num_tokens]
    for matrix, blocks, function in (
        (qkv, pool, rope_store),
        (wanted_qkv, wanted_pool, rope_store_reference),
    ):
        function(
            *matrix.split((num_heads, num_kv_heads, num_kv_heads), dim=1),
            blocks[:, 1],
            positions.to(index_dtype),
            slots.to(index_dtype),
            tables(100, head_dim, device),
            **norms,
        )
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(qkv[:, :num_heads], wanted_qkv[:, :num_heads], **tolerance)
    assert torch.equal(qkv[:, num_heads:], wanted_qkv[:, num_heads:])
    torch.testing.assert_close(pool[:, 1, 0], wanted_pool[:, 1, 0], **tolerance)
    assert torch.equal(pool[:, 1, 1], wanted_pool[:, 1, 1])
    assert torch.equal(pool[:, 0], wanted_pool[:, 0])


def test_a_negative_slot_is_skipped(device: torch.device) -> None:
    """A token with slot -1 is rotated and not stored, not even in the last block."""
    kv = torch.zeros((2, 2, 1, 8, 16), device=device)
    q, k, v = torch.ones((3, 2, 1, 16), device=device).unbind()
    positions, slots = torch.tensor([[3, 0], [-1, 9]], device=device)
    rope_store(q, k, v, kv, positions, slots, tables(4, 16, device))
    assert not torch.equal(q[0], k[0])
    assert int(kv.count_nonzero()) == 2 * 16
    assert bool((kv[1, :, 0, 1] == 1).all())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 6 GiB of device memory")
def test_offsets_pass_32_bits(device: torch.device, generator: torch.Generator) -> None:
    """In a pool of more than 2^31 elements the last slot is the last slot."""
    pool = torch.zeros((1100, 2**21), dtype=torch.bfloat16, device=device)  # 2.3e9 elements
    kv = pool.view(1100, 32, 2, 8, 32, 128)[:, 31]
    q, k, v = torch.randn((3, 3, 8, 128), device=device, generator=generator).bfloat16()
    slots = torch.tensor([1099 * 32 + 31, 1060 * 32, 5], device=device)
    positions = torch.zeros_like(slots)
    rope_store(q, k, v, kv, positions, slots, tables(4, 128, device))
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(kv[slot // 32, 0, :, slot % 32], k[i])
        assert torch.equal(kv[slot // 32, 1, :, slot % 32], v[i])
    assert sum(int(part.count_nonzero()) for part in pool.split(100)) == 2 * k.numel()


def test_reference_is_the_llama_rotation() -> None:
    """The reference equals transformers' apply_rotary_pos_emb in float32."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k, v = torch.randn(3, 6, 4, 32)
    kv = torch.zeros((1, 2, 4, 8, 32))
    positions, slots = torch.tensor([[0, 1, 5, 17, 3, 99], [0, 1, 2, 3, 4, 5]])
    cos_sin = tables(100, 32, q.device)
    cos, sin = (half.repeat(1, 2)[None] for half in cos_sin[positions].chunk(2, dim=-1))
    wanted_q, wanted_k = apply_rotary_pos_emb(
        q[None].transpose(1, 2), k[None].transpose(1, 2), cos, sin
    )
    rope_store_reference(q, k, v, kv, positions, slots, cos_sin)
    torch.testing.assert_close(q, wanted_q[0].transpose(0, 1))
    torch.testing.assert_close(kv[0, 0, :, :6], wanted_k[0])
    assert torch.equal(kv[0, 1, :, :6], v.transpose(0, 1))


def test_no_tokens_is_no_work(device: torch.device) -> None:
    """An empty step leaves the cache as it is."""
    kv = torch.zeros((2, 2, 1, 8, 16), device=device)
    none, no_ints = torch.empty((0, 1, 16), device=device), torch.empty(0, device=device).int()
    rope_store(none, none, none, kv, no_ints, no_ints, tables(4, 16, device))
    assert int(kv.count_nonzero()) == 0


def given(device: torch.device) -> dict[str, Any]:
    """Legal arguments."""
    shapes = {"q": (2, 4, 8), "k": (2, 2, 8), "v": (2, 2, 8), "kv": (3, 2, 2, 16, 8)}
    shapes |= {"cos_sin": (9, 8), "q_norm": (8,), "k_norm": (8,)}
    arguments = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    integers = {name: torch.zeros(2, device=device).int() for name in ("positions", "slot_mapping")}
    return arguments | integers


@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        ("q", torch.zeros((2, 4, 7))),
        ("k", torch.zeros((3, 2, 8))),
        ("k", torch.zeros((2, 2, 8), dtype=torch.float16)),
        ("v", torch.zeros((2, 1, 8))),
        ("v", torch.zeros((2, 2, 8), dtype=torch.float16)),
        ("kv", torch.zeros((3, 3, 2, 16, 8))),
        ("kv", torch.zeros((3, 2, 2, 12, 8))),
        ("kv", torch.zeros((3, 2, 2, 16, 8), dtype=torch.float16)),
        ("positions", torch.zeros(2)),
        ("slot_mapping", torch.zeros(3, dtype=torch.int32)),
        ("slot_mapping", torch.zeros(2)),
        ("cos_sin", torch.zeros((9, 8), dtype=torch.bfloat16)),
        ("cos_sin", torch.zeros((9, 16))[:, :8]),
        ("q_norm", torch.zeros(4)),
        ("q_norm", None),
    ],
)
def test_a_wrong_argument_is_named(
    device: torch.device,
    moved: Callable[[torch.Tensor], torch.Tensor],
    argument: str,
    bad: torch.Tensor | None,
) -> None:
    """A wrong shape, dtype or stride raises a ValueError that names the argument; so does one
    norm without the other."""
    wrong = None if bad is None else moved(bad)
    with pytest.raises(ValueError, match=f"^{argument}: "):
        rope_store(**given(device) | {argument: wrong})
