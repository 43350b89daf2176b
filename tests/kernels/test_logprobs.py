"""`logprobs` against its reference, and both against what the definitions say."""

import math
from typing import Any

import pytest
import torch

from hillstar.kernels.logprobs import logprobs, logprobs_reference


@pytest.mark.parametrize(
    ("dtype", "vocab"),
    [(torch.float32, 20), (torch.float32, 5003), (torch.bfloat16, 777), (torch.float16, 64)],
    ids=str,
)
def test_agrees_with_the_reference(
    device: torch.device, generator: torch.Generator, dtype: torch.dtype, vocab: int
) -> None:
    """Rows that ask for none, one or many beside each other get what the reference gives."""
    logits = torch.randn((6, vocab + 3), device=device, generator=generator) * 3
    logits = logits.to(dtype)[:, :vocab]
    tokens = torch.randint(0, vocab, (6,), device=device, generator=generator).int()
    num_top = torch.tensor([0, -1, 1, 20, 5, 20], dtype=torch.int32, device=device)
    chosen, top_ids, top_logprobs = logprobs(logits, tokens, num_top, 20)
    wanted = logprobs_reference(logits, tokens, num_top, 20)
    torch.testing.assert_close(chosen, wanted[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(top_ids, wanted[1])
    torch.testing.assert_close(top_logprobs, wanted[2], atol=1e-5, rtol=1e-5)


def test_ties_and_broken_logits(device: torch.device) -> None:
    """Equal logits come by the lowest id, in one group or many; NaN and -inf come last."""
    logits = torch.full((2, 5000), -math.inf, device=device)
    logits[0, [4999, 3, 64]] = 1.0
    logits[0, 0] = math.nan
    logits[1] = 0.0
    tokens = torch.tensor([64, 9], dtype=torch.int32, device=device)
    num_top = torch.full((2,), 5, dtype=torch.int32, device=device)
    chosen, top_ids, top_logprobs = logprobs(logits, tokens, num_top, 5)
    assert top_ids.tolist() == [[3, 64, 4999, 0, 1], [0, 1, 2, 3, 4]]
    assert chosen.tolist() == pytest.approx([-math.log(3), -math.log(5000)])
    assert top_logprobs[0].tolist() == pytest.approx([-math.log(3)] * 3 + [-math.inf] * 2)


def test_no_rows_is_no_work(device: torch.device) -> None:
    """An empty batch gives empty results."""
    none = torch.empty(0, dtype=torch.int32, device=device)
    results = logprobs(torch.empty((0, 9), device=device), none, none, 3)
    assert [tuple(result.shape) for result in results] == [(0,), (0, 3), (0, 3)]


@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        ("logits", torch.zeros(9)),
        ("token_ids", torch.zeros(2, dtype=torch.int64)),
        ("num_top", torch.zeros(3, dtype=torch.int32)),
        ("max_top", 10),
    ],
)
def test_a_wrong_argument_is_named(device: torch.device, argument: str, bad: Any) -> None:
    """A wrong shape, dtype or count raises a ValueError that names the argument."""
    ints = torch.zeros(2, dtype=torch.int32, device=device)
    given = {"logits": torch.zeros((2, 9), device=device), "token_ids": ints, "num_top": ints}
    given |= {"max_top": 3, argument: bad.to(device) if argument != "max_top" else bad}
    with pytest.raises(ValueError, match=f"^{argument}: "):
        logprobs(**given)
