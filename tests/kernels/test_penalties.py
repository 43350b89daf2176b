"""`apply_penalties` against its reference."""

from typing import Any

import pytest
import torch

from hillstar.kernels.penalties import apply_penalties, apply_penalties_reference


def case(vocab: int, generator: torch.Generator) -> dict[str, Any]:
    """Four rows, three with a slot; the slots have seen and produced random tokens."""
    device = generator.device
    seen = torch.rand((5, vocab), device=device, generator=generator) < 0.3
    counts = torch.randint(-3, 4, (5, vocab), device=device, generator=generator).clamp_(min=0)
    return {
        "logits": torch.randn((4, vocab), device=device, generator=generator) * 4,
        "slots": torch.tensor([3, -1, 0, 4], dtype=torch.int32, device=device),
        "is_seen": seen,
        "num_outputs": counts.to(torch.int16),
        "repetition": torch.tensor([1.3, 2.0, 1.0, 0.8], device=device),
        "presence": torch.tensor([0.5, 2.0, 0.0, -0.3], device=device),
        "frequency": torch.tensor([0.0, 2.0, 0.7, 0.1], device=device),
    }


@pytest.mark.parametrize("vocab", [5, 1025])
@pytest.mark.parametrize("counts", [torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("flags", [torch.bool, torch.uint8], ids=str)
def test_agrees_with_the_reference(
    generator: torch.Generator, vocab: int, counts: torch.dtype, flags: torch.dtype
) -> None:
    """Rows with a slot are changed as the reference says; the row without stays to the bit."""
    given = case(vocab, generator)
    given["is_seen"] = given["is_seen"].to(flags)
    given["num_outputs"] = given["num_outputs"].to(counts)
    wanted = given["logits"].clone()
    before = wanted[1].clone()
    apply_penalties(**given)
    apply_penalties_reference(**given | {"logits": wanted})
    torch.testing.assert_close(given["logits"], wanted, atol=2e-6, rtol=2e-6)
    assert torch.equal(given["logits"][1], before)


def test_what_each_penalty_does(device: torch.device) -> None:
    """Repetition shrinks towards less likely whatever the sign, presence counts once, frequency
    each time; a token neither seen nor produced keeps its logit."""
    logits = torch.tensor([[2.0, -2.0, 3.0, 3.0]], device=device)
    apply_penalties(
        logits,
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.tensor([[True, True, False, False]], device=device),
        torch.tensor([[0, 0, 3, 0]], dtype=torch.int16, device=device),
        repetition=torch.tensor([2.0], device=device),
        presence=torch.tensor([0.25], device=device),
        frequency=torch.tensor([0.125], device=device),
    )
    assert logits.tolist() == [[1.0, -4.0, 1.5 - 0.25 - 0.375, 3.0]]


@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        ("logits", torch.zeros((4, 9), dtype=torch.bfloat16)),
        ("slots", torch.zeros(3, dtype=torch.int32)),
        ("is_seen", torch.zeros((5, 8), dtype=torch.bool)),
        ("num_outputs", torch.zeros((4, 9), dtype=torch.int16)),
        ("num_outputs", torch.zeros((5, 9))),
        ("repetition", torch.zeros(4, dtype=torch.float16)),
        ("presence", torch.zeros(3)),
        ("frequency", torch.zeros((4, 1))),
    ],
)
def test_a_wrong_argument_is_named(
    generator: torch.Generator, argument: str, bad: torch.Tensor
) -> None:
    """A wrong shape or dtype raises a ValueError that names the argument."""
    given = case(9, generator) | {argument: bad.to(generator.device)}
    with pytest.raises(ValueError, match=f"^{argument}: "):
        apply_penalties(**given)
