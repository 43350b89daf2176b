"""Logits to choose tokens from."""

import torch

VOCAB_SIZE = 200


def random_logits(num_rows: int = 1, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    """Normal, with deviation `scale`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCAB_SIZE, generator=generator) * scale
