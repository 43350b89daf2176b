"""A model's parameters as a value: what loading yields and the forward pass reads.

Linear weights are `[out_features, in_features]`, as `torch.nn.functional.linear` takes them.
Q, K and V are one matrix (rows: all query heads, all key heads, all value heads), gate and up are
one matrix (gate rows first): fewer, larger products.
"""

from dataclasses import dataclass

import torch

from hillstar.engine.models.q4 import Q4Matrix


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear weight, and the same as it was quantised, where a device multiplies that faster."""

    values: torch.Tensor  # [out_features, in_features]
    q4: Q4Matrix | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Of one layer; None where the architecture has none."""

    input_norm: torch.Tensor  # [hidden]
    qkv: Matrix  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None  # [(num_heads + 2 * num_kv_heads) * head_dim]
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    o: Matrix  # [hidden, num_heads * head_dim]
    post_norm: torch.Tensor  # [hidden]
    gate_up: Matrix  # [2 * intermediate, hidden]
    down: Matrix  # [hidden, intermediate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Of a whole model; all on one device and of one dtype."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden]
    lm_head: torch.Tensor  # [vocab, hidden]; the embedding itself when tied
