"""Reading `config.json`."""

import json
from pathlib import Path
from typing import Any

import pytest

from hillstar.engine.models.config import ModelConfig, RopeConfig
from hillstar.engine.models.errors import ModelError
from support.tiny_models import FAMILIES, make_tiny

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}


def read(**changes: Any) -> ModelConfig:
    """LLAMA with changes; None removes a field."""
    raw = {**LLAMA, **changes}
    return ModelConfig.from_dict({k: v for k, v in raw.items() if k not in changes or v != "-"})


@pytest.mark.parametrize("name", FAMILIES)
def test_families_as_transformers_saves_them(name: str, tmp_path: Path) -> None:
    """A folder written by transformers is read with every dimension it was built with."""
    model = make_tiny(name)
    model.save_pretrained(tmp_path)
    config = ModelConfig.from_dir(tmp_path)
    theirs = model.config
    assert config.architecture == theirs.model_type
    assert config.hidden_size == theirs.hidden_size
    assert config.intermediate_size == theirs.intermediate_size
    assert config.num_layers == theirs.num_hidden_layers
    assert config.num_heads == theirs.num_attention_heads
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // 4)
    assert config.vocab_size == theirs.vocab_size
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert config.rope.kind == theirs.rope_parameters["rope_type"]
    assert config.sliding_window == getattr(theirs, "sliding_window", None)
    assert config.qkv_bias == (theirs.model_type == "qwen2")
    assert config.qk_norm == (theirs.model_type == "qwen3")
    assert config.eos_token_ids == (2,)


def test_absent_fields_have_the_familys_defaults() -> None:
    """Without them: heads of hidden / heads, one KV head a query head, untied, theta 10,000."""
    config = read(num_key_value_heads="-")
    assert (config.num_kv_heads, config.head_dim, config.tie_word_embeddings) == (4, 16, False)
    assert config.rope == RopeConfig()
    assert config.eos_token_ids == ()


def test_old_and_new_rope_fields_mean_the_same() -> None:
    """`rope_theta` with `rope_scaling` (either key of the type) equals `rope_parameters`."""
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    new = read(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3})
    for key in ("type", "rope_type"):
        assert read(rope_theta=5e5, rope_scaling={key: "llama3", **llama3}) == new
    assert new.rope == RopeConfig(
        theta=5e5, kind="llama3", factor=8.0, original_max_position=64, high_freq_factor=4.0
    )


def test_yarn_extends_the_context() -> None:
    """YaRN's context is original times factor, also where the file states the unscaled one."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert read(rope_scaling=scaling).max_position_embeddings == 2048
    assert read(rope_scaling={"type": "yarn", "factor": 4.0}).rope.original_max_position == 512
    extended = read(rope_scaling=scaling, max_position_embeddings=4096)
    assert extended.max_position_embeddings == 4096


def test_yarn_attention_factor() -> None:
    """An explicit attention factor wins over the two mscale fields, whose ratio it else is."""
    yarn = {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    factor = read(rope_scaling=yarn).rope.attention_factor
    assert factor == pytest.approx((0.1 * 1.3862944 + 1) / (0.05 * 1.3862944 + 1))
    assert read(rope_scaling={**yarn, "attention_factor": 1.5}).rope.attention_factor == 1.5


def test_qwen_window_is_off_unless_used() -> None:
    """Qwen names a window that it does not use."""
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    config = read(**qwen, sliding_window=32768, use_sliding_window=False)
    assert config.sliding_window is None
    with pytest.raises(ModelError, match="use_sliding_window"):
        read(**qwen, sliding_window=32768, use_sliding_window=True)


def test_mistral_window() -> None:
    """Mistral's window is 4,096 when absent and none when null."""
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert read(**mistral).sliding_window == 4096
    assert read(**mistral, sliding_window=None).sliding_window is None
    assert read(**mistral, sliding_window=24).sliding_window == 24


def test_generation_config_names_the_eos_ids(tmp_path: Path) -> None:
    """EOS ids may be one or several; those of generation_config.json win."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 7}))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (7,)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (7, 9)
    generation.write_text("{}")
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, r"Gemma.*LlamaForCausal"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_size": "-"}, "'hidden_size' is missing"),
        ({"rms_norm_eps": "-"}, "'rms_norm_eps' is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) is not a multiple"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*sliding"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'.*linear, llama3, yarn"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor is -1"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "'low_freq_factor' is missing"),
        ({"rope_parameters": {"full_attention": {}}}, "differ between layers"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
    ],
)
def test_refusals_name_the_field(changes: dict[str, Any], message: str) -> None:
    """What is missing, impossible or not computed is refused in one line that names it."""
    with pytest.raises(ModelError, match=message) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [None, "{", "[]", "\xff"])
def test_broken_file_is_named(tmp_path: Path, text: str | None) -> None:
    """A config.json that is absent or not a JSON object is refused by its path."""
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)
