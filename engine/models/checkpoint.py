"""A folder of safetensors files: what its headers say, and whether that is a model's."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.errors import ModelError

_INDEX = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What is loaded, by the names that headers give it."""

_MAX_NAMES = 4  # names listed in one error


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies and what its file's header says of it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int


def open_file(path: Path) -> safe_open:
    """Raises ModelError for a file that is none, or is truncated."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: is not a complete safetensors file ({error})") from error


def read_headers(model_dir: Path) -> dict[str, Stored]:
    """What each tensor of the checkpoint is, from the headers of its files."""
    stored: dict[str, Stored] = {}
    for path in _files(model_dir):
        file = open_file(path)
        for name in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 (not a dict)
            view = file.get_slice(name)  # type: ignore[no-untyped-call]
            shape, dtype = tuple(view.get_shape()), view.get_dtype()
            if name in stored:
                raise ModelError(f"{path}: tensor '{name}' is also in {stored[name].file.name}")
            value_bytes = DTYPES[dtype].itemsize if dtype in DTYPES else 0  # `check` refuses it
            stored[name] = Stored(path, shape, dtype, math.prod(shape) * value_bytes)
    return stored


def _files(model_dir: Path) -> Iterator[Path]:
    """The checkpoint's files: those of the index, else model.safetensors, else all there are."""
    index = model_dir / _INDEX
    single = model_dir / "model.safetensors"
    if index.exists():
        yield from _indexed_files(index)
    elif single.exists():
        yield single
    else:
        paths = sorted(model_dir.glob("*.safetensors"))
        if not paths:
            raise ModelError(
                f"{model_dir}: holds no *.safetensors files"
                " (pickled checkpoints such as pytorch_model.bin are never loaded)"
            )
        yield from paths


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: is not an index with a 'weight_map' ({error!r})") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index}: {name!r} is not the name of a file in the same folder")
        if not (index.parent / name).exists():
            raise ModelError(f"{index.parent / name}: is missing, but {index.name} names it")
    return [index.parent / name for name in names]


def check(
    model_dir: Path,
    config: ModelConfig,
    expected: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, Stored],
) -> None:
    """Every tensor is there in the right shape, and nothing else is that would matter; else
    raises ModelError."""
    missing = [name for name in expected if name not in stored]
    if missing:
        raise ModelError(f"{model_dir}: missing {_listed(missing)} ({config.architecture})")
    for name, shape in expected.items():
        found = stored[name]
        if found.shape != shape:
            raise ModelError(
                f"{found.file}: tensor '{name}' has shape {list(found.shape)};"
                f" config.json implies {list(shape)}"
            )
        if found.dtype not in DTYPES:
            raise ModelError(
                f"{found.file}: tensor '{name}' has dtype {found.dtype};"
                f" supported: {', '.join(DTYPES)}"
            )
    surplus = [name for name in stored if name not in expected and not _is_idle(name, config)]
    if surplus:
        raise ModelError(
            f"{stored[surplus[0]].file}: a {config.architecture} of {config.num_layers} layers"
            f" has no {_listed(sorted(surplus))}"
        )


def _is_idle(name: str, config: ModelConfig) -> bool:
    """Whether a surplus tensor carries nothing: it is computed, or it repeats another."""
    is_tied_head = name == "lm_head.weight" and config.tie_word_embeddings
    return is_tied_head or name.endswith("rotary_emb.inv_freq")


def _listed(names: list[str]) -> str:
    noun = "tensor" if len(names) == 1 else f"{len(names)} tensors:"
    shown = ", ".join(f"'{name}'" for name in names[:_MAX_NAMES])
    return f"{noun} {shown}{', ...' if len(names) > _MAX_NAMES else ''}"
