"""The forward pass's operations on CUDA where a token's result must not depend on the batch."""

from functools import partial

import torch

from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.ops import Head, Read, Write
from hillstar.engine.models.weights import Matrix
from hillstar.kernels.linear_fixed import fixed_gate_up_swiglu, fixed_linear
from hillstar.kernels.norm import rms_norm

_MAX_TILES = 4096  # of a product whose segments are summed apart


class FixedTritonOps:
    """`Ops` on one CUDA device: every product's sums in an order of their own, every norm apart."""

    def __init__(self, config: ModelConfig, embedding: torch.Tensor) -> None:
        """embedding: on the device and of the dtype of all weights."""
        self._eps = config.rms_norm_eps
        counters = torch.zeros(_MAX_TILES, dtype=torch.int32, device=embedding.device)
        self._linear = partial(fixed_linear, counters=counters)
        self.residual_dtype = embedding.dtype

    def read(self, norm: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> Read:
        def product(residual: torch.Tensor) -> torch.Tensor:
            return self._linear(self._normed(residual, norm), weight.values, bias=bias)

        return product

    def read_glu(self, norm: torch.Tensor, gate_up: Matrix) -> Read:
        def product(residual: torch.Tensor) -> torch.Tensor:
            return fixed_gate_up_swiglu(self._normed(residual, norm), gate_up.values)

        return product

    def write(self, weight: Matrix) -> Write:
        def add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return self._linear(x, weight.values, residual=residual)

        return add

    def head(self, norm: torch.Tensor, weight: torch.Tensor) -> Head:
        def logits(residual: torch.Tensor) -> torch.Tensor:
            normed = self._normed(residual, norm)
            return self._linear(normed, weight, out_dtype=torch.float32)

        return logits

    def _normed(self, residual: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return rms_norm(residual, norm, self._eps)
