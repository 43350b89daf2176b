"""The architecture of a model as one value, read from a Hugging Face `config.json`.

Whatever a configuration says that Hillstar does not compute is refused by name: a model that
runs is a model whose every setting was honoured.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

from hillstar.engine.models.errors import ModelError

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]

CAUSAL_LM: dict[Architecture, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""The class name in `architectures` of each supported `model_type`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding and its scaling (llama3: Llama 3.1 report; yarn: Peng 2023)."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama shape: pre-norm attention and SwiGLU blocks with rotary positions."""

    architecture: Architecture
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool = False  # qwen2
    qk_norm: bool = False  # qwen3: RMSNorm over each head of q and k before RoPE
    sliding_window: int | None = None  # mistral: a token sees the last `sliding_window` tokens
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_dir(cls, model_dir: Path) -> Self:
        """Read `config.json`, and `generation_config.json` where there is one (its EOS ids win).

        Raises ModelError for an unreadable file and for everything `from_dict` refuses.
        """
        path = model_dir / "config.json"
        generation = model_dir / "generation_config.json"
        eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
        raw = _read_json(path)
        return cls.from_dict(raw if eos is None else {**raw, "eos_token_id": eos}, str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config.json") -> Self:
        """Interpret a configuration in the names of transformers 4 or 5.

        `source` names it in errors. Raises ModelError for an architecture, RoPE type or option
        that is not supported and for a missing or impossible field.
        """
        fields = _Fields(raw, source)
        architecture = _architecture(fields)
        _refuse_unsupported(fields, architecture)
        max_position = fields.integer("max_position_embeddings")
        rope = _rope(fields, max_position)
        if rope.kind == "yarn":
            # Qwen's files keep the unscaled length here; the scaled one is what can be used.
            max_position = max(max_position, int(rope.original_max_position * rope.factor))
        num_heads = fields.integer("num_attention_heads")
        num_kv_heads = fields.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise fields.error(
                f"num_attention_heads ({num_heads}) is not a multiple of"
                f" num_key_value_heads ({num_kv_heads})"
            )
        hidden_size = fields.integer("hidden_size")
        head_dim = fields.integer("head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise fields.error(f"head_dim is {head_dim}; rotary positions need an even number")
        return cls(
            architecture=architecture,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers", high=4096),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=fields.integer("vocab_size"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope=rope,
            max_position_embeddings=max_position,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            sliding_window=_sliding_window(fields, architecture),
            eos_token_ids=_eos_token_ids(fields),
        )


@dataclass(frozen=True, slots=True)
class _Fields:
    """A mapping read field by field, with errors that say where it came from."""

    raw: Mapping[str, Any]
    source: str

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.source}: {message}")

    def integer(self, name: str, default: int | None = None, high: int = 1 << 31) -> int:
        """An integer from 1 to `high`; `default` where it is absent or null, else an error."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
            raise self.error(f"{name} is {value!r}; expected an integer from 1 to {high}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number; `default` where it is absent or null, else an error."""
        value = self._value(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise self.error(f"{name} is {value!r}; expected a positive number")
        return float(value)

    def _value(self, name: str, default: object) -> Any:
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"field '{name}' is missing")
        return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelError(f"{path}: is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _architecture(fields: _Fields) -> Architecture:
    model_type = fields.raw.get("model_type")
    names = fields.raw.get("architectures") or []
    for architecture, class_name in CAUSAL_LM.items():
        if model_type == architecture and names in ([], [class_name]):
            return architecture
    raise fields.error(
        f"architecture {', '.join(map(str, names)) or '(none named)'} (model_type {model_type!r})"
        f" is not supported; supported: {', '.join(CAUSAL_LM.values())}"
    )


def _is_off(value: object) -> bool:
    return not value


_UNSUPPORTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "attention_bias": (_is_off, "biases in these attention projections"),
    "mlp_bias": (_is_off, "biases in the MLP"),
    "quantization_config": (_is_off, "quantised safetensors"),
    "num_experts": (_is_off, "mixtures of experts"),
    "num_local_experts": (_is_off, "mixtures of experts"),
    "use_sliding_window": (_is_off, "windows in a part of the layers"),
    "use_mrope": (_is_off, "multimodal rotary positions"),
    "partial_rotary_factor": (lambda value: value in (None, 1), "rotating a part of each head"),
    "hidden_act": (lambda value: value in (None, "silu"), "activations other than 'silu'"),
}
"""Options that change the output: whether a value leaves it as it is, and what is missing."""


def _refuse_unsupported(fields: _Fields, architecture: Architecture) -> None:
    for name, (is_harmless, what) in _UNSUPPORTED.items():
        value = fields.raw.get(name)
        if not is_harmless(value):
            shown = "" if isinstance(value, dict) else f" = {value!r}"
            raise fields.error(f"{name}{shown}: {what} are not supported")
    expected = "full_attention"
    if _sliding_window(fields, architecture) is not None:
        expected = "sliding_attention"
    for kind in fields.raw.get("layer_types") or []:
        if kind != expected:
            raise fields.error(
                f"layer_types has {kind!r}; a {architecture} layer here is {expected!r}"
            )


def _sliding_window(fields: _Fields, architecture: Architecture) -> int | None:
    """Only Mistral's: Qwen carries the field but uses it under `use_sliding_window` alone.

    An absent field means 4096, as in transformers; null means no window.
    """
    if architecture != "mistral" or fields.raw.get("sliding_window", 4096) is None:
        return None
    return fields.integer("sliding_window", 4096)


def _eos_token_ids(fields: _Fields) -> tuple[int, ...]:
    value = fields.raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(one, int) and one >= 0 for one in ids):
        raise fields.error(f"eos_token_id is {value!r}; expected a token id or a list of them")
    return tuple(ids)


def _rope(fields: _Fields, max_position: int) -> RopeConfig:
    """RoPE from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    raw = fields.raw
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(scaling, dict) or any(isinstance(v, dict) for v in scaling.values()):
        raise fields.error("RoPE parameters that differ between layers are not supported")
    part = _Fields(scaling, fields.source)
    if scaling.get("partial_rotary_factor") not in (None, 1):
        raise fields.error("partial_rotary_factor: rotating a part of each head is not supported")
    theta = part.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in get_args(RopeKind):
        raise fields.error(
            f"RoPE type {kind!r} is not supported; supported: {', '.join(get_args(RopeKind))}"
        )
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=part.number("factor"))
    given = scaling.get("original_max_position_embeddings")
    original = fields.integer("original_max_position_embeddings", given or max_position)
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=part.number("factor"),
            original_max_position=original,
            low_freq_factor=part.number("low_freq_factor"),
            high_freq_factor=part.number("high_freq_factor"),
        )
    factor = part.number("factor", max_position / original)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=part.number("beta_fast", 32.0),
        beta_slow=part.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(part, factor),
        truncate=bool(scaling.get("truncate", True)),
    )


def _yarn_attention_factor(part: _Fields, factor: float) -> float | None:
    """The explicit factor, or the ratio of DeepSeek's two `mscale` fields, or None."""
    if part.raw.get("attention_factor") is not None:
        return part.number("attention_factor")
    if not part.raw.get("mscale") or not part.raw.get("mscale_all_dim"):
        return None
    log = max(0.0, math.log(factor))
    numerator = 0.1 * part.number("mscale") * log + 1.0
    return numerator / (0.1 * part.number("mscale_all_dim") * log + 1.0)
