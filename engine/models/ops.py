"""The device-specific operations of the forward pass, as one value chosen at construction.

`Decoder` is one code path; an `Ops` says how each operation is done on its device
(`torch_ops.TorchOps` on a CPU, `triton_ops.TritonOps` on CUDA).
"""

from collections.abc import Callable
from typing import Protocol

import torch

from hillstar.engine.kv.cache import KVCache
from hillstar.engine.plan import Batch

Attend = Callable[[int, torch.Tensor], torch.Tensor]
"""`attend(layer, qkv)` for one step: rotate queries and keys by their positions, store keys and
values in the cache, and attend.

qkv: `[T, num_heads + 2 * num_kv_heads, head_dim]`, overwritten. Returns
`[T, num_heads * head_dim]`.
"""


class Linear(Protocol):
    """A weight matrix in the layout that its device multiplies fastest."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x `[T, in_features]` -> `[T, out_features]`, plus the bias if there is one."""
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`residual + self(x)`, which may overwrite `residual` `[T, out_features]`."""
        ...


class Ops(Protocol):
    """Operations on tensors of one device and one dtype."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Prepare `weight` `[out_features, in_features]` once, at construction."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467)."""
        ...

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`[T, 2 * n]` -> `[T, n]`: silu(gate) * up, gate columns first (arXiv 2002.05202)."""
        ...

    def attention(self, batch: Batch, cache: KVCache) -> Attend:
        """Everything that the layers of one step share: positions, slots, block tables."""
        ...
