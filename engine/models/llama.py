"""The forward pass of the Llama family: Llama, Mistral, Qwen2 and Qwen3 in one code path.

Pre-norm attention and SwiGLU blocks with rotary positions (Llama: arXiv 2302.13971; grouped
queries: arXiv 2305.13245). The families differ by parts that are present or absent: a bias on
Q, K and V, a norm over each head of Q and K, a sliding window, a tied output matrix.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.ops import Attend, Head, HeadNorms, Ops, Read, Write
from hillstar.engine.models.weights import LayerWeights, Weights


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer, prepared for the device."""

    qkv: Read
    head_norms: HeadNorms | None
    o: Write
    glu: Read
    down: Write

    @staticmethod
    def prepare(weights: LayerWeights, ops: Ops) -> "_Layer":
        head_norms = None
        if weights.q_norm is not None and weights.k_norm is not None:
            head_norms = HeadNorms(weights.q_norm, weights.k_norm)
        return _Layer(
            qkv=ops.read(weights.input_norm, weights.qkv, weights.qkv_bias),
            head_norms=head_norms,
            o=ops.write(weights.o),
            glu=ops.read_glu(weights.post_norm, weights.gate_up),
            down=ops.write(weights.down),
        )


class Decoder:
    """Token ids in, logits of the sampling rows out; keys and values go to the cache.

    Immutable after construction: the state of sequences is in the cache and the batch.
    """

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        self._head_dim = config.head_dim
        self._embedding = weights.embedding
        self._layers = tuple(_Layer.prepare(layer, ops) for layer in weights.layers)
        self._head: Head = ops.head(weights.norm, weights.lm_head)
        self._residual_dtype = ops.residual_dtype

    def forward(
        self, token_ids: torch.Tensor, sampled: torch.Tensor | None, attend: Attend
    ) -> torch.Tensor:
        """Logits of the tokens that are sampled from: float32 `[S, vocab]`.

        token_ids: int64 `[T]`, as fed (no -1). sampled: int64 `[S]`, indices of those tokens;
        None: all of them. attend: the step's attention.
        """
        residual = F.embedding(token_ids, self._embedding).to(self._residual_dtype)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(residual)
            # A product may come back transposed; attention needs each head in one piece.
            heads = qkv.contiguous().view(len(token_ids), -1, self._head_dim)
            attended = attend(index, heads, layer.head_norms)
            if index == last and sampled is not None:
                # From here on every token is on its own: only sampled ones matter.
                attended, residual = attended[sampled], residual[sampled]
            residual = layer.o(attended, residual)
            residual = layer.down(layer.glu(residual), residual)
        return self._head(residual)
