"""Converting GGUF files."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import hillstar.engine.models.gguf as module
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.errors import ModelError
from hillstar.engine.models.files import sha256_of
from hillstar.engine.models.gguf import convert_gguf
from hillstar.engine.models.load import load_weights
from hillstar.engine.models.q4 import load_q4
from hillstar.engine.models.rope import inverse_frequencies
from hillstar.engine.models.weights import Matrix, Weights
from support.tiny_gguf import CHAT_TEMPLATE, write_gguf
from support.tiny_models import make_tiny, save_tiny

Q = gguf.GGMLQuantizationType


def load(folder: Path) -> Weights:
    return load_weights(folder, ModelConfig.from_dir(folder), dtype=torch.float32)


def tensors(weights: Weights) -> list[torch.Tensor]:
    """Every tensor of `weights`, in a fixed order."""
    flat = [weights.embedding, weights.norm, weights.lm_head]
    for layer in weights.layers:
        names = ("input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "post_norm")
        values = [getattr(layer, name) for name in (*names, "gate_up", "down")]
        values = [value.values if isinstance(value, Matrix) else value for value in values]
        flat += [value for value in values if value is not None]
    return flat


@pytest.mark.parametrize("family", ["llama", "qwen2-tied", "qwen3"])
@pytest.mark.parametrize("stored", [Q.F32, Q.F16, Q.BF16])
def test_unquantised_files_convert_exactly(family: str, stored: Any, tmp_path: Path) -> None:
    """F32, F16 and BF16 tensors arrive bit for bit, Q and K rows in their original order."""
    model = make_tiny(family)
    dtype = {Q.F32: torch.float32, Q.F16: torch.float16, Q.BF16: torch.bfloat16}[stored]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    model.save_pretrained(tmp_path / "hf")
    write_gguf(tmp_path / "model.gguf", model, quantisation=stored)
    folder = convert_gguf(tmp_path / "model.gguf", tmp_path / "cache")
    theirs, ours = ModelConfig.from_dir(tmp_path / "hf"), ModelConfig.from_dir(folder)
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)  # GGUF holds it as float32
    object.__setattr__(ours, "rms_norm_eps", theirs.rms_norm_eps)
    assert ours == theirs
    expected, found = tensors(load(tmp_path / "hf")), tensors(load(folder))
    assert len(expected) == len(found)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_mistral_is_a_llama_there(tmp_path: Path) -> None:
    """A Mistral without a window, which GGUF stores as a llama, converts to the same tensors."""
    model = save_tiny("mistral-window", tmp_path / "hf", sliding_window=None)
    write_gguf(tmp_path / "model.gguf", model)
    folder = convert_gguf(tmp_path / "model.gguf", tmp_path / "cache")
    assert ModelConfig.from_dir(folder).architecture == "llama"
    expected, found = tensors(load(tmp_path / "hf")), tensors(load(folder))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("stored", [Q.Q4_1, Q.Q8_0])
def test_quantised_tensors_round_to_float16(
    stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block-quantised tensor is its dequantised values in float16, in whatever chunks."""
    monkeypatch.setattr(module, "_CHUNK_VALUES", 1000)
    model = make_tiny("qwen3", hidden_size=128, intermediate_size=160, head_dim=32)
    write_gguf(tmp_path / "model.gguf", model, quantisation=stored)
    weights = load(convert_gguf(tmp_path / "model.gguf", tmp_path / "cache"))
    down = model.state_dict()["model.layers.1.mlp.down_proj.weight"].numpy()
    exact = gguf.quants.dequantize(gguf.quants.quantize(down, stored), stored)
    assert torch.equal(weights.layers[1].down.values, torch.from_numpy(exact).half().float())
    assert torch.equal(weights.norm, model.state_dict()["model.norm.weight"])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("stored", [Q.Q4_0, Q.Q4_1])
def test_matrices_of_4_bits_are_kept_as_they_were(
    family: str, stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside every 4-bit matrix's float16 values lie its codes, in the same order of rows, over
    all files of the checkpoint."""
    model = make_tiny(family, hidden_size=128, intermediate_size=160, head_dim=32)
    write_gguf(tmp_path / "model.gguf", model, quantisation=stored)
    monkeypatch.setattr(module, "_MAX_SHARD_BYTES", 100_000)
    folder = convert_gguf(tmp_path / "model.gguf", tmp_path / "cache")
    kept = load_q4(folder)
    values: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        values |= load_file(path)
    layers = {name for name, value in values.items() if "layers" in name and value.dim() == 2}
    assert set(kept) == layers
    for name, groups in kept.items():
        assert torch.equal(groups.values().half(), values[name])


def test_large_files_become_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What exceeds one file's size is cut into several with an index, and loads the same."""
    model = save_tiny("llama", tmp_path / "hf")
    write_gguf(tmp_path / "model.gguf", model)
    monkeypatch.setattr(module, "_MAX_SHARD_BYTES", 50_000)
    folder = convert_gguf(tmp_path / "model.gguf", tmp_path / "cache")
    assert len(list(folder.glob("model-0*.safetensors"))) > 2
    expected, found = tensors(load(tmp_path / "hf")), tensors(load(folder))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_second_call_finds_the_first(tmp_path: Path) -> None:
    """A file converts once, wherever it lies; another file's folder is another."""
    model = make_tiny("llama")
    write_gguf(tmp_path / "a.gguf", model)
    calls: list[tuple[int, int]] = []

    def report(done: int, total: int) -> None:
        calls.append((done, total))

    folder = convert_gguf(tmp_path / "a.gguf", tmp_path / "cache", report)
    assert calls[-1][0] == calls[-1][1] > 0
    calls.clear()
    (tmp_path / "a.gguf").rename(tmp_path / "b.gguf")
    assert convert_gguf(tmp_path / "b.gguf", tmp_path / "cache", report) == folder
    assert calls == []
    write_gguf(tmp_path / "c.gguf", make_tiny("llama", seed=1))
    assert convert_gguf(tmp_path / "c.gguf", tmp_path / "cache", report) != folder


def test_tokenizer_and_template_come_along(tmp_path: Path) -> None:
    """The folder's tokenizer encodes by the file's merges, and its template renders."""
    write_gguf(tmp_path / "model.gguf", make_tiny("llama"))
    folder = convert_gguf(tmp_path / "model.gguf", tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("<|im_start|>he").ids
    assert [tokenizer.id_to_token(i) for i in ids] == ["<|im_start|>", "he"]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == CHAT_TEMPLATE
    assert settings["eos_token"] == "<|im_end|>"
    assert ModelConfig.from_dir(folder).eos_token_ids == (2,)
    theirs = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "he"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == "<|im_start|>he"
    assert theirs.encode("he he 12") == tokenizer.encode("he he 12").ids


def test_llama3_scaling_is_recovered(tmp_path: Path) -> None:
    """Llama 3's RoPE settings are found from the factors the file stores, others are refused."""
    source = ModelConfig.from_dict(
        make_tiny("llama", head_dim=64).config.to_dict()
        | {
            "architectures": ["LlamaForCausalLM"],
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        }
    ).rope
    model = make_tiny("llama", head_dim=64, rope_parameters={"rope_theta": 5e5})
    plain = 1.0 / 5e5 ** (np.arange(0, 64, 2, dtype=np.float32) / 64)
    factors = (plain / inverse_frequencies(source, 64)[0].numpy()).astype(np.float32)
    write_gguf(tmp_path / "a.gguf", model, extra={"rope_freqs.weight": factors})
    folder = convert_gguf(tmp_path / "a.gguf", tmp_path / "cache")
    assert ModelConfig.from_dir(folder).rope == source
    factors[7] *= 1.5
    write_gguf(tmp_path / "b.gguf", model, extra={"rope_freqs.weight": factors})
    with pytest.raises(ModelError, match="not those of Llama 3"):
        convert_gguf(tmp_path / "b.gguf", tmp_path / "cache")


def test_yarn_scaling_is_read(tmp_path: Path) -> None:
    """YaRN's settings come from the metadata."""
    yarn = {
        ".rope.scaling.type": "yarn",
        ".rope.scaling.factor": 4.0,
        ".rope.scaling.original_context_length": 128,
        ".rope.scaling.yarn_beta_fast": 16.0,
    }
    write_gguf(tmp_path / "model.gguf", make_tiny("qwen2-tied"), metadata=yarn)
    rope = ModelConfig.from_dir(convert_gguf(tmp_path / "model.gguf", tmp_path / "cache")).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 128)
    assert (rope.beta_fast, rope.beta_slow) == (16.0, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metadata": {".block_count": None}}, "'llama.block_count' is missing"),
        ({"metadata": {".block_count": 3}}, r"'model\.layers\.2.*missing"),
        ({"metadata": {".block_count": 1}}, r"1 layers has no tensor 'blk\.1\."),
        ({"metadata": {".feed_forward_length": 96}}, r"'blk\.0\.ffn_gate.*\[112, 64\].*\[96, 64\]"),
        ({"metadata": {".block_count": 1 << 31}}, "num_hidden_layers"),
        ({"metadata": {".attention.head_count": 0}}, r"head_count' is 0; expected at least 1"),
        ({"metadata": {".embedding_length": "64"}}, r"embedding_length' is '64'; expected int"),
        ({"metadata": {".expert_count": 8}}, "llama.expert_count = 8"),
        ({"metadata": {".rope.dimension_count": 8}}, r"rope\.dimension_count = 8"),
        ({"metadata": {".rope.scaling.type": "longrope"}}, "'longrope' is not supported"),
        ({"metadata": {"tokenizer.ggml.model": None}}, "'tokenizer.ggml.model' is missing"),
        ({"metadata": {"tokenizer.ggml.pre": "viking"}}, "'viking' is not supported"),
        ({"without": ["token_embd.weight"]}, "'token_embd.weight' is missing"),
        ({"without": ["blk.1.ffn_up.weight"]}, r"'model\.layers\.1\.mlp\.up_proj\.weight'"),
        ({"extra": {"blk.0.ssm_a": np.ones(3, np.float32)}}, r"'blk\.0\.ssm_a' is not supported"),
        ({"extra": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, r"no tensor 'blk\.0\.attn_q"),
    ],
)
def test_refusals_name_the_fault(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    """What is missing, surplus or not supported is named, and nothing is left in the cache."""
    write_gguf(tmp_path / "model.gguf", make_tiny("llama"), **options)
    with pytest.raises(ModelError, match=message):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    """A GGUF of another architecture is refused with the list of those that work."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma3")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"'gemma3' is not supported; supported: llama, qwen2"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "cache")


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    """A quantised tensor whose values float16 cannot hold is refused, not made infinite."""
    model = make_tiny("qwen3", hidden_size=128, intermediate_size=160, head_dim=32)
    with torch.no_grad():
        model.lm_head.weight[3, 3] = 1e6
    write_gguf(tmp_path / "model.gguf", model, quantisation=Q.Q8_0)
    with pytest.raises(ModelError, match=r"'output\.weight' holds values outside"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    """A file cut anywhere, in its header or in its data, is refused by name."""
    path = tmp_path / "model.gguf"
    write_gguf(path, make_tiny("llama"))
    whole = path.read_bytes()
    for length in (0, 3, 8, 20, 100, 1000, 5000, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"model\.gguf: is not a complete GGUF"):
            convert_gguf(path, tmp_path / "cache")


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    """A path that is not there is refused by name."""
    with pytest.raises(ModelError, match=r"gone\.gguf: cannot be read"):
        convert_gguf(tmp_path / "gone.gguf", tmp_path / "cache")


def test_killed_conversion_leaves_no_trap(tmp_path: Path) -> None:
    """What a killed conversion left behind is neither taken for a model nor in the way."""
    path = tmp_path / "model.gguf"
    write_gguf(path, make_tiny("llama"))
    folder = module.converted_folder(tmp_path / "cache", sha256_of(path))
    debris = folder.with_name(folder.name + ".partial")
    debris.mkdir(parents=True)
    (debris / "model.safetensors").write_text("half")
    load(convert_gguf(path, tmp_path / "cache"))
    assert not debris.exists()
