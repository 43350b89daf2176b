"""Sampling a batch: each row by its own parameters, and the same in any batch, on every device."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from hillstar.engine.cpu_sampling import CpuSampling
from hillstar.engine.cuda_sampling import CudaSampling
from hillstar.engine.messages import SamplingParams
from hillstar.engine.plan import RowInit
from hillstar.engine.sampling import Sampled, Sampler
from hillstar.engine.sampling_ops import SamplingOps
from support.logits import VOCAB_SIZE, random_logits

EOS_ID = 2


def params(**changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=100, **changes)  # type: ignore[arg-type]


@pytest.fixture(params=[CpuSampling, CudaSampling])
def ops(request: pytest.FixtureRequest) -> SamplingOps:
    """Every device's, CUDA's in the interpreter where there is none: the rules are the same."""
    made: SamplingOps = request.param()
    return made


def device_of(ops: SamplingOps) -> torch.device:
    on_cuda = isinstance(ops, CudaSampling) and torch.cuda.is_available()
    return torch.device("cuda" if on_cuda else "cpu")


def make_sampler(ops: SamplingOps, max_num_seqs: int = 8) -> Sampler:
    return Sampler(
        vocab_size=VOCAB_SIZE,
        max_num_seqs=max_num_seqs,
        eos_token_ids=[EOS_ID],
        device=device_of(ops),
        ops=ops,
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


def draw(
    sampler: Sampler, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]
) -> Sampled:
    """What a step samples from a copy of the logits, brought to the CPU."""
    copy = logits.to(sampler.device, copy=True)
    sampled = sampler.sample(copy, np.array(rows, dtype=np.int32), np.array(positions))
    tensors = (sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
    return Sampled(
        sampled.token_ids.cpu(), *(None if each is None else each.cpu() for each in tensors)
    )


def test_a_token_depends_on_its_own_row_alone(ops: SamplingOps) -> None:
    """Whatever the batch mates and the row, seed and position decide."""
    logits = random_logits(6, seed=1)
    sampler = make_sampler(ops)
    wanted = [params(seed=s, top_k=s % 3 * 10, top_p=1 - s / 20) for s in range(6)]
    for row in range(6):
        admit(sampler, row, wanted[row])
    together = draw(sampler, logits, range(6), range(10, 16)).token_ids.tolist()
    other = make_sampler(ops)
    alone = []
    for row in range(6):
        admit(other, 3, wanted[row])
        alone += draw(other, logits[row : row + 1], [3], [10 + row]).token_ids.tolist()
    assert together == alone


def test_a_seed_repeats_and_positions_differ(ops: SamplingOps) -> None:
    """The same seed and position give the same token; over positions tokens vary."""
    sampler = make_sampler(ops)
    admit(sampler, 0, params(seed=-5))
    admit(sampler, 1, params(seed=(1 << 64) - 5))
    logits = random_logits().expand(2, -1)
    pairs = [draw(sampler, logits, [0, 1], [p, p]).token_ids.tolist() for p in range(50)]
    assert all(a == b for a, b in pairs)
    assert len({a for a, _ in pairs}) > 5


def test_penalties_equal_their_definitions(ops: SamplingOps) -> None:
    """Repetition is transformers' processor; presence and frequency count outputs alone. A row
    that asks for nothing keeps its logits."""
    logits = random_logits(seed=8).repeat(2, 1)
    prompt, outputs = [5, 6, 7, 7], [7, 9, 9, 9]
    changes = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    sampler = make_sampler(ops)
    admit(sampler, 1, params())
    admit(sampler, 2, params(temperature=0.0, **changes), prompt, outputs)
    expected = logits.clone()
    expected[1:] = RepetitionPenaltyLogitsProcessor(1.3)(
        torch.tensor([prompt + outputs]), logits[1:].clone()
    )
    for token, count in ((7, 1), (9, 3)):
        expected[1, token] -= 0.5 + 0.25 * count
    changed = logits.to(sampler.device)
    sampler.sample(changed, np.array([1, 2], dtype=np.int32), np.array([1, 8]))
    torch.testing.assert_close(changed.cpu(), expected)


def test_penalties_follow_what_is_sampled(ops: SamplingOps) -> None:
    """Each sampled token counts from the next step on, and a new sequence starts afresh."""
    sampler = make_sampler(ops)
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [10, 20, 30]] = torch.tensor([1.0, 0.9, 0.8])
    for _ in range(2):
        admit(sampler, 0, params(temperature=0.0, frequency_penalty=0.15))
        tokens = [int(draw(sampler, logits, [0], [1 + i]).token_ids) for i in range(6)]
        assert tokens == [10, 20, 10, 30, 20, 10]


def test_rows_in_the_same_step_keep_their_own_counts(ops: SamplingOps) -> None:
    """Many rows with penalties, admitted and readmitted, never share a count."""
    sampler = make_sampler(ops, max_num_seqs=20)
    logits = torch.zeros(20, VOCAB_SIZE)
    for row in range(20):
        admit(sampler, row, params(temperature=0.0, presence_penalty=1.0), outputs=range(row))
    tokens = draw(sampler, logits, range(20), range(1, 21)).token_ids.tolist()
    assert tokens == list(range(20))
    for row in range(0, 20, 2):
        admit(sampler, row, params(temperature=0.0, presence_penalty=1.0))
    tokens = draw(sampler, logits, range(20), range(2, 22)).token_ids.tolist()
    assert tokens == [0 if row % 2 == 0 else row + 1 for row in range(20)]


def test_logit_bias_comes_first(ops: SamplingOps) -> None:
    """A bias is added to a row's logits before anything else, and to no other row's."""
    sampler = make_sampler(ops)
    admit(sampler, 0, params(temperature=0.0, logit_bias={17: 100.0, 18: -100.0}))
    admit(sampler, 1, params(temperature=0.0))
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, 18] = 50.0
    assert draw(sampler, logits, [0, 1], [1, 1]).token_ids.tolist() == [17, 18]


def test_min_tokens_forbids_the_end(ops: SamplingOps) -> None:
    """EOS and stop ids cannot be chosen before min_tokens outputs; with ignore_eos EOS may be."""
    sampler = make_sampler(ops)
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, EOS_ID], logits[:, 40], logits[:, 50] = 9.0, 8.0, 7.0
    changes = {"temperature": 0.0, "stop_token_ids": (40,), "min_tokens": 2}
    admit(sampler, 0, params(**changes), prompt=[1, 1, 1])
    admit(sampler, 1, params(**changes, ignore_eos=True), prompt=[1, 1, 1])
    tokens = [draw(sampler, logits, [0, 1], [p, p]).token_ids.tolist() for p in (3, 4, 5)]
    assert tokens == [[50, EOS_ID], [50, EOS_ID], [EOS_ID, EOS_ID]]


def test_logprobs_are_of_the_model_s_own_distribution(ops: SamplingOps) -> None:
    """Logprobs ignore temperature, penalties and cuts; rows that want none do not matter."""
    sampler = make_sampler(ops)
    logits = random_logits(3, seed=4)
    admit(sampler, 0, params(temperature=0.3, top_k=1, top_logprobs=4, logit_bias={9: 100.0}))
    admit(sampler, 1, params())
    admit(sampler, 2, params(temperature=0.0, top_logprobs=0))
    sampled = draw(sampler, logits, [0, 1, 2], [1, 1, 1])
    asking = [0, 2]
    exact = logits.log_softmax(-1)
    assert sampled.token_ids[0] == 9
    chosen = exact.gather(1, sampled.token_ids[:, None].long())[:, 0]
    torch.testing.assert_close(sampled.logprobs[asking], chosen[asking])
    torch.testing.assert_close(sampled.top_logprobs[0], exact.topk(4).values[0])
    assert sampled.top_ids[0].tolist() == exact.topk(4).indices[0].tolist()


def test_without_logprobs_there_are_none(ops: SamplingOps) -> None:
    """Nothing is computed for logprobs that nobody asked for."""
    sampler = make_sampler(ops)
    admit(sampler, 0, params())
    assert draw(sampler, random_logits(), [0], [1]).logprobs is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a CUDA device can be waited for")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device() -> None:
    """Rows that ask for everything are admitted and sampled without a single synchronisation."""
    sampler = make_sampler(CudaSampling())
    wanted = params(
        top_k=20,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        frequency_penalty=0.1,
        logit_bias={5: 2.0},
        min_tokens=3,
        top_logprobs=5,
    )
    logits = random_logits(8).cuda()
    rows, positions = np.arange(8, dtype=np.int32), np.full(8, 4)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for row in range(8):
            admit(sampler, row, wanted, prompt=[1, 2, 3], outputs=[4])
        for step in range(3):
            sampler.sample(logits.clone(), rows, positions + step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
