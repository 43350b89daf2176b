"""The device-specific operations of the forward pass, as one value chosen at construction.

`Decoder` is one code path; an `Ops` says how each operation is done on its device
(`torch_ops.TorchOps` on a CPU, `triton_ops.TritonOps` on CUDA).
"""

from collections.abc import Callable
from typing import Protocol

import torch

from hillstar.engine.kv.cache import KVCache
from hillstar.engine.plan import Batch

Linear = Callable[[torch.Tensor], torch.Tensor]
"""`[T, in_features]` -> `[T, out_features]`: a weight matrix, and its bias if it has one, in the
layout that the device multiplies fastest."""


class Attend(Protocol):
    """The attention of one step, for each layer in turn."""

    def __call__(
        self,
        layer: int,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
    ) -> torch.Tensor:
        """Norm and rotate queries and keys, store keys and values in the cache, and attend.

        qkv: `[T, num_heads + 2 * num_kv_heads, head_dim]`, overwritten. q_norm, k_norm:
        `[head_dim]`, weights of an RMSNorm over each head, or None. Returns
        `[T, num_heads * head_dim]`.
        """
        ...


class Ops(Protocol):
    """Operations on tensors of one device and one dtype."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Prepare `weight` `[out_features, in_features]` once, at construction."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467)."""
        ...

    def add_rms_norm(
        self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(residual + x), residual + x); may overwrite `residual`."""
        ...

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`[T, 2 * n]` -> `[T, n]`: silu(gate) * up, gate columns first (arXiv 2002.05202)."""
        ...

    def attention(self, batch: Batch, cache: KVCache) -> Attend:
        """Everything that the layers of one step share: positions, slots, block tables."""
        ...
