"""Safetensors -> `Weights`, each byte copied once.

Every file's header is read and checked against the architecture before memory is allocated;
then each tensor is copied into its place in a fused matrix, converting its dtype on the way: from
the memory-mapped file on a CPU, by threads in the background on a GPU (`load_cuda`). Nothing is
ever unpickled.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from hillstar.engine.models.checkpoint import Stored, check, open_file, read_headers
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.load_cuda import Copy, Filling
from hillstar.engine.models.q4 import (
    Q4Groups,
    Q4Matrix,
    can_pack,
    load_q4,
    multiplies_fast,
)
from hillstar.engine.models.weights import LayerWeights, Matrix, Weights
from hillstar.engine.pages import zeros

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, after each tensor."""

_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor of a checkpoint: its name and the shape it must have."""

    name: str
    shape: tuple[int, ...]


_Parts = tuple[_Part, ...]
"""Tensors stacked by rows into one parameter; none when the architecture lacks it."""


@dataclass(frozen=True, slots=True)
class Loading:
    """Weights of which the values may still be on their way."""

    weights: Weights
    _filling: Filling | None

    def __enter__(self) -> "Loading":
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the loading, complete or not."""
        if self._filling is not None:
            self._filling.stop()

    def wait(self) -> Weights:
        """The weights, when all values are there. Raises ModelError for a truncated file."""
        if self._filling is not None:
            self._filling.wait()
        return self.weights


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Weights:
    """`begin_loading`, and wait for its end."""
    with begin_loading(model_dir, config, dtype=dtype, device=device, progress=progress) as loading:
        return loading.wait()


def begin_loading(
    model_dir: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Loading:
    """Read a model's parameters into memory on `device`, converted to `dtype`.

    On a GPU this goes on in the background: addresses are final at once, values when `wait` has
    returned. `progress` is called from other threads then, from one at a time.

    Tensors the architecture does not use are an error, except those that carry nothing (rotary
    tables, an output head that is tied to the embedding). Raises ModelError that names file,
    tensor and shapes for a missing, surplus, misshapen or quantised tensor, or a broken file.
    """
    shapes = expected_shapes(config)
    stored = read_headers(model_dir)
    check(model_dir, config, shapes, stored)
    total = sum(stored[name].size_bytes for name in shapes)
    device = torch.device(device)
    memory = _Memory(shapes.values(), dtype, device)
    reader = _Reader(stored, _q4(model_dir, dtype, device), memory, total, progress)
    top = _top_level(config)
    embedding = reader.required(top["embedding"])
    weights = Weights(
        embedding=embedding,
        layers=tuple(_load_layer(reader, _layer(config, i)) for i in range(config.num_layers)),
        norm=reader.required(top["norm"]),
        lm_head=embedding if config.tie_word_embeddings else reader.required(top["lm_head"]),
    )
    if device.type == "cpu":
        return Loading(weights, None)
    report = progress or (lambda done, total: None)
    return Loading(weights, Filling(reader.copies, lambda done: report(done, total)))


def _q4(model_dir: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Q4Groups]:
    """The matrices that are also there in 4 bits, if they would be multiplied so."""
    is_used = device.type == "cpu" and dtype == torch.bfloat16 and multiplies_fast()
    return load_q4(model_dir) if is_used else {}


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this architecture must hold, by its Hugging Face name."""
    groups = [_top_level(config), *(_layer(config, i) for i in range(config.num_layers))]
    return {part.name: part.shape for group in groups for parts in group.values() for part in parts}


def _load_layer(reader: "_Reader", layer: dict[str, _Parts]) -> LayerWeights:
    return LayerWeights(
        input_norm=reader.required(layer["input_norm"]),
        qkv=reader.matrix(layer["qkv"]),
        qkv_bias=reader.optional(layer["qkv_bias"]),
        q_norm=reader.optional(layer["q_norm"]),
        k_norm=reader.optional(layer["k_norm"]),
        o=reader.matrix(layer["o"]),
        post_norm=reader.required(layer["post_norm"]),
        gate_up=reader.matrix(layer["gate_up"]),
        down=reader.matrix(layer["down"]),
    )


def _top_level(config: ModelConfig) -> dict[str, _Parts]:
    matrix = (config.vocab_size, config.hidden_size)
    head = () if config.tie_word_embeddings else (_Part("lm_head.weight", matrix),)
    return {
        "embedding": (_Part("model.embed_tokens.weight", matrix),),
        "norm": (_Part("model.norm.weight", (config.hidden_size,)),),
        "lm_head": head,
    }


def _layer(config: ModelConfig, index: int) -> dict[str, _Parts]:
    """The parameters of one layer, by the field of `LayerWeights` they make up."""
    hidden, inner = config.hidden_size, config.intermediate_size
    num_q = config.num_heads * config.head_dim
    num_kv = config.num_kv_heads * config.head_dim
    qkv = (("q", num_q), ("k", num_kv), ("v", num_kv))

    def part(name: str, *shape: int) -> _Part:
        return _Part(f"model.layers.{index}.{name}", shape)

    def head_norm(name: str) -> _Parts:
        return (part(f"self_attn.{name}.weight", config.head_dim),) if config.qk_norm else ()

    return {
        "input_norm": (part("input_layernorm.weight", hidden),),
        "qkv": tuple(part(f"self_attn.{name}_proj.weight", rows, hidden) for name, rows in qkv),
        "qkv_bias": tuple(
            part(f"self_attn.{name}_proj.bias", rows) for name, rows in qkv if config.qkv_bias
        ),
        "q_norm": head_norm("q_norm"),
        "k_norm": head_norm("k_norm"),
        "o": (part("self_attn.o_proj.weight", hidden, num_q),),
        "post_norm": (part("post_attention_layernorm.weight", hidden),),
        "gate_up": (
            part("mlp.gate_proj.weight", inner, hidden),
            part("mlp.up_proj.weight", inner, hidden),
        ),
        "down": (part("mlp.down_proj.weight", hidden, inner),),
    }


class _Memory:
    """One allocation for all parameters, in the order in which a step reads them."""

    def __init__(
        self, shapes: Iterable[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (sum(_aligned(math.prod(shape), dtype) for shape in shapes),)
        on_host = device.type == "cpu"
        self._free = (
            zeros(size, dtype) if on_host else torch.empty(size, dtype=dtype, device=device)
        )

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        """The next part of it, not initialised."""
        num_elems = math.prod(shape)
        taken = self._free[:num_elems].view(shape)
        self._free = self._free[_aligned(num_elems, taken.dtype) :]
        return taken


def _aligned(num_elems: int, dtype: torch.dtype) -> int:
    """Rounded up, so that the next tensor starts where any kernel likes it."""
    unit = _ALIGNMENT_BYTES // dtype.itemsize
    return -(-num_elems // unit) * unit


class _Reader:
    """Copies tensors out of memory-mapped files and counts the bytes; owns the open files.

    On a GPU it only notes what is to be copied.
    """

    def __init__(
        self,
        stored: dict[str, Stored],
        q4: dict[str, Q4Groups],
        memory: _Memory,
        total: int,
        progress: Progress | None,
    ) -> None:
        self._stored = stored
        self._q4 = q4
        self._memory = memory
        self._done = 0
        self._total = total
        self._progress = progress
        self.copies: list[Copy] = []
        self._files = {entry.file: open_file(entry.file) for entry in stored.values()}

    def required(self, parts: _Parts) -> torch.Tensor:
        """A parameter stacked from its parts in one allocation."""
        num_rows = sum(part.shape[0] for part in parts)
        shape = (num_rows, *parts[0].shape[1:])
        target = self._memory.take(shape)
        row = 0
        for part in parts:
            stored = self._stored[part.name]
            place = target[row : row + part.shape[0]]
            row += part.shape[0]
            if target.device.type != "cpu":
                self.copies.append(Copy(stored.file, part.name, place))
                continue
            file = self._files[stored.file]
            source = file.get_tensor(part.name)  # type: ignore[no-untyped-call]  # a mapped view
            place.copy_(source)
            self._done += stored.size_bytes
            if self._progress is not None:
                self._progress(self._done, self._total)
        return target

    def matrix(self, parts: _Parts) -> Matrix:
        """A linear weight, with its quantised form if there is one of all its parts."""
        values = self.required(parts)
        groups = [self._q4[part.name] for part in parts if part.name in self._q4]
        if len(groups) < len(parts) or not can_pack(len(values)):
            return Matrix(values)
        return Matrix(values, Q4Matrix.pack(Q4Groups.stack(groups)))

    def optional(self, parts: _Parts) -> torch.Tensor | None:
        return self.required(parts) if parts else None
