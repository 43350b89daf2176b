"""What sampling asks of a device, as values and one protocol.

`cpu_sampling.py` and `cuda_sampling.py` keep it; `sampling.py` calls it.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Choices:
    """How each of `[S]` rows chooses, host memory; see `SamplingParams` for the meanings."""

    temperature: np.ndarray  # float32; 0 = greedy
    top_k: np.ndarray  # int32; 0 = off
    top_p: np.ndarray  # float32
    min_p: np.ndarray  # float32
    keys: np.ndarray  # int32 [S, 2], of the noise


@dataclass(frozen=True, slots=True)
class Changes:
    """What changes the logits of `[S]` rows before they choose, host memory."""

    bias_rows: np.ndarray  # int32 [n]: biases come first, -inf where a token is forbidden
    bias_ids: np.ndarray  # int32 [n]
    bias: np.ndarray  # float32 [n]
    slots: np.ndarray  # int32 [S]: in the history; -1: no penalties
    repetition: np.ndarray  # float32 [S]; 1 = off
    presence: np.ndarray  # float32 [S]; 0 = off
    frequency: np.ndarray  # float32 [S]; 0 = off


class Logprobs(NamedTuple):
    """Of the model's own distribution, on the device; what a row did not ask for is undefined."""

    chosen: torch.Tensor  # float32 [S]
    top_ids: torch.Tensor  # int32 or int64 [S, k]
    top: torch.Tensor  # float32 [S, k]


class SamplingOps(Protocol):
    """Logits are float32 `[S, vocab]` on the device. The history is int32 `[num_slots, vocab]`
    there: of each token twice how often a slot's sequence produced it, and 1 more if it is in
    the prompt. Nothing waits for the device."""

    def change(self, logits: torch.Tensor, changes: Changes, history: torch.Tensor) -> torch.Tensor:
        """Change logits in place. The rows' slots, on the device, for `count`."""
        ...

    def choose(self, logits: torch.Tensor, choices: Choices) -> torch.Tensor:
        """Processed logits, not changed -> token ids int32 or int64 `[S]`.

        A NaN counts as minus infinity; where all are, the token is 0: a broken row breaks no
        other."""
        ...

    def count(self, history: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Note in the history what was chosen."""
        ...

    def logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: np.ndarray
    ) -> Logprobs:
        """num_top: int32 `[S]`, how many of the most likely tokens a row asks for, -1 = not even
        the chosen one; k is the largest."""
        ...
