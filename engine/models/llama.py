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
    next_norm: torch.Tensor  # of the next layer's input; of the last layer, the model's own

    @staticmethod
    def prepare(weights: LayerWeights, next_norm: torch.Tensor, ops: Ops) -> "_Layer":
        return _Layer(
            input_norm=weights.input_norm,
            qkv=ops.linear(weights.qkv, weights.qkv_bias),
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            o=ops.linear(weights.o),
            post_norm=weights.post_norm,
            gate_up=ops.linear(weights.gate_up),
            down=ops.linear(weights.down),
            next_norm=next_norm,
        )


class Decoder:
    """Token ids in, logits of the sampling rows out; keys and values go to the cache.

    Immutable after construction: the state of sequences is in the cache and the batch.
    """

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        self._config = config
        self._ops = ops
        self._embedding = weights.embedding
        next_norms = (*(layer.input_norm for layer in weights.layers[1:]), weights.norm)
        self._layers = tuple(
            _Layer.prepare(layer, next_norm, ops)
            for layer, next_norm in zip(weights.layers, next_norms, strict=True)
        )
        self._norm = weights.norm
        self._lm_head = ops.linear(weights.lm_head)

    def forward(
        self, token_ids: torch.Tensor, sampled: torch.Tensor | None, batch: Batch, cache: KVCache
    ) -> torch.Tensor:
        """Logits of the tokens that are sampled from: float32 `[S, vocab]`.

        token_ids: int64 `[T]`, as fed (no -1). sampled: int64 `[S]`, indices of those tokens;
        None: all of them.
        """
        ops, config = self._ops, self._config
        attend = ops.attention(batch, cache)
        hidden = F.embedding(token_ids, self._embedding)
        normed = ops.rms_norm(hidden, self._layers[0].input_norm)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(normed).view(len(normed), -1, config.head_dim)
            attended = attend(index, qkv, layer.q_norm, layer.k_norm)
            if layer.next_norm is self._norm and sampled is not None:
                # From here on every token is on its own: only sampled ones matter.
                attended, hidden = attended[sampled], hidden[sampled]
            normed, hidden = ops.add_rms_norm(hidden, layer.o(attended), layer.post_norm)
            mixed = layer.down(ops.swiglu(layer.gate_up(normed)))
            normed, hidden = ops.add_rms_norm(hidden, mixed, layer.next_norm)
        return self._lm_head(normed).float()
