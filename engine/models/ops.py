"""The device-specific operations of the forward pass, as one value chosen at construction.

`Decoder` is one code path; an `Ops` says how each operation is done on its device
(`torch_ops.TorchOps` on a CPU, `triton_ops.TritonOps` on CUDA).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from hillstar.engine.models.weights import Matrix

Read = Callable[[torch.Tensor], torch.Tensor]
"""The product of a weight matrix, in the layout that the device multiplies fastest, with the norm
of the residual, `[T, out_features]`: RMSNorm with its weight, x / sqrt(mean(x^2) + eps) * weight
over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467)."""


class Write(Protocol):
    """A weight matrix whose product is added to the residual."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The sum. x: `[T, in_features]`; residual: `[T, out_features]`, may be overwritten."""
        ...


Head = Callable[[torch.Tensor], torch.Tensor]
"""Logits from the residual: float32 `[T, vocab]`, the best ones not rounded to the weights'
dtype."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights `[head_dim]` of an RMSNorm over each head of the queries and of the keys."""

    q: torch.Tensor
    k: torch.Tensor


class Attend(Protocol):
    """The attention of one step, for each layer in turn."""

    def __call__(
        self,
        layer: int,
        qkv: torch.Tensor,
        head_norms: HeadNorms | None,
    ) -> torch.Tensor:
        """Norm and rotate queries and keys, store keys and values in the cache, and attend.

        qkv: `[T, num_heads + 2 * num_kv_heads, head_dim]`, overwritten. Returns
        `[T, num_heads * head_dim]`.
        """
        ...


class Ops(Protocol):
    """Operations on tensors of one device and one dtype: each prepares, once, what a model uses
    at every step. Weights are `[out_features, in_features]`, norms `[in_features]`."""

    @property
    def residual_dtype(self) -> torch.dtype:
        """Of the residual: the sum that runs through the layers, `[T, hidden]`."""
        ...

    def read(self, norm: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> Read:
        """norm(residual) @ weight.T, plus the bias if there is one."""
        ...

    def read_glu(self, norm: torch.Tensor, gate_up: Matrix) -> Read:
        """silu(gate(x)) * up(x) of x = norm(residual) (Shazeer 2020, arXiv 2002.05202).

        gate_up: `[2 * out_features, in_features]`, gate rows first.
        """
        ...

    def write(self, weight: Matrix) -> Write:
        """residual + x @ weight.T."""
        ...

    def head(self, norm: torch.Tensor, weight: torch.Tensor) -> Head:
        """As `read`, for logits."""
        ...
