"""The forward pass's operations on CUDA: `hillstar.kernels`, and cuBLAS where it is as fast."""

from dataclasses import dataclass
from functools import partial

import torch

from hillstar.engine.kv.cache import KVCache
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.ops import Attend, HeadNorms, Linear, Norm
from hillstar.engine.models.rope import rope_table
from hillstar.kernels.attention import paged_attention
from hillstar.kernels.kv_store import store_kv
from hillstar.kernels.linear import gate_up_swiglu, linear
from hillstar.kernels.norm import rms_norm
from hillstar.kernels.rope import rope


class TritonOps:
    """`Ops` on one CUDA device."""

    def __init__(self, config: ModelConfig, embedding: torch.Tensor) -> None:
        """embedding: on the device and of the dtype of all weights."""
        self._eps = config.rms_norm_eps
        self._counters = torch.zeros(4096, dtype=torch.int32, device=embedding.device)
        self.residual_dtype = embedding.dtype

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return partial(linear, weight=weight, bias=bias, counters=self._counters)

    def head(self, weight: torch.Tensor) -> Linear:
        if weight.dtype == torch.float32:
            return self.linear(weight)
        return lambda x: torch.mm(x, weight.t(), out_dtype=torch.float32)

    def norm(self, weight: torch.Tensor) -> Norm:
        return _Norm(weight, self._eps)

    def glu(self, gate_up: torch.Tensor) -> Linear:
        return partial(gate_up_swiglu, weight=gate_up)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """What the layers of a step share, on the device. T tokens, R rows; padding does nothing."""

    positions: torch.Tensor  # int32 [T]
    slot_mapping: torch.Tensor  # int64 [T]; -1: not stored
    block_tables: torch.Tensor  # int32 [R, max_blocks]
    cu_seqlens_q: torch.Tensor  # int32 [R + 1]
    context_lens: torch.Tensor  # int32 [R]
    max_q_len: int  # bounds, on the host
    max_context_len: int


class PagedAttention:
    """Attention over one cache. Holds the rotation table, float32."""

    def __init__(
        self, config: ModelConfig, cache: KVCache, *, device: torch.device, max_position: int
    ) -> None:
        self._config = config
        self._layers = tuple(cache.layer(index) for index in range(config.num_layers))
        self._cos_sin = rope_table(config.rope, config.head_dim, max_position).to(device)
        self.block_size = cache.pool.shape[4]

    def step(self, batch: DeviceBatch) -> Attend:
        config = self._config
        first_key, first_value = config.num_heads, config.num_heads + config.num_kv_heads

        def attend(layer: int, qkv: torch.Tensor, head_norms: HeadNorms | None) -> torch.Tensor:
            q, k, v = qkv[:, :first_key], qkv[:, first_key:first_value], qkv[:, first_value:]
            rope(
                q,
                k,
                batch.positions,
                self._cos_sin,
                q_norm=None if head_norms is None else head_norms.q,
                k_norm=None if head_norms is None else head_norms.k,
                eps=config.rms_norm_eps,
            )
            store_kv(k, v, self._layers[layer], batch.slot_mapping)
            return paged_attention(
                q,
                self._layers[layer],
                batch.block_tables,
                batch.cu_seqlens_q,
                batch.context_lens,
                scale=config.head_dim**-0.5,
                max_q_len=batch.max_q_len,
                max_context_len=batch.max_context_len,
                window=config.sliding_window or 0,
            ).flatten(1)

        return attend


class _Norm:
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self._weight, self._eps)[0]

    def add(self, residual: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm(x, self._weight, self._eps, residual)
