"""GGUF -> a Hugging Face folder, once; after that it is served like any other.

Stored dtypes: tensors the file holds as F32, F16 or BF16 keep their type. Block-quantised ones
(Q4_1, Q8_0, Q4_K ...) become float16, the smallest type that follows them closely: on
SmolLM2-135M-Instruct (Q4_1) rounding `scale * q + offset` to float16 adds an error of 2.0e-4 of
the weights' root mean square, bfloat16 of the same size 1.3e-3, and exact float32 is twice as
large. (Serving in bfloat16 rounds to that in any case; fp32 tests start from float16.) Q4_0 and
Q4_1 matrices are kept in 4 bits as well, for CPUs that multiply those faster (`q4`).

A llama GGUF stores the rows of Q and K so that the two halves of a rotary pair lie side by side;
here they return to the order of the original checkpoint, all first halves before all second.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from safetensors import SafetensorError
from safetensors.torch import save_file

from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.errors import ModelError
from hillstar.engine.models.files import exclusive, new_folder, sha256_of
from hillstar.engine.models.gguf_config import read_config
from hillstar.engine.models.gguf_file import GgufTensor, Metadata, read_gguf
from hillstar.engine.models.load import Progress, expected_shapes
from hillstar.engine.models.q4 import GROUP, Q4Groups, save_q4
from hillstar.engine.models.tokenizer import build_tokenizer, tokenizer_config

_VERSION = 2  # of what a conversion writes; a new one converts anew
_MAX_SHARD_BYTES = 1 << 30  # bounds the memory a conversion takes
_CHUNK_VALUES = 1 << 22  # dequantised at once
_MAX_FLOAT16 = 65504.0

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_Q4 = {GGMLQuantizationType.Q4_0: 1, GGMLQuantizationType.Q4_1: 2}  # numbers a block has
_ROPE_FACTORS = "rope_freqs.weight"
_PLAIN: dict[GGMLQuantizationType, torch.dtype] = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class _Source:
    """An open GGUF: its metadata and its tensors by their Hugging Face names."""

    path: Path
    metadata: Metadata
    tensors: dict[str, GgufTensor]
    rope_factors: torch.Tensor | None


def convert_gguf(path: Path, cache_dir: Path, progress: Progress | None = None) -> Path:
    """The folder in `cache_dir` that holds `path` as safetensors, config and tokenizer.

    It is named after the SHA-256 of the file and made when it is not there yet, whole or not at
    all; `progress` counts the bytes of the file's tensors. Raises ModelError for a broken file
    and for an architecture, tensor type or tokenizer that is not supported.
    """
    try:
        folder = converted_folder(cache_dir, sha256_of(path))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    with exclusive(cache_dir):
        if not folder.exists():
            _convert(path, folder, progress)
    return folder


def converted_folder(cache_dir: Path, sha256: str) -> Path:
    """Where the conversion of the file with this hash lies, or would."""
    return cache_dir / f"gguf-{sha256}-v{_VERSION}"


def _convert(path: Path, folder: Path, progress: Progress | None) -> None:
    source = _read(path)
    raw = _config(source)
    config = ModelConfig.from_dict(raw, str(path))
    _check(source, config)
    tokenizer = build_tokenizer(source.metadata)
    settings = tokenizer_config(source.metadata, config.max_position_embeddings)
    try:
        with new_folder(folder) as partial:
            _write_weights(source, config, partial, progress)
            _write_json(partial / "config.json", raw)
            _write_json(partial / "tokenizer_config.json", settings)
            tokenizer.save(str(partial / "tokenizer.json"))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be converted into {folder} ({error})") from error


def _read(path: Path) -> _Source:
    file = read_gguf(path)
    factors = file.tensors.pop(_ROPE_FACTORS, None)
    return _Source(
        path=path,
        metadata=file.metadata,
        tensors={_hf_name(name, path): tensor for name, tensor in file.tensors.items()},
        rope_factors=None if factors is None else _dequantised(factors, path).float(),
    )


def _hf_name(name: str, path: Path) -> str:
    if name in _TOP:
        return _TOP[name]
    match name.split("."):
        case ["blk", index, stem, ("weight" | "bias") as kind] if stem in _LAYER:
            return f"model.layers.{index}.{_LAYER[stem]}.{kind}"
    raise ModelError(f"{path}: tensor '{name}' is not supported")


def _config(source: _Source) -> dict[str, Any]:
    embedding = source.tensors.get("model.embed_tokens.weight")
    if embedding is None:
        raise ModelError(f"{source.path}: tensor 'token_embd.weight' is missing")
    return read_config(
        source.metadata,
        vocab_size=embedding.shape[0],
        is_tied="lm_head.weight" not in source.tensors,
        rope_factors=source.rope_factors,
    )


def _check(source: _Source, config: ModelConfig) -> None:
    """The file holds exactly the tensors of its architecture."""
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in source.tensors:
            raise ModelError(f"{source.path}: tensor '{name}' (by its original name) is missing")
        found = source.tensors[name]
        if found.shape != shape:
            raise ModelError(
                f"{source.path}: tensor '{found.name}' has shape {list(found.shape)};"
                f" its metadata implies {list(shape)}"
            )
    for name, tensor in source.tensors.items():
        if name not in expected:
            raise ModelError(
                f"{source.path}: a {config.architecture} of {config.num_layers} layers has no"
                f" tensor '{tensor.name}'"
            )


def _write_weights(
    source: _Source, config: ModelConfig, folder: Path, progress: Progress | None
) -> None:
    """Tensors in files of about a gibibyte, with the index that several files need."""
    total = sum(tensor.data.nbytes for tensor in source.tensors.values())
    shards = list(_shards(source.tensors))
    weight_map: dict[str, str] = {}
    done = 0
    for i, names in enumerate(shards, start=1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        if len(shards) == 1:
            file = "model.safetensors"
        state: dict[str, torch.Tensor] = {}
        q4: dict[str, Q4Groups] = {}
        for name in names:
            tensor, order = source.tensors[name], _row_order(config, name)
            state[name] = order(_dequantised(tensor, source.path))
            if tensor.kind in _Q4 and name.startswith("model.layers."):
                q4[name] = _q4_groups(tensor, order)
            weight_map[name] = file
            done += source.tensors[name].data.nbytes
            if progress is not None:
                progress(done, total)
        save_file(state, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # save_file keeps it from other users
        save_q4(folder, file, q4)
    if len(shards) > 1:
        _write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


def _shards(tensors: dict[str, GgufTensor]) -> Iterator[list[str]]:
    """Names in the file's order, cut before they exceed the size of a shard."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        num_bytes = 2 * math.prod(tensor.shape)
        if names and size + num_bytes > _MAX_SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += num_bytes
    yield names


def _row_order(config: ModelConfig, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """What brings a tensor's rows into the original checkpoint's order."""
    if config.architecture == "llama" and ".self_attn.q_proj." in name:
        return partial(_unpermuted, num_heads=config.num_heads)
    if config.architecture == "llama" and ".self_attn.k_proj." in name:
        return partial(_unpermuted, num_heads=config.num_kv_heads)
    return lambda tensor: tensor


def _unpermuted(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows (pair, half) of each head -> rows (half, pair)."""
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()


def _q4_groups(tensor: GgufTensor, order: Callable[[torch.Tensor], torch.Tensor]) -> Q4Groups:
    """A Q4_0 or Q4_1 tensor as it is quantised. A block of 32 values is a float16 scale, in Q4_1
    a float16 offset, and 16 bytes: value i in the low bits of byte i, value 16 + i in the high."""
    num_numbers = _Q4[tensor.kind]
    blocks = tensor.data.reshape(len(tensor.data), -1, 2 * num_numbers + GROUP // 2)
    numbers = torch.from_numpy(blocks[..., : 2 * num_numbers].copy()).view(torch.float16)
    halves = torch.from_numpy(blocks[..., 2 * num_numbers :].copy())
    codes = torch.cat((halves & 15, halves >> 4), dim=-1).flatten(1)
    scales = numbers[..., 0]
    offsets = numbers[..., 1] if num_numbers == 2 else -8 * scales
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    return Q4Groups(*(order(part).contiguous() for part in (pairs, scales, offsets)))


def _dequantised(tensor: GgufTensor, path: Path) -> torch.Tensor:
    """A tensor of the file in the dtype it is stored in (see the module's docstring)."""
    plain = _PLAIN.get(tensor.kind)
    if plain is not None:
        return torch.from_numpy(tensor.data.copy()).view(plain).reshape(tensor.shape)
    num_rows, row_length = len(tensor.data), tensor.shape[-1]
    values = torch.empty((num_rows, row_length), dtype=torch.float16)
    step = max(1, _CHUNK_VALUES // row_length)
    for start in range(0, num_rows, step):
        try:
            chunk = quants.dequantize(tensor.data[start : start + step], tensor.kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{path}: tensor '{tensor.name}' has type {tensor.kind.name}, which is not"
                " supported"
            ) from error
        if not np.abs(chunk).max() <= _MAX_FLOAT16:  # false for NaN too
            raise ModelError(
                f"{path}: tensor '{tensor.name}' holds values outside ±{_MAX_FLOAT16:g}"
            )
        values[start : start + step] = torch.from_numpy(chunk)
    return values.reshape(tensor.shape)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
