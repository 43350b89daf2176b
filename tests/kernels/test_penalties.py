"""Biases, penalties and counts against their references."""

import math
from typing import Any

import pytest
import torch

from hillstar.kernels.penalties import (
    add_bias,
    add_bias_reference,
    apply_penalties,
    apply_penalties_reference,
    count_tokens,
    count_tokens_reference,
)


def case(vocab: int, generator: torch.Generator) -> dict[str, Any]:
    """Four rows, three with a slot; most tokens of a slot are neither seen nor produced."""
    device = generator.device
    history = torch.randint(-7, 8, (5, vocab), device=device, generator=generator).clamp_(min=0)
    return {
        "logits": torch.randn((4, vocab), device=device, generator=generator) * 4,
        "slots": torch.tensor([3, -1, 0, 4], dtype=torch.int32, device=device),
        "history": history.to(torch.int32),
        "repetition": torch.tensor([1.3, 2.0, 1.0, 0.8], device=device),
        "presence": torch.tensor([0.5, 2.0, 0.0, -0.3], device=device),
        "frequency": torch.tensor([0.0, 2.0, 0.7, 0.1], device=device),
    }


@pytest.mark.parametrize("vocab", [5, 4099])
def test_penalties_agree_with_the_reference(generator: torch.Generator, vocab: int) -> None:
    """Rows with a slot are changed as the reference says; the row without stays to the bit."""
    given = case(vocab, generator)
    wanted = given["logits"].clone()
    before = wanted[1].clone()
    apply_penalties(**given)
    apply_penalties_reference(**given | {"logits": wanted})
    torch.testing.assert_close(given["logits"], wanted, atol=2e-6, rtol=2e-6)
    assert torch.equal(given["logits"][1], before)


def test_what_each_penalty_does(device: torch.device) -> None:
    """Repetition shrinks towards less likely whatever the sign, presence counts once, frequency
    each time; a token that was not seen keeps its logit, a forbidden one stays forbidden."""
    logits = torch.tensor([[2.0, -2.0, 3.0, 3.0, -math.inf]], device=device)
    apply_penalties(
        logits,
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.tensor([[1, 1, 6, 0, 3]], dtype=torch.int32, device=device),
        repetition=torch.tensor([2.0], device=device),
        presence=torch.tensor([0.25], device=device),
        frequency=torch.tensor([0.125], device=device),
    )
    assert logits.tolist() == [[1.0, -4.0, 1.5 - 0.25 - 0.375, 3.0, -math.inf]]


def test_biases_agree_with_the_reference(generator: torch.Generator) -> None:
    """Biases add up, -inf forbids whatever else is added, and other logits stay to the bit."""
    device = generator.device
    logits = torch.randn((3, 700), device=device, generator=generator)
    rows = torch.randint(0, 3, (600,), device=device, generator=generator).int()
    tokens = torch.randint(0, 70, (600,), device=device, generator=generator).int() * 10
    bias = torch.randn(600, device=device, generator=generator)
    bias[::50] = -math.inf
    wanted = logits.clone()
    add_bias_reference(wanted, rows, tokens, bias)
    others = logits[:, 1::10].clone()
    add_bias(logits, rows, tokens, bias)
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)
    assert logits.isneginf().any()
    assert torch.equal(logits[:, 1::10], others)


def test_counts_agree_with_the_reference(generator: torch.Generator) -> None:
    """A row with a slot counts its token there, and nothing else changes."""
    device, num_rows = generator.device, 300
    history = torch.randint(0, 9, (num_rows, 50), device=device, generator=generator).int()
    slots = torch.randperm(num_rows, device=device, generator=generator).int()
    slots[::7] = -1
    tokens = torch.randint(0, 50, (num_rows,), device=device, generator=generator).int()
    wanted = history.clone()
    count_tokens_reference(wanted, slots, tokens)
    count_tokens(history, slots, tokens)
    assert torch.equal(history, wanted)


@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        ("logits", torch.zeros((4, 9), dtype=torch.bfloat16)),
        ("slots", torch.zeros(3, dtype=torch.int32)),
        ("history", torch.zeros((5, 8), dtype=torch.int32)),
        ("history", torch.zeros((5, 9))),
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


def test_wrong_biases_and_counts_are_named(device: torch.device) -> None:
    """Lengths that differ, and tokens of a wrong dtype, raise a ValueError that names them."""
    ints = torch.zeros(3, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"^bias: "):
        add_bias(torch.zeros((2, 9), device=device), ints, ints, torch.zeros(2, device=device))
    with pytest.raises(ValueError, match=r"^token_ids: "):
        count_tokens(torch.zeros((2, 9), dtype=torch.int32, device=device), ints, ints.long())
