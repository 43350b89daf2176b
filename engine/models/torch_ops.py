"""The forward pass's operations in plain torch: the CPU's own fast path."""

from functools import partial

import torch
import torch.nn.functional as F

from hillstar.engine.attention import PagedAttention
from hillstar.engine.kv.cache import KVCache
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.ops import Attend, Linear
from hillstar.engine.models.rope import rope_table
from hillstar.engine.plan import Batch


class TorchOps:
    """`Ops` on the CPU. Holds the rotation table, in the model's dtype."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, max_position: int) -> None:
        self._config = config
        self._eps = config.rms_norm_eps
        cos, sin = rope_table(config.rope, config.head_dim, max_position).chunk(2, dim=1)
        # x * cos + roll(x, half) * sin rotates both halves at once with the first sine negated.
        self._cos = torch.cat((cos, cos), dim=1).to(dtype)
        self._sin = torch.cat((-sin, sin), dim=1).to(dtype)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return partial(F.linear, weight=weight, bias=bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def add_rms_norm(
        self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual.add_(x)
        return self.rms_norm(residual, weight), residual

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def attention(self, batch: Batch, cache: KVCache) -> Attend:
        config = self._config
        positions = torch.from_numpy(batch.positions)
        cos = self._cos.index_select(0, positions).unsqueeze(1)
        sin = self._sin.index_select(0, positions).unsqueeze(1)
        paged = PagedAttention(batch, cache, config.num_heads, config.sliding_window)
        num_heads = config.num_heads
        num_rotated = num_heads + config.num_kv_heads
        half = config.head_dim // 2

        def attend(
            layer: int,
            qkv: torch.Tensor,
            q_norm: torch.Tensor | None,
            k_norm: torch.Tensor | None,
        ) -> torch.Tensor:
            rotated = qkv[:, :num_rotated]
            if q_norm is not None and k_norm is not None:
                q, k = rotated[:, :num_heads], rotated[:, num_heads:]
                q.copy_(self.rms_norm(q, q_norm))
                k.copy_(self.rms_norm(k, k_norm))
            swapped = rotated.roll(half, -1)
            rotated.mul_(cos).addcmul_(swapped, sin)
            return paged(layer, qkv)

        return attend
