"""A GGUF's architecture metadata -> the contents of a Hugging Face `config.json`."""

from collections.abc import Mapping
from typing import Any

import torch

from hillstar.engine.models.config import CAUSAL_LM, Architecture, RopeConfig
from hillstar.engine.models.errors import ModelError
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
    metadata: Mapping[str, Any],
    source: str,
    *,
    vocab_size: int,
    is_tied: bool,
    rope_factors: torch.Tensor | None,
) -> dict[str, Any]:
    """Name the hyperparameters as transformers does.

    rope_factors: the file's `rope_freqs.weight`, float32 `[head_dim // 2]`, by which each
    frequency is divided (Llama 3's scaling). Raises ModelError, naming `source`, for what is
    missing or not supported.
    """
    name = metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise ModelError(
            f"{source}: GGUF architecture {name!r} is not supported;"
            f" supported: {', '.join(_ARCHITECTURES)}"
        )
    architecture = _ARCHITECTURES[name]

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{name}.{key}", default)
        if value is None:
            raise ModelError(f"{source}: metadata '{name}.{key}' is missing")
        return value

    for key in _UNSUPPORTED:
        value = metadata.get(f"{name}.{key}")
        if value not in (None, 0, 1):
            raise ModelError(f"{source}: {name}.{key} = {value!r} is not supported")
    hidden_size, num_heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise ModelError(
                f"{source}: {name}.{key} = {get(key)} differs from the head dimension {head_dim};"
                " that is not supported"
            )
    return {
        "architectures": [CAUSAL_LM[architecture]],
        "model_type": architecture,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, name, head_dim, rope_factors, source),
        "tie_word_embeddings": is_tied,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_token_ids(metadata),
    }


def _rope_scaling(
    metadata: Mapping[str, Any],
    name: str,
    head_dim: int,
    rope_factors: torch.Tensor | None,
    source: str,
) -> dict[str, Any] | None:
    if rope_factors is not None:
        theta = float(metadata.get(f"{name}.rope.freq_base", 10000.0))
        return _llama3_scaling(rope_factors, theta, head_dim, source)
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": metadata.get(f"{name}.rope.scaling.factor")}
    original = metadata.get(f"{name}.rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    for field in ("beta_fast", "beta_slow"):
        value = metadata.get(f"{name}.rope.scaling.yarn_{field}")
        if value is not None:
            scaling[field] = value
    return scaling


def _llama3_scaling(
    factors: torch.Tensor, theta: float, head_dim: int, source: str
) -> dict[str, Any] | None:
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
        raise ModelError(f"{source}: the factors of 'rope_freqs.weight' are not those of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position,
    }
