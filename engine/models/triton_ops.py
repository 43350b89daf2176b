"""The forward pass's operations on CUDA: cuBLAS for products, `hillstar.kernels` for the rest."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from hillstar.engine.kv.cache import KVCache
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.ops import Attend, HeadNorms, Linear, Norm
from hillstar.engine.models.rope import rope_table
from hillstar.engine.plan import Batch
from hillstar.engine.transfer import to_device
from hillstar.kernels.activation import swiglu
from hillstar.kernels.attention import paged_attention
from hillstar.kernels.kv_store import store_kv
from hillstar.kernels.norm import rms_norm
from hillstar.kernels.rope import rope


class TritonOps:
    """`Ops` on one CUDA device. Holds the rotation table, float32."""

    def __init__(self, config: ModelConfig, *, device: torch.device, max_position: int) -> None:
        self._config = config
        self._device = device
        self._cos_sin = rope_table(config.rope, config.head_dim, max_position).to(device)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return partial(F.linear, weight=weight, bias=bias)

    def norm(self, weight: torch.Tensor) -> Norm:
        return _Norm(weight, self._config.rms_norm_eps)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return swiglu(gate_up)

    def attention(self, cache: KVCache) -> Callable[[Batch], Attend]:
        config = self._config
        layers = tuple(cache.layer(index) for index in range(config.num_layers))
        first_key, first_value = config.num_heads, config.num_heads + config.num_kv_heads

        def prepare(batch: Batch) -> Attend:
            positions = to_device(batch.positions, self._device)
            slot_mapping = to_device(batch.slot_mapping, self._device)
            block_tables = to_device(batch.block_tables, self._device)
            cu_seqlens_q = to_device(batch.cu_seqlens_q, self._device)
            context_lens = to_device(batch.context_lens, self._device)
            max_q_len = int(np.diff(batch.cu_seqlens_q).max())
            max_context_len = int(batch.context_lens.max())

            def attend(layer: int, qkv: torch.Tensor, head_norms: HeadNorms | None) -> torch.Tensor:
                q, k, v = qkv[:, :first_key], qkv[:, first_key:first_value], qkv[:, first_value:]
                rope(
                    q,
                    k,
                    positions,
                    self._cos_sin,
                    q_norm=None if head_norms is None else head_norms.q,
                    k_norm=None if head_norms is None else head_norms.k,
                    eps=config.rms_norm_eps,
                )
                store_kv(k, v, layers[layer], slot_mapping)
                return paged_attention(
                    q,
                    layers[layer],
                    block_tables,
                    cu_seqlens_q,
                    context_lens,
                    scale=config.head_dim**-0.5,
                    max_q_len=max_q_len,
                    max_context_len=max_context_len,
                    window=config.sliding_window or 0,
                ).flatten(1)

            return attend

        return prepare


class _Norm:
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self._weight, self._eps)[0]

    def add(self, residual: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm(x, self._weight, self._eps, residual)
