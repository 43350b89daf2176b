"""The `SamplingOps` of the CPU; `choice.py` has the choice itself."""

import numpy as np
import torch

from hillstar.engine.choice import choose_on_cpu
from hillstar.engine.sampling_ops import Changes, Choices, Logprobs


class CpuSampling:
    """See `SamplingOps`."""

    def change(self, logits: torch.Tensor, changes: Changes, history: torch.Tensor) -> torch.Tensor:
        if len(changes.bias):
            where = torch.from_numpy(changes.bias_rows), torch.from_numpy(changes.bias_ids)
            logits.index_put_(where, torch.from_numpy(changes.bias), accumulate=True)
        rows = np.flatnonzero(changes.slots >= 0)
        if len(rows):
            _penalise(logits, rows, changes, history)
        return torch.from_numpy(changes.slots)

    def choose(self, logits: torch.Tensor, choices: Choices) -> torch.Tensor:
        return choose_on_cpu(logits, choices)

    def count(self, history: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        has_slot = slots >= 0
        history[slots[has_slot], token_ids[has_slot]] += 2

    def logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: np.ndarray
    ) -> Logprobs:
        total = logits.logsumexp(-1)
        top_logits, top_ids = logits.topk(int(num_top.max()), dim=-1)
        chosen = logits.gather(1, token_ids[:, None])[:, 0]
        return Logprobs(chosen - total, top_ids, top_logits - total[:, None])


def _penalise(
    logits: torch.Tensor, rows: np.ndarray, changes: Changes, history: torch.Tensor
) -> None:
    """Repetition divides positive logits of seen tokens and multiplies negative ones (Keskar
    et al. 2019, arXiv 1909.05858, section 4.1); presence and frequency are subtracted."""
    repetition, presence, frequency = (
        torch.from_numpy(values[rows, None])
        for values in (changes.repetition, changes.presence, changes.frequency)
    )
    index = torch.from_numpy(rows)
    x, seen = logits[index], history[torch.from_numpy(changes.slots[rows])]
    repeated = torch.where(x > 0, x / repetition, x * repetition)
    x = torch.where(seen > 0, repeated, x)
    counts = seen >> 1
    logits[index] = x - frequency * counts - presence * (counts > 0)
