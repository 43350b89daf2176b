"""Choosing tokens: exact where it is defined, right in distribution, the same in any batch."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hillstar.engine.choice import Choices, choose_on_cpu
from hillstar.engine.messages import SamplingParams
from hillstar.engine.plan import RowInit
from hillstar.engine.sampling import Sampler
from hillstar.kernels.noise import gumbel_reference, noise_keys

VOCAB_SIZE = 200
EOS_ID = 2


def params(**changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=100, **changes)  # type: ignore[arg-type]


def make_sampler(max_num_seqs: int = 8, vocab_size: int = VOCAB_SIZE) -> Sampler:
    return Sampler(
        vocab_size=vocab_size,
        max_num_seqs=max_num_seqs,
        eos_token_ids=[EOS_ID],
        device=torch.device("cpu"),
        choose=choose_on_cpu,
    )


def admit(
    sampler: Sampler,
    row: int,
    wanted: SamplingParams,
    prompt: Sequence[int] = (1,),
    outputs: Sequence[int] = (),
) -> None:
    history = np.array([*prompt, *outputs], dtype=np.int32)
    sampler.init(RowInit(row, wanted, len(prompt), history))


def draw(sampler: Sampler, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]):  # type: ignore[no-untyped-def]
    return sampler.sample(logits, np.array(rows, dtype=np.int32), np.array(positions))


def random_logits(num_rows: int = 1, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCAB_SIZE, generator=generator) * scale


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


def test_a_token_depends_on_its_own_row_alone() -> None:
    """Whatever the batch mates and the row, seed and position decide."""
    logits = random_logits(6, seed=1)
    sampler = make_sampler()
    wanted = [params(seed=s, top_k=s % 3 * 10, top_p=1 - s / 20) for s in range(6)]
    for row in range(6):
        admit(sampler, row, wanted[row])
    together = draw(sampler, logits, range(6), range(10, 16)).token_ids.tolist()
    other = make_sampler()
    alone = []
    for row in range(6):
        admit(other, 3, wanted[row])
        alone += draw(other, logits[row : row + 1], [3], [10 + row]).token_ids.tolist()
    assert together == alone


def test_a_seed_repeats_and_positions_differ() -> None:
    """The same seed and position give the same token; over positions tokens vary."""
    sampler = make_sampler()
    admit(sampler, 0, params(seed=-5))
    admit(sampler, 1, params(seed=(1 << 64) - 5))
    logits = random_logits().expand(2, -1)
    pairs = [draw(sampler, logits, [0, 1], [p, p]).token_ids.tolist() for p in range(50)]
    assert all(a == b for a, b in pairs)
    assert len({a for a, _ in pairs}) > 5


def test_penalties_equal_their_definitions() -> None:
    """Repetition is transformers' processor; presence and frequency count outputs alone."""
    logits = random_logits(seed=8)
    prompt, outputs = [5, 6, 7, 7], [7, 9, 9, 9]
    changes = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    sampler = make_sampler()
    admit(sampler, 2, params(temperature=0.0, **changes), prompt, outputs)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(
        torch.tensor([prompt + outputs]), logits.clone()
    )
    for token, count in ((7, 1), (9, 3)):
        expected[0, token] -= 0.5 + 0.25 * count
    processed = sampler._penalties.apply(logits, np.array([2]), np.array([8]))
    torch.testing.assert_close(processed, expected)


def test_penalties_follow_what_is_sampled() -> None:
    """Each sampled token counts from the next step on, and a new sequence starts afresh."""
    sampler = make_sampler()
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [10, 20, 30]] = torch.tensor([1.0, 0.9, 0.8])
    for _ in range(2):
        admit(sampler, 0, params(temperature=0.0, frequency_penalty=0.15))
        tokens = [int(draw(sampler, logits, [0], [1 + i]).token_ids) for i in range(6)]
        assert tokens == [10, 20, 10, 30, 20, 10]


def test_rows_in_the_same_step_keep_their_own_counts() -> None:
    """Many rows with penalties, admitted and readmitted, never share a count."""
    sampler = make_sampler(max_num_seqs=20)
    logits = torch.zeros(20, VOCAB_SIZE)
    for row in range(20):
        admit(sampler, row, params(temperature=0.0, presence_penalty=1.0), outputs=range(row))
    tokens = draw(sampler, logits, range(20), range(1, 21)).token_ids.tolist()
    assert tokens == list(range(20))
    for row in range(0, 20, 2):
        admit(sampler, row, params(temperature=0.0, presence_penalty=1.0))
    tokens = draw(sampler, logits, range(20), range(2, 22)).token_ids.tolist()
    assert tokens == [0 if row % 2 == 0 else row + 1 for row in range(20)]


def test_logit_bias_comes_first() -> None:
    """A bias is added to the logits, also twice the same id's, before anything else."""
    sampler = make_sampler()
    admit(sampler, 0, params(temperature=0.0, logit_bias={17: 100.0, 18: -100.0}))
    admit(sampler, 1, params(temperature=0.0))
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, 18] = 50.0
    assert draw(sampler, logits, [0, 1], [1, 1]).token_ids.tolist() == [17, 18]
    assert logits[0, 17] == 0, "the model's logits are left as they were"


def test_min_tokens_forbids_the_end() -> None:
    """EOS and stop ids cannot be chosen before min_tokens outputs; with ignore_eos EOS may be."""
    sampler = make_sampler()
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, EOS_ID], logits[:, 40], logits[:, 50] = 9.0, 8.0, 7.0
    changes = {"temperature": 0.0, "stop_token_ids": (40,), "min_tokens": 2}
    admit(sampler, 0, params(**changes), prompt=[1, 1, 1])
    admit(sampler, 1, params(**changes, ignore_eos=True), prompt=[1, 1, 1])
    tokens = [draw(sampler, logits, [0, 1], [p, p]).token_ids.tolist() for p in (3, 4, 5)]
    assert tokens == [[50, EOS_ID], [50, EOS_ID], [EOS_ID, EOS_ID]]


def test_logprobs_are_of_the_model_s_own_distribution() -> None:
    """Logprobs ignore temperature, penalties and cuts; rows that want none do not matter."""
    sampler = make_sampler()
    logits = random_logits(3, seed=4)
    admit(sampler, 0, params(temperature=0.3, top_k=1, top_logprobs=4, logit_bias={9: 100.0}))
    admit(sampler, 1, params())
    admit(sampler, 2, params(temperature=0.0, top_logprobs=0))
    sampled = draw(sampler, logits, [0, 1, 2], [1, 1, 1])
    exact = logits.log_softmax(-1)
    assert sampled.token_ids[0] == 9
    torch.testing.assert_close(sampled.logprobs, exact.gather(1, sampled.token_ids[:, None])[:, 0])
    torch.testing.assert_close(sampled.top_logprobs, exact.topk(4).values)
    assert torch.equal(sampled.top_ids, exact.topk(4).indices)


def test_without_logprobs_there_are_none() -> None:
    """Nothing is computed for logprobs that nobody asked for."""
    sampler = make_sampler()
    admit(sampler, 0, params())
    assert draw(sampler, random_logits(), [0], [1]).logprobs is None
