"""A GGUF's architecture metadata -> the contents of a Hugging Face `config.json`."""

from typing import Any

import torch

from hillstar.engine.models.config import CAUSAL_LM, Architecture, RopeConfig
from hillstar.engine.models.gguf_file import Metadata
from hillstar.engine.models.rope import inverse_frequencies
from hillstar.engine.models.tokenizer import eos_token_ids

_ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""`general.architecture` -> ours. Mistral models without a window are stored as llama."""

_UNSUPPORTED = (
    "expert_count",
    "attention.sliding_window",
    "attention.scale",
    "attention.clamp_kqv",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
)
"""Keys of an architecture that change the output unless they are absent, 0 or 1."""

_LLAMA3_CONTEXT = 8192  # of every Llama 3 before scaling


def read_config(
    metadata: Metadata, *, vocab_size: int, is_tied: bool, rope_factors: torch.Tensor | None
) -> dict[str, Any]:
    """Name the hyperparameters as transformers does.

    rope_factors: the file's `rope_freqs.weight`, float32 `[head_dim // 2]`, by which each
    frequency is divided (Llama 3's scaling). Raises ModelError for what is missing or not
    supported.
    """
    name = metadata.require("general.architecture", str)
    if name not in _ARCHITECTURES:
        raise metadata.error(
            f"GGUF architecture {name!r} is not supported; supported: {', '.join(_ARCHITECTURES)}"
        )

    def integer(key: str, default: int | None = None) -> int:
        value = metadata.require(f"{name}.{key}", int, default)
        if value < 1:
            raise metadata.error(f"metadata '{name}.{key}' is {value}; expected at least 1")
        return value

    _refuse_unsupported(metadata, name)
    hidden_size, num_heads = integer("embedding_length"), integer("attention.head_count")
    head_dim = integer("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if integer(key, head_dim) != head_dim:
            raise metadata.error(
                f"{name}.{key} = {integer(key)} differs from the head dimension {head_dim};"
                " that is not supported"
            )
    theta = metadata.require(f"{name}.rope.freq_base", float, 10000.0)
    if rope_factors is None:
        rope_scaling = _rope_scaling(metadata, name)
    else:
        rope_scaling = _llama3_scaling(metadata, rope_factors, theta, head_dim)
    return {
        "architectures": [CAUSAL_LM[_ARCHITECTURES[name]]],
        "model_type": _ARCHITECTURES[name],
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": integer("feed_forward_length"),
        "num_hidden_layers": integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": integer("context_length"),
        "rms_norm_eps": metadata.require(f"{name}.attention.layer_norm_rms_epsilon", float),
        "rope_theta": theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": is_tied,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": eos_token_ids(metadata),
    }


def _refuse_unsupported(metadata: Metadata, name: str) -> None:
    for key in _UNSUPPORTED:
        value = metadata.entries.get(f"{name}.{key}")
        if value not in (None, 0, 1):
            raise metadata.error(f"{name}.{key} = {value!r} is not supported")


def _rope_scaling(metadata: Metadata, name: str) -> dict[str, Any] | None:
    """`rope_scaling` in transformers' names; the configuration's reader judges its type."""
    at = f"{name}.rope.scaling."
    kind = metadata.require(at + "type", str, "none")
    if kind == "none":
        return None
    fields = {
        "rope_type": kind,
        "factor": metadata.get(at + "factor", float),
        "original_max_position_embeddings": metadata.get(at + "original_context_length", int),
        "beta_fast": metadata.get(at + "yarn_beta_fast", float),
        "beta_slow": metadata.get(at + "yarn_beta_slow", float),
    }
    return {field: value for field, value in fields.items() if value is not None}


def _llama3_scaling(
    metadata: Metadata, factors: torch.Tensor, theta: float, head_dim: int
) -> dict[str, Any]:
    """The Llama 3 settings that yield `factors`; GGUF stores only the result.

    The largest factor is the setting; the other three are the same in every Llama 3. Whether
    they are here is checked.
    """
    rope = RopeConfig(
        theta=theta,
        kind="llama3",
        factor=round(float(factors.max()), 3),
        original_max_position=_LLAMA3_CONTEXT,
    )
    plain, _ = inverse_frequencies(RopeConfig(theta=theta), head_dim)
    scaled, _ = inverse_frequencies(rope, head_dim)
    if factors.shape != plain.shape or not torch.allclose(factors, plain / scaled, rtol=1e-3):
        raise metadata.error("the factors of 'rope_freqs.weight' are not those of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position,
    }
