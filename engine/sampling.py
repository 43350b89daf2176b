"""From logits to tokens, for a whole batch at once.

`Sampler` owns what sampling remembers of each row: its parameters, and the counts that penalties
need where a row asks for penalties. How a device picks a token is a `Choose`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hillstar.engine.choice import Choices, Choose
from hillstar.engine.penalties import Penalties
from hillstar.engine.plan import RowInit
from hillstar.kernels.noise import noise_keys


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tensors on the device; the fields of `StepResult`."""

    token_ids: torch.Tensor  # int64 [S]
    logprobs: torch.Tensor | None = None  # float32 [S]
    top_ids: torch.Tensor | None = None  # int64 [S, k]
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
        choose: Choose,
    ) -> None:
        self._choose = choose
        self._penalties = Penalties(vocab_size, eos_token_ids, device)
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

        logits: float32 `[S, vocab]`, of the model, not changed. rows: int32 `[S]`. positions:
        `[S]`, of the tokens being sampled: prompt tokens + index of the output token.
        """
        processed = self._penalties.apply(logits, rows, positions)
        choices = Choices(
            self._temperature[rows],
            self._top_k[rows],
            self._top_p[rows],
            self._min_p[rows],
            noise_keys(self._seed[rows], positions.astype(np.int64)),
        )
        token_ids = self._choose(processed, choices)
        self._penalties.count(rows, token_ids)
        num_top = int(self._num_logprobs[rows].max(initial=-1))
        if num_top < 0:
            return Sampled(token_ids)
        return _with_logprobs(logits, token_ids, num_top)


def _with_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Sampled:
    total = logits.logsumexp(-1)
    top_logits, top_ids = logits.topk(num_top, dim=-1)
    chosen = logits.gather(1, token_ids[:, None])[:, 0]
    return Sampled(token_ids, chosen - total, top_ids, top_logits - total[:, None])
