"""The runner, driven by plans: equal to transformers, and to itself in any batch."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from hillstar.engine.messages import SamplingParams
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.load import load_weights
from hillstar.engine.models.weights import Weights
from support.drive import GREEDY, Drive, Feed, generate
from support.tiny_models import VOCAB_SIZE, save_tiny

SAMPLED = SamplingParams(max_tokens=100, temperature=0.9, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, Weights, PreTrainedModel]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    model = save_tiny("llama", folder)
    config = ModelConfig.from_dir(folder)
    return config, load_weights(folder, config, dtype=torch.float32), model


@pytest.fixture
def drive(tiny: tuple[ModelConfig, Weights, PreTrainedModel]) -> Iterator[Drive]:
    config, weights, _ = tiny
    yield Drive(config, weights)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_greedy_equals_transformers_generate(
    tiny: tuple[ModelConfig, Weights, PreTrainedModel], drive: Drive, chunk: int
) -> None:
    """Prefilled in any chunks and decoded with a step in flight, tokens are transformers'."""
    given = prompt(45)
    expected = tiny[2].generate(
        torch.tensor([given]),
        attention_mask=torch.ones(1, 45, dtype=torch.long),
        max_new_tokens=40,
        min_new_tokens=40,
        do_sample=False,
        suppress_tokens=None,
    )[0, 45:]
    wanted = SamplingParams(max_tokens=40, temperature=0.0, min_tokens=40)
    assert generate(drive, given, 40, wanted, chunk=chunk) == expected.tolist()


@pytest.mark.parametrize("wanted", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_batch_composition_changes_nothing(
    tiny: tuple[ModelConfig, Weights, PreTrainedModel], wanted: SamplingParams
) -> None:
    """Rows that decode beside others that prefill give the tokens they give alone."""
    config, weights, _ = tiny
    prompts = [prompt(n, seed=n) for n in (5, 33, 70, 18)]
    alone = [generate(Drive(config, weights), p, 20, wanted) for p in prompts]
    drive = Drive(config, weights)
    together: list[list[int]] = [[] for _ in prompts]
    for arriving in range(4):
        drive.admit(arriving, wanted, prompt=prompts[arriving])
        feeds = [Feed(row) for row in range(arriving)] + [Feed(arriving, prompts[arriving])]
        for tokens, token in zip(together, drive.step(*feeds).token_ids, strict=False):
            tokens.append(int(token))
    while min(map(len, together)) < 20:
        for tokens, token in zip(together, drive.step(*map(Feed, range(4))).token_ids, strict=True):
            tokens.append(int(token))
    assert [tokens[:20] for tokens in together] == alone


@pytest.mark.parametrize("wanted", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_sequence_goes_on_after_losing_its_blocks(drive: Drive, wanted: SamplingParams) -> None:
    """Readmitted into another row with its outputs as history, it draws the same tokens."""
    given = prompt(21)
    tokens = generate(drive, given, 30, wanted)
    drive.admit(5, wanted, prompt=given, outputs=tokens[:12])
    again = [int(drive.step(Feed(5, given + tokens[:12])).token_ids[0])]
    while len(again) < 18:
        again.append(int(drive.step(Feed(5)).token_ids[0]))
    assert again == tokens[12:]


def test_a_step_may_be_launched_before_the_last_one_is_known(drive: Drive) -> None:
    """Several steps enqueued at once feed each other's tokens."""
    given = prompt(9)
    expected = generate(drive, given, 6)
    drive.admit(1, prompt=given)
    pending = [drive.launch(Feed(1, given)), *(drive.launch(Feed(1)) for _ in range(5))]
    assert [int(p.result().token_ids[0]) for p in pending] == expected


def test_only_sampling_rows_come_back_in_the_order_of_the_plan(drive: Drive) -> None:
    """A chunk that does not end its prompt yields nothing; the others keep their order."""
    first, second = prompt(10, seed=1), prompt(30, seed=2)
    expected = [generate(Drive(drive.config, drive.weights), p, 1)[0] for p in (first, second)]
    drive.admit(0, prompt=first)
    drive.admit(1, prompt=second)
    nothing = drive.step(Feed(1, second[:11], sample=False))
    assert nothing.token_ids.shape == (0,)
    result = drive.step(Feed(1, second[11:]), Feed(0, first))
    assert result.token_ids.dtype == np.int32
    assert result.token_ids.tolist() == expected[::-1]
    assert result.logprobs is None


def test_blocks_are_copied_before_the_step(drive: Drive) -> None:
    """A plan's copies happen first: a copied block continues as the original would."""
    given = prompt(16)
    drive.admit(0, prompt=given)
    drive.step(Feed(0, given))
    before = drive.cache.pool.clone()
    used = int(before.abs().sum((1, 2, 3, 4, 5)).argmax())
    drive.copies = ((used, 127),)
    drive.step(Feed(0))
    assert torch.equal(drive.cache.pool[127], before[used])


def test_logprobs_come_back_as_arrays(drive: Drive) -> None:
    """Chosen and top logprobs are float32 arrays with one line for each sampling row."""
    drive.admit(0, SamplingParams(max_tokens=4, temperature=0.0, top_logprobs=3), prompt=[5, 6, 7])
    drive.admit(1, GREEDY, prompt=[8])
    result = drive.step(Feed(0, [5, 6, 7]), Feed(1, [8]))
    assert result.logprobs is not None
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    assert result.logprobs.shape == (2,)
    assert result.top_ids.shape == result.top_logprobs.shape == (2, 3)
    assert result.top_ids[0, 0] == result.token_ids[0]
    assert result.top_logprobs.dtype == np.float32
    assert result.top_logprobs[0, 0] == pytest.approx(result.logprobs[0])


def test_results_are_asked_for_in_order(drive: Drive) -> None:
    """Asking for a later step first is a mistake of the caller, and says so."""
    drive.admit(0, prompt=[5])
    drive.launch(Feed(0, [5]))
    later = drive.launch(Feed(0))
    with pytest.raises(AssertionError, match="order of the plans"):
        later.result()


@pytest.mark.cuda
def test_cuda_equals_the_cpu(
    tiny: tuple[ModelConfig, Weights, PreTrainedModel], tmp_path: Path
) -> None:
    """In fp32 a GPU's runner gives the CPU's tokens, greedy and sampled, alone and in a batch."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    config, weights, model = tiny
    model.save_pretrained(tmp_path)
    on_gpu = load_weights(tmp_path, config, dtype=torch.float32, device="cuda")
    for wanted in (GREEDY, SAMPLED):
        given = prompt(50)
        expected = generate(Drive(config, weights), given, 30, wanted)
        drive = Drive(config, on_gpu, device="cuda")
        assert generate(drive, given, 30, wanted, chunk=23) == expected
        drive.admit(1, wanted, prompt=given)
        drive.admit(2, wanted, prompt=given[:9])
        pending = [drive.launch(Feed(1, given), Feed(2, given[:9]))]
        pending += [drive.launch(Feed(2), Feed(1)) for _ in range(29)]
        rows = [p.result().token_ids.tolist() for p in pending]
        assert [rows[0][0], *(row[1] for row in rows[1:])] == expected
