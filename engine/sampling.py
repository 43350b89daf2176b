"""From logits to tokens, for a whole batch at once.

`Sampler` owns what sampling remembers of each row: its parameters, and the counts that penalties
need where a row asks for penalties. How a device does it is its `SamplingOps`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hillstar.engine.penalties import Penalties
from hillstar.engine.plan import RowInit
from hillstar.engine.sampling_ops import Choices, SamplingOps
from hillstar.kernels.noise import noise_keys


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tensors on the device; the fields of `StepResult`."""

    token_ids: torch.Tensor  # int32 or int64 [S]
    logprobs: torch.Tensor | None = None  # float32 [S]
    top_ids: torch.Tensor | None = None  # int32 or int64 [S, k]
    top_logprobs: torch.Tensor | None = None  # float32 [S, k]


class Sampler:
    """The sampling state of every row; owned by the runner, changed in order of the plans."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_num_seqs: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
        ops: SamplingOps,
    ) -> None:
        self.device = device
        self._ops = ops
        self._penalties = Penalties(vocab_size, max_num_seqs, eos_token_ids, device)
        self._temperature = np.ones(max_num_seqs, dtype=np.float32)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int32)
        self._top_p = np.ones(max_num_seqs, dtype=np.float32)
        self._min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self._seed = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_logprobs = np.full(max_num_seqs, -1, dtype=np.int32)  # -1: none wanted

    def init(self, entry: RowInit) -> None:
        """A sequence enters a row: forget the one before it."""
        row, params = entry.row, entry.params
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = np.uint64(params.seed & (1 << 64) - 1).astype(np.int64)
        self._num_logprobs[row] = -1 if params.top_logprobs is None else params.top_logprobs
        self._penalties.init(entry)

    def sample(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> Sampled:
        """One token for each row.

        logits: float32 `[S, vocab]`, of the model; changed in place for rows that ask for it.
        rows: int32 `[S]`. positions: `[S]`, of the tokens being sampled: prompt tokens + index of
        the output token.
        """
        ops, num_top = self._ops, self._num_logprobs[rows]
        wants_logprobs = num_top.max(initial=-1) >= 0
        changes = self._penalties.changes(rows, positions)
        processed = logits
        slots = None
        if changes is not None:
            if wants_logprobs:  # these are of the model's own logits
                processed = logits.clone()
            slots = ops.change(processed, changes, self._penalties.history)
        choices = Choices(
            self._temperature[rows],
            self._top_k[rows],
            self._top_p[rows],
            self._min_p[rows],
            noise_keys(self._seed[rows], positions.astype(np.int64)),
        )
        token_ids = ops.choose(processed, choices)
        if slots is not None:
            ops.count(self._penalties.history, slots, token_ids)
        if not wants_logprobs:
            return Sampled(token_ids)
        return Sampled(token_ids, *ops.logprobs(logits, token_ids, num_top))
