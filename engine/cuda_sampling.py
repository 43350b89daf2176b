"""The `SamplingOps` of CUDA: Triton kernels. All of a call's parameters travel in one copy."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from hillstar.engine.sampling_ops import Changes, Choices, Logprobs
from hillstar.engine.transfer import to_device
from hillstar.kernels.logprobs import logprobs
from hillstar.kernels.penalties import add_bias, apply_penalties, count_tokens
from hillstar.kernels.sampling import sample


class CudaSampling:
    """See `SamplingOps`."""

    def change(self, logits: torch.Tensor, changes: Changes, history: torch.Tensor) -> torch.Tensor:
        slots, repetition, presence, frequency, rows, ids, bias = _upload(
            (
                changes.slots,
                changes.repetition,
                changes.presence,
                changes.frequency,
                changes.bias_rows,
                changes.bias_ids,
                changes.bias,
            ),
            logits.device,
        )
        add_bias(logits, rows, ids, bias.view(torch.float32))
        if changes.slots.max() >= 0:
            apply_penalties(
                logits,
                slots,
                history,
                repetition=repetition.view(torch.float32),
                presence=presence.view(torch.float32),
                frequency=frequency.view(torch.float32),
            )
        return slots

    def choose(self, logits: torch.Tensor, choices: Choices) -> torch.Tensor:
        temperature, top_k, top_p, min_p, keys = _upload(
            (
                choices.temperature,
                choices.top_k,
                choices.top_p,
                choices.min_p,
                choices.keys.reshape(-1),
            ),
            logits.device,
        )
        return sample(
            logits,
            temperature=temperature.view(torch.float32),
            top_k=top_k,
            top_p=top_p.view(torch.float32),
            min_p=min_p.view(torch.float32),
            keys=keys.view(-1, 2),
        )

    def count(self, history: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        count_tokens(history, slots, token_ids)

    def logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: np.ndarray
    ) -> Logprobs:
        counts = to_device(num_top, logits.device)
        return Logprobs(*logprobs(logits, token_ids, counts, int(num_top.max())))


def _upload(parts: Sequence[np.ndarray], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Arrays of four-byte numbers on the device, as int32, in one copy."""
    packed = to_device(np.concatenate([part.view(np.int32) for part in parts]), device)
    ends = np.cumsum([len(part) for part in parts]).tolist()
    return tuple(packed[i:j] for i, j in pairwise([0, *ends]))
