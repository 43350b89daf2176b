"""The rotary table equals transformers' rotary embedding."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.rope import rope_table

_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 512}
        | _LLAMA3,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "truncate": False},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8},
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25, "beta_fast": 16.0},
    ],
)
def test_equals_transformers(rope: dict[str, Any], head_dim: int) -> None:
    """For every scaling, cosines and sines are transformers' own, bit for bit."""
    theirs = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )
    config = ModelConfig.from_dict(theirs.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    table = rope_table(config.rope, config.head_dim, 2048)
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), torch.arange(2048)[None])
    half = head_dim // 2
    assert table.shape == (2048, head_dim)
    assert table.dtype == torch.float32
    assert torch.equal(table[:, :half], cos[0, :, :half])
    assert torch.equal(table[:, half:], sin[0, :, :half])


def test_position_zero_is_no_rotation() -> None:
    """The first position has cosine 1 and sine 0 in every dimension."""
    config = ModelConfig.from_dict(
        LlamaConfig().to_dict() | {"architectures": ["LlamaForCausalLM"]}
    )
    table = rope_table(config.rope, 8, 1)
    assert table.tolist() == [[1.0] * 4 + [0.0] * 4]
