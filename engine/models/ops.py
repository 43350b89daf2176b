"""The device-specific operations of the forward pass, as one value chosen at construction.

`Decoder` is one code path; an `Ops` says how each operation is done on its device
(`torch_ops.TorchOps` on a CPU, `triton_ops.TritonOps` on CUDA).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Linear = Callable[[torch.Tensor], torch.Tensor]
"""`[T, in_features]` -> `[T, out_features]`: a weight matrix, and its bias if it has one, in the
layout that the device multiplies fastest."""


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


class Norm(Protocol):
    """RMSNorm with its weight: x / sqrt(mean(x^2) + eps) * weight over the last dimension
    (Zhang and Sennrich 2019, arXiv 1910.07467). Takes the residual stream's dtype, gives the
    weight's."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add(self, residual: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of residual + x, and residual + x."""
        ...


class Ops(Protocol):
    """Operations on tensors of one device and one dtype: each prepares, once, what a model uses
    at every step."""

    @property
    def residual_dtype(self) -> torch.dtype:
        """Of the sum that runs through the layers."""
        ...

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """weight: `[out_features, in_features]`."""
        ...

    def head(self, weight: torch.Tensor) -> Linear:
        """As `linear`, for logits: float32, the best ones not rounded to the weights' dtype."""
        ...

    def norm(self, weight: torch.Tensor) -> Norm: ...

    def glu(self, gate_up: torch.Tensor) -> Linear:
        """silu(gate(x)) * up(x) (Shazeer 2020, arXiv 2002.05202): `[T, hidden]` -> `[T, n]`.

        gate_up: `[2 * n, hidden]`, gate rows first.
        """
        ...
