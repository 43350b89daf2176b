"""`rope` against its reference and against transformers' rotation."""

from collections.abc import Callable

import pytest
import torch

from hillstar.kernels.rope import rope, rope_reference

TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def tables(max_pos: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """float32 `[max_pos, head_dim]`: cosines, then sines, theta 10000."""
    inverse = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.arange(max_pos, device=device)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"), [(1, 9, 3, 64), (5, 4, 4, 80)]
)
def test_agrees_with_the_reference(
    device: torch.device,
    generator: torch.Generator,
    dtype: torch.dtype,
    with_norm: bool,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """q and k as views of one qkv matrix are rotated in place; v beside them stays."""
    width = num_heads + 2 * num_kv_heads
    qkv = torch.randn((num_tokens, width, head_dim), device=device, generator=generator).to(dtype)
    wanted = qkv.clone()
    weights = [None, None]
    if with_norm:
        pair = torch.randn((2, head_dim), device=device, generator=generator).to(dtype)
        weights = [pair[0], pair[1]]
    positions = torch.randint(0, 100, (num_tokens,), device=device, generator=generator)
    cos_sin = tables(100, head_dim, device)
    for matrix, function in ((qkv, rope), (wanted, rope_reference)):
        function(
            matrix[:, :num_heads],
            matrix[:, num_heads : num_heads + num_kv_heads],
            positions.to(torch.int32),
            cos_sin,
            q_norm=weights[0],
            k_norm=weights[1],
        )
    torch.testing.assert_close(qkv, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(qkv[:, num_heads + num_kv_heads :], wanted[:, num_heads + num_kv_heads :])


def test_reference_is_the_llama_rotation() -> None:
    """The reference equals transformers' apply_rotary_pos_emb in float32."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = torch.randn(2, 6, 4, 32)
    positions = torch.tensor([0, 1, 5, 17, 3, 99])
    cos_sin = tables(100, 32, q.device)
    cos, sin = (half.repeat(1, 2)[None] for half in cos_sin[positions].chunk(2, dim=-1))
    wanted_q, wanted_k = apply_rotary_pos_emb(
        q[None].transpose(1, 2), k[None].transpose(1, 2), cos, sin
    )
    rope_reference(q, k, positions, cos_sin)
    torch.testing.assert_close(q, wanted_q[0].transpose(0, 1))
    torch.testing.assert_close(k, wanted_k[0].transpose(0, 1))


@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        ("q", torch.zeros((2, 4, 7))),
        ("k", torch.zeros((3, 2, 8))),
        ("k", torch.zeros((2, 2, 8), dtype=torch.float16)),
        ("positions", torch.zeros(2)),
        ("cos_sin", torch.zeros((9, 8), dtype=torch.bfloat16)),
        ("cos_sin", torch.zeros((9, 16))[:, :8]),
        ("q_norm", torch.zeros(4)),
    ],
)
def test_a_wrong_argument_is_named(
    moved: Callable[[torch.Tensor], torch.Tensor], argument: str, bad: torch.Tensor
) -> None:
    """A wrong shape, dtype or stride raises a ValueError that names the argument."""
    arguments = {
        "q": torch.zeros((2, 4, 8)),
        "k": torch.zeros((2, 2, 8)),
        "positions": torch.zeros(2, dtype=torch.int32),
        "cos_sin": torch.zeros((9, 8)),
        "q_norm": torch.zeros(8),
        "k_norm": torch.zeros(8),
    }
    given = {name: moved(value) for name, value in (arguments | {argument: bad}).items()}
    norms = {name: given.pop(name) for name in ("q_norm", "k_norm")}
    with pytest.raises(ValueError, match=f"^{argument}: "):
        rope(**given, **norms)


def test_one_norm_without_the_other_is_refused(device: torch.device) -> None:
    """q_norm and k_norm come together."""
    x = torch.zeros((1, 1, 8), device=device)
    positions = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"^q_norm: "):
        rope(x, x, positions, tables(4, 8, device), q_norm=torch.zeros(8, device=device))
