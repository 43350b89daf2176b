"""The kernels together: the forward pass on `TritonOps` against the one on `TorchOps`."""

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
from hillstar.engine.models.triton_ops import DeviceBatch, PagedAttention, TritonOps
from hillstar.engine.models.weights import Weights
from hillstar.engine.plan import Batch, Plan, PlanRow, RowInit
from support.tiny_models import VOCAB_SIZE, save_tiny

BLOCK_SIZE, NUM_BLOCKS, MAX_POSITION = 16, 16, 128
STEPS = ([(0, 70)], [(0, 1)], [(0, 1), (1, 4)], [(0, 1), (1, 1)])  # (row, tokens): of each step


class Torch:
    """The plain forward pass."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        cache = KVCache(config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32)
        ops = TorchOps(config, dtype=torch.float32, max_position=MAX_POSITION)
        self._decoder, self._attention = Decoder(config, weights, ops), ops.attention(cache)

    def logits(self, batch: Batch) -> torch.Tensor:
        sampled = torch.from_numpy(batch.cu_seqlens_q[1:].astype(np.int64) - 1)
        tokens = torch.from_numpy(batch.token_ids).long()
        return self._decoder.forward(tokens, sampled, self._attention(batch))


class Triton:
    """The forward pass of CUDA, interpreted where there is none."""

    def __init__(self, config: ModelConfig, weights: Weights, device: torch.device) -> None:
        self._device = device
        cache = KVCache(
            config,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            dtype=torch.float32,
            device=device,
        )
        self._decoder = Decoder(config, weights, TritonOps(config, weights.embedding))
        self._attention = PagedAttention(config, cache, device=device, max_position=MAX_POSITION)

    def logits(self, batch: Batch) -> torch.Tensor:
        def on_device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self._device)

        attend = self._attention.step(
            DeviceBatch(
                positions=on_device(batch.positions),
                slot_mapping=on_device(batch.slot_mapping),
                block_tables=on_device(batch.block_tables),
                cu_seqlens_q=on_device(batch.cu_seqlens_q),
                context_lens=on_device(batch.context_lens),
                max_q_len=int(np.diff(batch.cu_seqlens_q).max()),
                max_context_len=int(batch.context_lens.max()),
            )
        )
        sampled = on_device(batch.cu_seqlens_q[1:].astype(np.int64) - 1)
        return self._decoder.forward(on_device(batch.token_ids).long(), sampled, attend).cpu()


def batches() -> list[Batch]:
    """A prompt longer than what skinny products take, one token, and steps of two rows."""
    builder = BatchBuilder(max_num_seqs=2, max_blocks=8, block_size=BLOCK_SIZE)
    generator = np.random.default_rng(7)
    free = generator.permutation(NUM_BLOCKS).tolist()
    fed, found = [0, 0], []
    params = SamplingParams(max_tokens=1)
    inits = tuple(RowInit(row, params, 0, np.zeros(0, dtype=np.int32)) for row in range(2))
    for index, pieces in enumerate(STEPS):
        rows = []
        for row, count in pieces:
            start, fed[row] = fed[row], fed[row] + count
            held, needed = (-(-n // BLOCK_SIZE) for n in (start, fed[row]))
            blocks = np.array([free.pop() for _ in range(needed - held)], dtype=np.int32)
            tokens = generator.integers(3, VOCAB_SIZE, count, dtype=np.int32)
            rows.append(PlanRow(row, start, count, tokens, blocks, True))
        found.append(builder.build(Plan(index, tuple(rows), () if index else inits)))
    return found


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3"])
def test_the_forward_pass_is_that_of_plain_torch(
    device: torch.device, tmp_path: Path, name: str
) -> None:
    """Whatever is folded, fused, split or left to a library at a number of tokens, the logits are
    those of the plain forward pass."""
    save_tiny(name, tmp_path, head_dim=32)
    config = ModelConfig.from_dir(tmp_path)
    weights = load_weights(tmp_path, config, dtype=torch.float32)
    plain = Torch(config, weights)
    fast = Triton(
        config, load_weights(tmp_path, config, dtype=torch.float32, device=device), device
    )
    with torch.inference_mode():
        for batch in batches():
            torch.testing.assert_close(
                fast.logits(batch), plain.logits(batch), atol=2e-4, rtol=1e-4
            )
