"""The `Choose` of CUDA: the Triton sampler (kernels/sampling.py)."""

import torch

from hillstar.engine.choice import Choices
from hillstar.engine.transfer import to_device
from hillstar.kernels.sampling import sample


def choose_on_cuda(logits: torch.Tensor, choices: Choices) -> torch.Tensor:
    """See `Choose`."""
    device = logits.device
    return sample(
        logits,
        temperature=to_device(choices.temperature, device),
        top_k=to_device(choices.top_k, device),
        top_p=to_device(choices.top_p, device),
        min_p=to_device(choices.min_p, device),
        keys=to_device(choices.keys, device),
    ).long()
