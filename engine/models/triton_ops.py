"""The forward pass's operations on CUDA: `hillstar.kernels`, and cuBLAS where it is as fast."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from hillstar.engine.kv.cache import KVCache
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.ops import Attend, Head, HeadNorms, Read, Write
from hillstar.engine.models.rope import rope_table
from hillstar.engine.models.weights import Matrix
from hillstar.kernels.attention import paged_attention
from hillstar.kernels.attention_tuning import Tuning
from hillstar.kernels.linear import gate_up_swiglu, linear
from hillstar.kernels.linear_tuning import choose_tuning, folds_norm
from hillstar.kernels.norm import rms_norm
from hillstar.kernels.rope import rope_store

_MAX_TILES = 4096  # of a split launch: splits are for grids smaller than the device


class TritonOps:
    """`Ops` on one CUDA device."""

    def __init__(self, config: ModelConfig, embedding: torch.Tensor) -> None:
        """embedding: on the device and of the dtype of all weights."""
        self._eps = config.rms_norm_eps
        self._counters = torch.zeros(_MAX_TILES, dtype=torch.int32, device=embedding.device)
        self.residual_dtype = embedding.dtype

    def read(self, norm: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> Read:
        product = partial(linear, weight=weight.values, bias=bias, counters=self._counters)
        return partial(self._read, norm, product)

    def read_glu(self, norm: torch.Tensor, gate_up: Matrix) -> Read:
        return partial(self._read, norm, partial(gate_up_swiglu, weight=gate_up.values))

    def write(self, weight: Matrix) -> Write:
        matrix = weight.values
        num_outputs, num_inputs = matrix.shape

        def add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            tuning = choose_tuning(len(x), num_outputs, num_inputs, itemsize=x.itemsize)
            if tuning is None:  # in place: cuBLAS would copy the sum before it adds to it
                return residual.addmm_(x, matrix.T)
            return linear(x, matrix, residual=residual, tuning=tuning, counters=self._counters)

        return add

    def head(self, norm: torch.Tensor, weight: torch.Tensor) -> Head:
        product = partial(linear, weight=weight, out_dtype=torch.float32)
        return partial(self._read, norm, product)

    def _read(
        self, norm: torch.Tensor, product: Callable[..., torch.Tensor], residual: torch.Tensor
    ) -> torch.Tensor:
        if folds_norm(len(residual)):
            return product(residual, norm_weight=norm, eps=self._eps)
        return product(rms_norm(residual, norm, self._eps))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """What the layers of a step share, on the device. T tokens, R rows; padding does nothing."""

    positions: torch.Tensor  # int32 [T]
    slot_mapping: torch.Tensor  # int32 or int64 [T]; -1: not stored
    block_tables: torch.Tensor  # int32 [R, max_blocks]
    cu_seqlens_q: torch.Tensor  # int32 [R + 1]
    context_lens: torch.Tensor  # int32 [R]
    max_q_len: int  # bounds, on the host
    max_context_len: int


class PagedAttention:
    """Attention over one cache. Holds the rotation table, float32."""

    def __init__(
        self,
        config: ModelConfig,
        cache: KVCache,
        *,
        device: torch.device,
        max_position: int,
        tuning: Tuning | None = None,
    ) -> None:
        """tuning: of the attention kernel; None: its own choice."""
        self._config = config
        self._tuning = tuning
        self._layers = tuple(cache.layer(index) for index in range(config.num_layers))
        self._cos_sin = rope_table(config.rope, config.head_dim, max_position).to(device)
        self._counters = torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)
        self.block_size = cache.pool.shape[4]

    def step(self, batch: DeviceBatch) -> Attend:
        config = self._config
        first_key, first_value = config.num_heads, config.num_heads + config.num_kv_heads

        def attend(layer: int, qkv: torch.Tensor, head_norms: HeadNorms | None) -> torch.Tensor:
            q, k, v = qkv[:, :first_key], qkv[:, first_key:first_value], qkv[:, first_value:]
            rope_store(
                q,
                k,
                v,
                self._layers[layer],
                batch.positions,
                batch.slot_mapping,
                self._cos_sin,
                q_norm=None if head_norms is None else head_norms.q,
                k_norm=None if head_norms is None else head_norms.k,
                eps=config.rms_norm_eps,
            )
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
                tuning=self._tuning,
                counters=self._counters,
            ).flatten(1)

        return attend
