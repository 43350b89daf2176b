"""The forward pass of the Llama family: Llama, Mistral, Qwen2 and Qwen3 in one code path.

Pre-norm attention and SwiGLU blocks with rotary positions (Llama: arXiv 2302.13971; grouped
queries: arXiv 2305.13245). The families differ by parts that are present or absent: a bias on
Q, K and V, a norm over each head of Q and K, a sliding window, a tied output matrix.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hillstar.engine.kv.cache import KVCache
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.ops import Linear, Ops
from hillstar.engine.models.weights import LayerWeights, Weights
from hillstar.engine.plan import Batch


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer with its matrices prepared for the device."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    @staticmethod
    def prepare(weights: LayerWeights, ops: Ops) -> "_Layer":
        return _Layer(
            input_norm=weights.input_norm,
            qkv=ops.linear(weights.qkv, weights.qkv_bias),
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            o=ops.linear(weights.o),
            post_norm=weights.post_norm,
            gate_up=ops.linear(weights.gate_up),
            down=ops.linear(weights.down),
        )


class Decoder:
    """Token ids in, logits of the sampling rows out; keys and values go to the cache.

    Immutable after construction: the state of sequences is in the cache and the batch.
    """

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        self._config = config
        self._ops = ops
        self._embedding = weights.embedding
        self._layers = tuple(_Layer.prepare(layer, ops) for layer in weights.layers)
        self._norm = weights.norm
        self._lm_head = ops.linear(weights.lm_head)

    def forward(
        self, token_ids: torch.Tensor, sampled: torch.Tensor | None, batch: Batch, cache: KVCache
    ) -> torch.Tensor:
        """Logits of the tokens that are sampled from: float32 `[S, vocab]`.

        token_ids: int64 `[T]`, as fed (no -1). sampled: int64 `[S]`, indices of those tokens;
        None: all of them.
        """
        ops = self._ops
        attend = ops.attention(batch, cache)
        hidden = F.embedding(token_ids, self._embedding)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            qkv = self._project(layer, ops.rms_norm(hidden, layer.input_norm))
            attended = attend(index, qkv)
            if index == last and sampled is not None:
                # From here on every token is on its own: only sampled ones matter.
                attended, hidden = attended[sampled], hidden[sampled]
            hidden = layer.o.add_to(hidden, attended)
            gate_up = layer.gate_up(ops.rms_norm(hidden, layer.post_norm))
            hidden = layer.down.add_to(hidden, ops.swiglu(gate_up))
        return self._lm_head(ops.rms_norm(hidden, self._norm)).float()

    def _project(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values `[T, num_heads + 2 * num_kv_heads, head_dim]`."""
        config = self._config
        qkv = layer.qkv(x).view(len(x), -1, config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = qkv[:, : config.num_heads]
            k = qkv[:, config.num_heads : config.num_heads + config.num_kv_heads]
            q.copy_(self._ops.rms_norm(q, layer.q_norm))
            k.copy_(self._ops.rms_norm(k, layer.k_norm))
        return qkv
