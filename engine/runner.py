"""Executes batches on a device: the forward pass, then one token for each sampling row.

The last sampled token of every row stays on the device, so that a step can be launched before
the one before it came back (DESIGN.md, rule 4).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hillstar.engine.kv.cache import KVCache
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.llama import Decoder
from hillstar.engine.models.torch_ops import TorchOps
from hillstar.engine.models.weights import Weights
from hillstar.engine.plan import Batch, Pending, StepResult
from hillstar.engine.sampling import Sampled, Sampler, choose_on_cpu


class TorchRunner:
    """The `Runner` of one device; owns the cache's contents and the rows' device state."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        cache: KVCache,
        *,
        device: torch.device | str,
        max_num_seqs: int,
        eos_token_ids: Sequence[int],
        max_position: int | None = None,
    ) -> None:
        """weights and cache: on `device`, of one dtype. max_position: positions a sequence may
        reach; None: all the model was made for."""
        self._device = torch.device(device)
        self._cache = cache
        ops = TorchOps(
            config,
            dtype=weights.embedding.dtype,
            max_position=max_position or config.max_position_embeddings,
        )
        self._decoder = Decoder(config, weights, cache, ops)
        self._sampler = Sampler(
            vocab_size=config.vocab_size,
            max_num_seqs=max_num_seqs,
            eos_token_ids=eos_token_ids,
            device=self._device,
            choose=choose_on_cpu,
        )
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=self._device)
        self._enqueued: deque[_Deferred] = deque()

    def run(self, batch: Batch) -> Pending:
        """Launch a step; on a CPU it is computed when its result is asked for."""
        pending = _Deferred(self, batch)
        self._enqueued.append(pending)
        return pending

    def compute_next(self, pending: "_Deferred") -> StepResult:
        assert self._enqueued.popleft() is pending, "results are asked for in order of the plans"
        return _to_numpy(self._step(pending.batch))

    @torch.inference_mode()
    def _step(self, batch: Batch) -> Sampled:
        plan = batch.plan
        self._cache.copy_blocks(plan.copies)
        for entry in plan.inits:
            self._sampler.init(entry)
        token_ids = self._fed_tokens(batch)
        last = batch.cu_seqlens_q[1:][batch.sample_rows]
        sampled = None
        if len(last) < len(batch.token_ids):
            sampled = self._on_device(last.astype(np.int64) - 1)
        logits = self._decoder.forward(token_ids, sampled, batch)
        if not len(last):
            return Sampled(torch.empty(0, dtype=torch.int64, device=self._device))
        rows = batch.rows[batch.sample_rows]
        result = self._sampler.sample(logits, rows, batch.context_lens[batch.sample_rows])
        self._last_tokens[self._on_device(rows)] = result.token_ids
        return result

    def _fed_tokens(self, batch: Batch) -> torch.Tensor:
        """int64 `[T]`, each row's last sampled token in its place."""
        token_ids = self._on_device(batch.token_ids.astype(np.int64))
        is_fed_back = batch.token_ids < 0
        if is_fed_back.any():
            rows = np.repeat(batch.rows, np.diff(batch.cu_seqlens_q))
            index = np.flatnonzero(is_fed_back)
            token_ids[self._on_device(index)] = self._last_tokens[self._on_device(rows[index])]
        return token_ids

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


@dataclass(frozen=True, slots=True, eq=False)
class _Deferred:
    """A step that is computed when its result is asked for."""

    runner: TorchRunner
    batch: Batch

    def result(self) -> StepResult:
        return self.runner.compute_next(self)


def _to_numpy(sampled: Sampled) -> StepResult:
    def array(tensor: torch.Tensor | None) -> np.ndarray | None:
        return None if tensor is None else tensor.cpu().numpy()

    return StepResult(
        sampled.token_ids.cpu().numpy().astype(np.int32),
        array(sampled.logprobs),
        array(sampled.top_ids),
        array(sampled.top_logprobs),
    )
