"""The GGUF container: metadata and tensors of a file, every length checked against its size.

Layout (little-endian, version 2 or 3): magic "GGUF", version u32, number of tensors u64, number
of entries u64; the entries (key, type u32, value); of each tensor its name, number of dimensions
u32, dimensions u64 (fastest first), type u32, offset u64; padding; the data. A string is a length
u64 and UTF-8; an array is a type u32, a length u64 and its elements.

The `gguf` package has a reader too; it follows a false count for hours, and takes ten times as
long for a true one. Its tables of types and its dequantisation are used.
"""

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from hillstar.engine.models.errors import ModelError

_SCALARS = {
    kind: struct.Struct(f"<{code}")
    for kind, code in zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
_STRING = 8
_ARRAY = 9
_UINT32 = 4
_UINT64 = 10
_VERSIONS = (2, 3)
_MAX_DIMS = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor whose bytes are mapped from the file.

    data: uint8 `[num_rows, bytes of a row]`, quantised as `kind` says.
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # slowest dimension first
    data: np.ndarray


@dataclass(frozen=True, slots=True)
class Metadata:
    """The entries of a file: numbers, strings, booleans and lists of these.

    Each reader raises ModelError, naming the file and the key, when the type is another.
    """

    entries: Mapping[str, Any]
    source: str  # the file's name in errors

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.source}: {message}")

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value at `key`, or None where there is none."""
        value = self.entries.get(key)
        return None if value is None else self._checked(key, value, kind)

    def require(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value at `key`, else `default`, else an error."""
        value = self.get(key, kind)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"metadata '{key}' is missing")
        return value

    def require_list(self, key: str, kind: type[T]) -> list[T]:
        """The list at `key`, or an error."""
        values = self.entries.get(key)
        if values is None:
            raise self.error(f"metadata '{key}' is missing")
        if not isinstance(values, list):
            raise self.error(f"metadata '{key}' is {values!r}; expected a list")
        return [self._checked(key, value, kind) for value in values]

    def _checked(self, key: str, value: object, kind: type[T]) -> T:
        if kind is float and type(value) is int:
            return self._checked(key, float(value), kind)
        if not isinstance(value, kind) or (kind is int and type(value) is bool):
            raise self.error(f"metadata '{key}' is {value!r}; expected {kind.__name__}")
        return value


@dataclass(frozen=True, slots=True)
class GgufFile:
    metadata: Metadata
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read a file's header and map its tensors. Raises ModelError when it is not whole."""
    try:
        with path.open("rb") as file:
            contents = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        entries, tensors = _read(memoryview(contents))
    except (ValueError, OSError) as error:
        raise ModelError(f"{path}: is not a complete GGUF file ({error})") from error
    return GgufFile(Metadata(entries, str(path)), tensors)


def _read(buffer: memoryview) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    cursor = _Cursor(buffer)
    if bytes(cursor.take(4)) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = cursor.scalar(_UINT32)
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}, not 2 or 3")
    num_tensors, num_entries = cursor.scalar(_UINT64), cursor.scalar(_UINT64)
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar(_UINT32))
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-cursor.offset // alignment) * alignment
    tensors = {tensor.name: tensor for tensor in _map(buffer, start, infos)}
    if len(tensors) != num_tensors:
        raise ValueError("two tensors have the same name")
    return metadata, tensors


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int


def _tensor_info(cursor: "_Cursor") -> _TensorInfo:
    name = cursor.string()
    num_dims = cursor.scalar(_UINT32)
    if not 1 <= num_dims <= _MAX_DIMS:
        raise ValueError(f"tensor {name!r} has {num_dims} dimensions")
    dims = [cursor.scalar(_UINT64) for _ in range(num_dims)]
    kind = GGMLQuantizationType(cursor.scalar(_UINT32))  # ValueError when unknown
    return _TensorInfo(name, kind, tuple(reversed(dims)), cursor.scalar(_UINT64))


def _map(buffer: memoryview, start: int, infos: list[_TensorInfo]) -> Iterator[GgufTensor]:
    for info in infos:
        block_values, block_bytes = GGML_QUANT_SIZES[info.kind]
        if info.shape[-1] % block_values or math.prod(info.shape) == 0:
            raise ValueError(f"tensor {info.name!r} cannot have shape {list(info.shape)}")
        row_bytes = info.shape[-1] // block_values * block_bytes
        num_rows = math.prod(info.shape[:-1])
        cursor = _Cursor(buffer, start + info.offset)
        data = np.frombuffer(cursor.take(num_rows * row_bytes), dtype=np.uint8)
        yield GgufTensor(info.name, info.kind, info.shape, data.reshape(num_rows, row_bytes))


class _Cursor:
    """Reads values one after the other; raises ValueError instead of passing the end."""

    def __init__(self, buffer: memoryview, offset: int = 0) -> None:
        self._buffer = buffer
        self.offset = offset

    def take(self, num_bytes: int) -> memoryview:
        end = self.offset + num_bytes
        if end > len(self._buffer):
            raise ValueError(f"{end - len(self._buffer)} bytes are missing at its end")
        taken = self._buffer[self.offset : end]
        self.offset = end
        return taken

    def scalar(self, kind: int) -> Any:
        layout = _SCALARS[kind]
        return layout.unpack(self.take(layout.size))[0]

    def string(self) -> str:
        return str(self.take(self.scalar(_UINT64)), "utf-8")

    def value(self, kind: int) -> Any:
        """A value of any type."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.scalar(_UINT32), self.scalar(_UINT64)
            if element in _SCALARS:
                layout = _SCALARS[element]
                return [one for (one,) in layout.iter_unpack(self.take(count * layout.size))]
            if element == _STRING:
                return [self.string() for _ in range(count)]
            raise ValueError(f"it has an array of type {element}")
        if kind in _SCALARS:
            return self.scalar(kind)
        raise ValueError(f"it has a value of unknown type {kind}")
