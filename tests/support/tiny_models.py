"""Tiny random models of every family, made by transformers and saved as Hugging Face folders.

Four layers at most, a few hundred dimensions, a vocabulary of 320: a forward pass takes
milliseconds, yet every feature of the family (grouped heads, biases, head norms, windows, RoPE
scalings, tying) is there.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 320

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}


def _llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**_SHAPE, **changes}))


def _llama3_rope(**changes: Any) -> PreTrainedModel:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return _llama(**{"rope_parameters": rope, "tie_word_embeddings": True, **changes})


def _yarn_rope(**changes: Any) -> PreTrainedModel:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    return _llama(**{"rope_parameters": rope, "num_key_value_heads": 1, **changes})


def _linear_rope(**changes: Any) -> PreTrainedModel:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    return _llama(**{"rope_parameters": rope, "num_key_value_heads": 4, **changes})


def _mistral(**changes: Any) -> PreTrainedModel:
    shape = {**_SHAPE, "head_dim": 32, "sliding_window": 24, **changes}
    return MistralForCausalLM(MistralConfig(**shape))


def _qwen2(**changes: Any) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**{**_SHAPE, "tie_word_embeddings": True, **changes}))


def _qwen3(**changes: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**{**_SHAPE, "head_dim": 24, **changes}))


FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": _llama,
    "llama3-rope": _llama3_rope,
    "yarn-rope": _yarn_rope,
    "linear-rope": _linear_rope,
    "mistral-window": _mistral,
    "qwen2-tied": _qwen2,
    "qwen3": _qwen3,
}
"""Name -> a maker of the random model; keyword arguments change its transformers config."""


def make_tiny(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of FAMILIES in fp32, eager attention, ready to evaluate.

    One-dimensional parameters (norms, biases) are random too: left at one or zero, a norm or a
    bias that is never applied would go unnoticed.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = FAMILIES[name](**changes)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    model.set_attn_implementation("eager")
    return model.eval()


def save_tiny(name: str, folder: Path, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """`make_tiny`, saved to `folder` as config.json and model.safetensors; returns the model."""
    model = make_tiny(name, seed, **changes)
    model.save_pretrained(folder)
    return model
