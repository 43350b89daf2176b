"""The `Choose` of CUDA: the Triton sampler (kernels/sampling.py)."""

import numpy as np
import torch

from hillstar.engine.choice import Choices
from hillstar.engine.transfer import to_device
from hillstar.kernels.sampling import sample


def choose_on_cuda(logits: torch.Tensor, choices: Choices) -> torch.Tensor:
    """See `Choose`. All parameters go to the device in one copy."""
    parts = (choices.temperature, choices.top_k, choices.top_p, choices.min_p)
    packed = np.concatenate([*(p.view(np.int32) for p in parts), choices.keys.reshape(-1)])
    arrived = to_device(packed, logits.device)
    rows = len(choices.top_k)
    temperature, top_k, top_p, min_p = arrived[: 4 * rows].view(4, rows)
    return sample(
        logits,
        temperature=temperature.view(torch.float32),
        top_k=top_k,
        top_p=top_p.view(torch.float32),
        min_p=min_p.view(torch.float32),
        keys=arrived[4 * rows :].view(rows, 2),
    ).long()
