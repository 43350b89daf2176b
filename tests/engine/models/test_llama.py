"""The forward pass against transformers, on tiny random weights of every family."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from hillstar.engine.batch import BatchBuilder
from hillstar.engine.kv.cache import KVCache
from hillstar.engine.messages import SamplingParams
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.llama import Decoder
from hillstar.engine.models.load import load_weights
from hillstar.engine.models.torch_ops import TorchOps
from hillstar.engine.models.weights import Weights
from hillstar.engine.plan import Plan, PlanRow, RowInit
from support.tiny_models import FAMILIES, VOCAB_SIZE, save_tiny

PROMPT = torch.randint(3, VOCAB_SIZE, (3, 90), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def family(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[ModelConfig, Weights, torch.Tensor]]:
    """Name -> configuration, fp32 weights, transformers' logits of PROMPT `[3, 90, vocab]`."""

    @cache
    def load(name: str) -> tuple[ModelConfig, Weights, torch.Tensor]:
        folder: Path = tmp_path_factory.mktemp(name)
        model = save_tiny(name, folder)
        config = ModelConfig.from_dir(folder)
        with torch.inference_mode():
            logits = model(PROMPT).logits
        return config, load_weights(folder, config, dtype=torch.float32), logits

    return load


class Stepper:
    """Feeds a decoder pieces of the rows of PROMPT and takes the logits of every piece's end."""

    def __init__(self, config: ModelConfig, weights: Weights, block_size: int = 16) -> None:
        dtype = weights.embedding.dtype
        self._cache = KVCache(config, num_blocks=64, block_size=block_size, dtype=dtype)
        ops = TorchOps(config, dtype=dtype, max_position=config.max_position_embeddings)
        self._decoder = Decoder(config, weights, ops)
        self._attention = ops.attention(self._cache)
        self._builder = BatchBuilder(max_num_seqs=3, max_blocks=64, block_size=block_size)
        self._block_size = block_size
        self._free = np.random.default_rng(1).permutation(np.arange(64)).tolist()
        self._fed = [0, 0, 0]

    def feed(self, *pieces: tuple[int, int]) -> torch.Tensor:
        """pieces: (row of PROMPT, number of tokens). Logits `[pieces, vocab]`."""
        plan = Plan(0, tuple(self._plan_row(row, count) for row, count in pieces), self._inits())
        for row, count in pieces:
            self._fed[row] += count
        batch = self._builder.build(plan)
        sampled = torch.from_numpy(batch.cu_seqlens_q[1:].astype(np.int64) - 1)
        with torch.inference_mode():
            token_ids = torch.from_numpy(batch.token_ids).long()
            return self._decoder.forward(token_ids, sampled, self._attention(batch))

    def _inits(self) -> tuple[RowInit, ...]:
        if any(self._fed):
            return ()
        params = SamplingParams(max_tokens=1)
        return tuple(RowInit(row, params, 0, np.zeros(0, dtype=np.int32)) for row in range(3))

    def _plan_row(self, row: int, count: int) -> PlanRow:
        start = self._fed[row]
        token_ids = PROMPT[row, start : start + count].numpy().astype(np.int32)
        held, needed = (-(-n // self._block_size) for n in (start, start + count))
        blocks = tuple(self._free.pop() for _ in range(needed - held))
        return PlanRow(row, start, count, token_ids, blocks, True)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("chunks", [(90,), (37, 1, 24, 28), (1,) * 40, (16, 16, 58)])
def test_logits_agree_with_transformers(
    family: Callable[[str], tuple[ModelConfig, Weights, torch.Tensor]],
    name: str,
    chunks: tuple[int, ...],
) -> None:
    """However a prompt is cut into steps, the logits at each cut are transformers'."""
    config, weights, expected = family(name)
    stepper = Stepper(config, weights)
    end = 0
    for count in chunks:
        end += count
        logits = stepper.feed((0, count))
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits[0], expected[0, end - 1], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mixed_batch_computes_each_row_as_if_alone(
    family: Callable[[str], tuple[ModelConfig, Weights, torch.Tensor]], name: str
) -> None:
    """Whole prompts, chunks at an offset and decode rows of unlike length share a step."""
    config, weights, expected = family(name)
    stepper = Stepper(config, weights, block_size=8)
    ends = [0, 0, 0]
    for pieces in (
        ((0, 61), (2, 3)),
        ((1, 29), (0, 1), (2, 1)),
        ((2, 1), (1, 17), (0, 1)),
        ((0, 1), (1, 1), (2, 1)),
        ((1, 1), (2, 30)),
    ):
        logits = stepper.feed(*pieces)
        for i, (row, count) in enumerate(pieces):
            ends[row] += count
            wanted = expected[row, ends[row] - 1]
            torch.testing.assert_close(logits[i], wanted, atol=2e-4, rtol=1e-4)


def test_a_prefill_at_an_offset_longer_than_a_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries are attended in pieces when their chunk is long, windows and all."""
    monkeypatch.setattr("hillstar.engine.attention._PIECE", 13)
    model = save_tiny("mistral-window", tmp_path)
    config = ModelConfig.from_dir(tmp_path)
    stepper = Stepper(config, load_weights(tmp_path, config, dtype=torch.float32))
    stepper.feed((1, 7))
    with torch.inference_mode():
        expected = model(PROMPT[1:2]).logits[0, 86]
    torch.testing.assert_close(stepper.feed((1, 80))[0], expected, atol=2e-4, rtol=1e-4)


def test_decode_groups_split_by_memory_agree(
    family: Callable[[str], tuple[ModelConfig, Weights, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows whose gathered keys would exceed the limit are attended in several calls."""
    config, weights, expected = family("llama")
    monkeypatch.setattr("hillstar.engine.attention._MAX_GROUP_BYTES", 1)
    stepper = Stepper(config, weights)
    stepper.feed((0, 50), (1, 20), (2, 35))
    logits = stepper.feed((0, 1), (1, 1), (2, 1))
    for row, position in enumerate((50, 20, 35)):
        torch.testing.assert_close(logits[row], expected[row, position], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "qwen3", "mistral-window"])
def test_bfloat16_errs_no_more_than_twice_transformers(name: str, tmp_path: Path) -> None:
    """In bf16 the largest error against fp32 is at most twice that of transformers in bf16."""
    model = save_tiny(name, tmp_path)
    config = ModelConfig.from_dir(tmp_path)
    weights = load_weights(tmp_path, config, dtype=torch.bfloat16)
    stepper = Stepper(config, weights)
    ours = torch.stack([stepper.feed((0, 40)), *(stepper.feed((0, 1)) for _ in range(50))])[:, 0]
    with torch.inference_mode():
        exact = model(PROMPT[:1]).logits[0, 39:]
        theirs = model.bfloat16()(PROMPT[:1]).logits[0, 39:].float()
    epsilon = (theirs - exact).abs().max()
    assert (ours - exact).abs().max() <= 2 * epsilon
