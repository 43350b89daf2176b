"""Choosing tokens on a CPU: exact where it is defined, right in distribution."""

import math

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hillstar.engine.choice import choose_on_cpu
from hillstar.engine.sampling_ops import Choices
from hillstar.kernels.noise import gumbel_reference, noise_keys
from support.logits import VOCAB_SIZE, random_logits


def choices(num_rows: int, **changes: float) -> Choices:
    """`num_rows` rows of equal parameters, at the positions 0, 1, 2, … of seed 7."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **changes}
    seed, positions = np.full(num_rows, 7, dtype=np.int64), np.arange(num_rows, dtype=np.int64)
    return Choices(
        temperature=np.full(num_rows, values["temperature"], dtype=np.float32),
        top_k=np.full(num_rows, values["top_k"], dtype=np.int32),
        top_p=np.full(num_rows, values["top_p"], dtype=np.float32),
        min_p=np.full(num_rows, values["min_p"], dtype=np.float32),
        keys=noise_keys(seed, positions),
    )


WARPERS = {
    "plain": ({}, []),
    "temperature": ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
    "top_k": ({"top_k": 12}, [TopKLogitsWarper(12)]),
    "top_p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "min_p": ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
    "all": (
        {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        [
            TemperatureLogitsWarper(1.4),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ],
    ),
}


@pytest.mark.parametrize("name", WARPERS)
def test_tokens_have_the_processed_distribution(name: str) -> None:
    """Over many positions, frequencies pass a chi-squared test against transformers' softmax."""
    changes, warpers = WARPERS[name]
    num_draws = 20_000
    logits = random_logits()
    warped = LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.long), logits.clone())
    expected = warped.softmax(-1)[0].double().numpy() * num_draws
    tokens = choose_on_cpu(logits.expand(num_draws, -1), choices(num_draws, **changes))
    counts = np.bincount(tokens.numpy(), minlength=VOCAB_SIZE)
    assert not counts[expected == 0].any(), "a token that was cut off was chosen"
    frequent = expected >= 5
    rare = expected[~frequent].sum()
    statistic = ((counts[frequent] - expected[frequent]) ** 2 / expected[frequent]).sum()
    if rare > 0:
        statistic += (counts[~frequent].sum() - rare) ** 2 / rare
    degrees = frequent.sum() - (rare == 0)
    # Wilson and Hilferty: chi-squared's cube root is near normal; 4 sigma, seeds are fixed.
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    assert z < 4


@pytest.mark.parametrize("scale", [0.1, 2.0, 30.0])
def test_the_search_is_exact(scale: float) -> None:
    """Sparing the noise of tokens that cannot win never changes the winner."""
    logits = random_logits(500, seed=3, scale=scale)
    wanted = choices(500, temperature=0.9)
    noise = gumbel_reference(wanted.keys, np.arange(VOCAB_SIZE, dtype=np.int32))
    exact = (logits / 0.9 + torch.from_numpy(noise)).argmax(-1)
    assert torch.equal(choose_on_cpu(logits, wanted), exact)


def test_a_nucleus_of_a_flat_distribution_spans_more_than_the_first_search() -> None:
    """With 10,000 equal tokens any may come; with nearly equal ones, the best 90 % may."""
    logits = torch.zeros(2000, 10_000)
    tokens = choose_on_cpu(logits, choices(2000, top_p=0.9))
    assert tokens.max() > 9000
    logits = torch.linspace(1e-3, 0, 10_000).expand(2000, -1)
    tokens = choose_on_cpu(logits, choices(2000, top_p=0.9))
    assert 8500 < tokens.max() < 9001


def test_ties_at_a_threshold_are_kept() -> None:
    """No order among equal logits decides which of them may be chosen."""
    logits = torch.full((500, VOCAB_SIZE), -20.0)
    logits[:, [3, 50, 90, 120]] = 1.0
    for changes in ({"top_k": 2}, {"top_p": 0.3}, {"min_p": 1.0}):
        assert set(choose_on_cpu(logits, choices(500, **changes)).tolist()) == {3, 50, 90, 120}


def test_greedy_takes_the_lowest_of_equals() -> None:
    """Temperature 0 is the argmax, ties to the lowest id."""
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [40, 30]] = 1.0
    assert choose_on_cpu(logits, choices(1, temperature=0.0)).tolist() == [30]


def test_a_broken_row_breaks_no_other() -> None:
    """NaN counts as minus infinity; a row of nothing else gives token 0."""
    logits = random_logits(3)
    wanted = choices(3, top_k=5)
    alone = choose_on_cpu(logits, wanted)[2]
    logits[0] = torch.nan
    logits[1] = torch.nan
    logits[1, 77] = 0.0
    tokens = choose_on_cpu(logits, wanted)
    assert tokens[1:].tolist() == [77, alone]
    assert choose_on_cpu(logits, choices(3, temperature=0.0))[:2].tolist() == [0, 77]
