"""`deterministic`: what runs beside a sequence, and how it is fed, changes no bit of it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from hillstar.engine.messages import SamplingParams
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.load import load_weights
from support.equivalence import BLOCK_SIZE, expect_short_outputs
from support.local_engine import Generation, LoadedModel, LocalEngine
from support.tiny_models import VOCAB_SIZE, save_tiny

DTYPES = ("float32", "bfloat16", "float16")
LENGTHS = (5, 90, 1, 33, 700, 500)
NUM_OUTPUT = 24


class Subject:
    """A tiny random model of one dtype, some prompts, and what each says alone."""

    def __init__(self, folder: Path, family: str, dtype: str) -> None:
        save_tiny(family, folder, max_position_embeddings=2048)
        config = ModelConfig.from_dir(folder)
        weights = load_weights(folder, config, dtype=getattr(torch, dtype))
        self._model = LoadedModel(folder, config, weights)
        self._dtype = dtype
        rng = np.random.default_rng(11)
        self.prompts = [rng.integers(3, VOCAB_SIZE, size=n).tolist() for n in LENGTHS]
        self.params = [
            SamplingParams(
                max_tokens=NUM_OUTPUT,
                temperature=0.0 if index % 2 else 1.0,
                seed=index,
                ignore_eos=True,
                top_logprobs=3,
            )
            for index in range(len(LENGTHS))
        ]
        self.alone = [
            self.engine().generate([prompt], [params])[0]
            for prompt, params in zip(self.prompts, self.params, strict=True)
        ]

    def engine(self, **changes: object) -> LocalEngine:
        settings = {"dtype": self._dtype, "deterministic": True, "block_size": BLOCK_SIZE}
        return LocalEngine(self._model, **{**settings, **changes})

    def check(self, found: Sequence[Generation]) -> None:
        """Tokens and the logprobs beside them, whose bits are those of the logits."""
        for index, (one, other) in enumerate(zip(found, self.alone, strict=True)):
            assert one.token_ids == other.token_ids, index
            assert one.logprobs == other.logprobs, index


@pytest.fixture(
    scope="module",
    params=[
        *(("llama", dtype) for dtype in DTYPES),
        ("mistral-window", "bfloat16"),
        ("qwen2-tied", "bfloat16"),
        ("qwen3", "bfloat16"),
    ],
    ids="-".join,
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("model"), *request.param)


def test_a_batch_changes_no_bit(subject: Subject) -> None:
    """All at once, short and long, greedy and sampled."""
    subject.check(subject.engine().generate(subject.prompts, subject.params))


@pytest.mark.parametrize("budget", [16, 27])
def test_chunks_change_no_bit(subject: Subject, budget: int) -> None:
    """Prompts fed in chunks of any size, beside others that decode."""
    engine = subject.engine(max_batched_tokens=budget, max_num_seqs=6)
    subject.check(engine.generate(subject.prompts, subject.params))
    assert engine.stats.num_steps_total > sum(LENGTHS) // budget


def test_giving_way_changes_no_bit(subject: Subject) -> None:
    """What was computed token by token is computed again as a prompt, and is the same."""
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in LENGTHS) + 4
    engine = subject.engine(num_blocks=num_blocks)
    expect_short_outputs(engine, ["local"])
    subject.check(engine.generate(subject.prompts, subject.params))
    assert engine.stats.num_preemptions_total > 0


def test_a_found_prefix_changes_no_bit(subject: Subject) -> None:
    """KV that another sequence has left is the KV that a sequence would have computed."""
    engine = subject.engine(max_batched_tokens=64)
    first = engine.generate(subject.prompts, subject.params)
    again = engine.generate(subject.prompts, subject.params)
    assert again[4].num_cached == LENGTHS[4] - 1
    subject.check(first)
    subject.check(again)
