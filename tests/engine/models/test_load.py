"""Loading weights from safetensors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.errors import ModelError
from hillstar.engine.models.load import load_weights
from hillstar.engine.models.weights import Weights
from support.tiny_models import FAMILIES, save_tiny


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(folder, ModelConfig.from_dir(folder), dtype=dtype)


def edit(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Rewrite the folder's only file with some tensors changed, added or (None) removed."""
    path = folder / "model.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for name, tensor in tensors.items():
        if tensor is None:
            del state[name]
        else:
            state[name] = tensor
    save_file(state, path, metadata={"format": "pt"})


def assert_equals(weights: Weights, state: dict[str, torch.Tensor]) -> None:
    """`weights` holds exactly the tensors of a transformers state dict, fused."""
    used = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}

    def same(tensor: torch.Tensor | None, prefix: str, *names: str) -> None:
        full = [f"{prefix}{name}" for name in names]
        if tensor is None:
            assert not any(name in state for name in full)
            return
        assert torch.equal(tensor, torch.cat([state[name] for name in full]).to(tensor.dtype))
        used.update(full)

    assert torch.equal(weights.embedding, state["model.embed_tokens.weight"])
    assert torch.equal(weights.norm, state["model.norm.weight"])
    assert torch.equal(weights.lm_head, state["lm_head.weight"])
    for i, layer in enumerate(weights.layers):
        at = f"model.layers.{i}."
        same(layer.input_norm, at, "input_layernorm.weight")
        same(layer.post_norm, at, "post_attention_layernorm.weight")
        same(layer.qkv.values, at, *(f"self_attn.{n}_proj.weight" for n in "qkv"))
        same(layer.qkv_bias, at, *(f"self_attn.{n}_proj.bias" for n in "qkv"))
        same(layer.q_norm, at, "self_attn.q_norm.weight")
        same(layer.k_norm, at, "self_attn.k_norm.weight")
        same(layer.o.values, at, "self_attn.o_proj.weight")
        same(layer.gate_up.values, at, "mlp.gate_proj.weight", "mlp.up_proj.weight")
        same(layer.down.values, at, "mlp.down_proj.weight")
    assert used == set(state)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_of_a_family_arrives(name: str, tmp_path: Path) -> None:
    """The fused weights hold every tensor of the checkpoint bit for bit, each in its rows."""
    model = save_tiny(name, tmp_path)
    assert_equals(load(tmp_path), model.state_dict())


def test_shards_with_and_without_an_index(tmp_path: Path) -> None:
    """A checkpoint in several files loads the same with its index and without."""
    model = save_tiny("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_equals(load(tmp_path), model.state_dict())
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_equals(load(tmp_path), model.state_dict())


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    """With tied embeddings the output head shares the embedding's memory, stored or not."""
    save_tiny("qwen2-tied", tmp_path)
    edit(tmp_path, **{"lm_head.weight": torch.zeros(3, 3)})
    weights = load(tmp_path)
    assert weights.lm_head.data_ptr() == weights.embedding.data_ptr()


def test_dtype_is_converted(tmp_path: Path) -> None:
    """Weights arrive in the dtype asked for, rounded as torch rounds."""
    model = save_tiny("llama", tmp_path)
    weights = load(tmp_path, torch.bfloat16)
    down = model.state_dict()["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(weights.layers[1].down.values, down.bfloat16())


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    """Progress rises strictly and ends at the bytes of all tensors."""
    model = save_tiny("llama", tmp_path)
    calls: list[tuple[int, int]] = []
    load_weights(
        tmp_path,
        ModelConfig.from_dir(tmp_path),
        dtype=torch.float32,
        progress=lambda done, total: calls.append((done, total)),
    )
    done = [call[0] for call in calls]
    assert done == sorted(set(done))
    total = sum(t.nbytes for t in model.state_dict().values())
    assert calls[-1] == (total, total)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    """An absent tensor is refused by name."""
    save_tiny("llama", tmp_path)
    edit(tmp_path, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ModelError, match=r"missing tensor 'model\.layers\.1\.mlp\.up_proj"):
        load(tmp_path)


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    """A misshapen tensor is refused with its file, its name and both shapes."""
    save_tiny("llama", tmp_path)
    edit(tmp_path, **{"model.layers.0.self_attn.k_proj.weight": torch.zeros(32, 63)})
    with pytest.raises(ModelError, match=r"safetensors.*k_proj.*\[32, 63\].*\[32, 64\]"):
        load(tmp_path)


def test_unexpected_dtype_is_named(tmp_path: Path) -> None:
    """A tensor stored as integers or 8-bit floats is refused with its dtype."""
    save_tiny("llama", tmp_path)
    edit(tmp_path, **{"model.norm.weight": torch.zeros(64, dtype=torch.int8)})
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' has dtype I8"):
        load(tmp_path)


def test_surplus_tensors(tmp_path: Path) -> None:
    """Rotary tables are ignored; any other unused tensor is refused by name."""
    save_tiny("llama", tmp_path)
    edit(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    load(tmp_path)
    edit(tmp_path, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(ModelError, match=r"has no tensor 'model\.layers\.0\.self_attn\.q_proj\.b"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    """A file cut anywhere is refused by name before anything is read from it."""
    save_tiny("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: is not a complete"):
        load(tmp_path)


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    """A folder with only a pickled checkpoint is refused, and says why."""
    save_tiny("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="never loaded"):
        load(tmp_path)


def test_duplicate_tensor_is_refused(tmp_path: Path) -> None:
    """A tensor that lies in two files is refused: which one counts is unknowable."""
    save_tiny("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(path.read_bytes())
    path.unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors: tensor '.*' is also in a\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("file", ["../model.safetensors", "gone.safetensors", 7])
def test_index_names_files_of_the_folder(tmp_path: Path, file: object) -> None:
    """An index may only name files that lie beside it."""
    save_tiny("llama", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(ModelError, match=r"not the name of a file|is missing, but"):
        load(tmp_path)
    index.write_text("{}")
    with pytest.raises(ModelError, match="weight_map"):
        load(tmp_path)


def test_parameters_lie_in_one_allocation(tmp_path: Path) -> None:
    """A step reads one run of memory, from the embedding through every layer to the last norm."""
    save_tiny("llama", tmp_path)
    weights = load_weights(tmp_path, ModelConfig.from_dir(tmp_path), dtype=torch.bfloat16)
    matrices = [m for layer in weights.layers for m in (layer.qkv, layer.o, layer.gate_up)]
    used = [weights.embedding, *(matrix.values for matrix in matrices), weights.norm]
    assert len({tensor.untyped_storage().data_ptr() for tensor in used}) == 1
    offsets = [tensor.storage_offset() for tensor in used]
    assert offsets == sorted(offsets)
    assert all(tensor.data_ptr() % 256 == 0 for tensor in used)
