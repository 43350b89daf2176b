"""Executes batches on a device: the forward pass, then one token for each sampling row.

The last sampled token of every row stays on the device, so that a step can be launched before
the one before it came back (DESIGN.md, rule 4).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hillstar.engine.cpu_forward import CpuForward
from hillstar.engine.cpu_sampling import CpuSampling
from hillstar.engine.kv.cache import KVCache
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.weights import Weights
from hillstar.engine.plan import Batch, Pending, StepResult
from hillstar.engine.sampling import Sampled, Sampler
from hillstar.engine.sampling_ops import SamplingOps
from hillstar.engine.transfer import to_device


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
        deterministic: bool = False,
    ) -> None:
        """weights and cache: on `device`, of one dtype. max_position: positions a sequence may
        reach; None: all the model was made for. deterministic: a row's tokens are the same
        whatever else is in its batches, and however its prompt is fed."""
        self._device = weights.embedding.device
        assert self._device.type == torch.device(device).type, "weights lie on the device"
        self._cache = cache
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int32, device=self._device)
        self._forward, ops = _device_parts(
            config,
            weights,
            cache,
            max_position=max_position or config.max_position_embeddings,
            last_tokens=self._last_tokens,
            deterministic=deterministic,
        )
        self._sampler = Sampler(
            vocab_size=config.vocab_size,
            max_num_seqs=max_num_seqs,
            eos_token_ids=eos_token_ids,
            device=self._device,
            ops=ops,
        )
        self._deferred: deque[_Deferred] = deque()

    def run(self, batch: Batch) -> Pending:
        """Launch a step; on a CPU it is computed when its result is asked for."""
        if self._device.type == "cuda":
            return _Launched.copy_back(self._step(batch))
        pending = _Deferred(self, batch)
        self._deferred.append(pending)
        return pending

    def compute_next(self, pending: "_Deferred") -> StepResult:
        """Compute a deferred step, which must be the oldest."""
        assert self._deferred.popleft() is pending, "results are asked for in order of the plans"
        return _to_numpy(self._step(pending.batch))

    @torch.inference_mode()
    def _step(self, batch: Batch) -> Sampled:
        self._cache.copy_blocks(batch.plan.copies)
        for entry in batch.plan.inits:
            self._sampler.init(entry)
        logits = self._forward(batch)
        if not len(batch.sample_rows):
            return Sampled(torch.empty(0, dtype=torch.int64))
        rows = batch.rows[batch.sample_rows]
        result = self._sampler.sample(logits, rows, batch.positions[batch.sample_tokens] + 1)
        self._last_tokens[to_device(rows, self._device)] = result.token_ids.int()
        return result


class Forward(Protocol):
    """The forward pass of one device over one cache."""

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Logits of the tokens that are sampled from, float32 `[S, vocab]`, valid until the next
        call. Keys and values of all tokens go to the cache."""
        ...


def _device_parts(
    config: ModelConfig,
    weights: Weights,
    cache: KVCache,
    *,
    max_position: int,
    last_tokens: torch.Tensor,
    deterministic: bool,
) -> tuple[Forward, SamplingOps]:
    """What the weights' device does its own way."""
    if weights.embedding.device.type == "cpu":
        forward = CpuForward(
            config,
            weights,
            cache,
            max_position=max_position,
            last_tokens=last_tokens,
            deterministic=deterministic,
        )
        return forward, CpuSampling()
    # Triton takes long to import and is not there on every CPU machine.
    from hillstar.engine.cuda_forward import CudaForward
    from hillstar.engine.cuda_sampling import CudaSampling

    return (
        CudaForward(
            config,
            weights,
            cache,
            max_position=max_position,
            last_tokens=last_tokens,
            deterministic=deterministic,
        ),
        CudaSampling(),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Deferred:
    """A step that is computed when its result is asked for."""

    runner: TorchRunner
    batch: Batch

    def result(self) -> StepResult:
        return self.runner.compute_next(self)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step on its way back: pinned tensors that are valid once the event has happened."""

    sampled: Sampled
    event: torch.cuda.Event

    @staticmethod
    def copy_back(sampled: Sampled) -> "_Launched":
        host = Sampled(
            _to_pinned(sampled.token_ids),
            *(
                None if tensor is None else _to_pinned(tensor)
                for tensor in (sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
            ),
        )
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _Launched(host, event)

    def result(self) -> StepResult:
        self.event.synchronize()
        return _to_numpy(self.sampled)


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _to_numpy(sampled: Sampled) -> StepResult:
    """A copy: pinned memory is reused once its tensors are gone."""

    def array(tensor: torch.Tensor | None) -> np.ndarray | None:
        return None if tensor is None else np.array(tensor.numpy())

    return StepResult(
        sampled.token_ids.numpy().astype(np.int32),
        array(sampled.logprobs),
        array(sampled.top_ids),
        array(sampled.top_logprobs),
    )
