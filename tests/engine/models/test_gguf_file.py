"""Reading the GGUF container."""

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from hillstar.engine.models.errors import ModelError
from hillstar.engine.models.gguf_file import Metadata, read_gguf
from support.tiny_gguf import write_gguf
from support.tiny_models import make_tiny


def test_every_type_of_value(tmp_path: Path) -> None:
    """Numbers of every width, booleans, strings and arrays are read as they were written."""
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    expected: dict[str, Any] = {"general.architecture": "llama"}
    for bits in (8, 16, 32, 64):
        expected[f"u{bits}"], expected[f"i{bits}"] = 2**bits - 1, -(2 ** (bits - 1))
        getattr(writer, f"add_uint{bits}")(f"u{bits}", expected[f"u{bits}"])
        getattr(writer, f"add_int{bits}")(f"i{bits}", expected[f"i{bits}"])
    expected |= {"f32": 0.5, "f64": 0.1, "yes": True, "text": "naïve 🦙", "empty": ""}
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 🦙")
    writer.add_key_value("empty", "", gguf.GGUFValueType.STRING)
    for name, values in (("words", ["a", "", "ü"]), ("ids", [1, -2]), ("scores", [0.5, -1.5])):
        expected[name] = values
        writer.add_array(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_gguf(tmp_path / "a.gguf").metadata.entries == expected


def test_tensors_agree_with_the_reference_reader(tmp_path: Path) -> None:
    """Names, shapes, types and bytes are those that the format's own package reads."""
    path = tmp_path / "a.gguf"
    model = make_tiny("qwen3", hidden_size=128, intermediate_size=160, head_dim=32)
    write_gguf(path, model, quantisation=gguf.GGMLQuantizationType.Q4_1)
    ours, theirs = read_gguf(path).tensors, gguf.GGUFReader(path).tensors
    assert list(ours) == [tensor.name for tensor in theirs]
    for tensor in theirs:
        found = ours[tensor.name]
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert found.kind == tensor.tensor_type
        assert np.array_equal(found.data.ravel(), tensor.data.view(np.uint8).ravel())


def header(version: int = 3, num_tensors: int = 0, num_entries: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a complete GGUF"),
        (b"GGML" + bytes(20), "does not begin with GGUF"),
        (header(version=1), "version is 1"),
        (header(version=3 << 24), "version is"),
        (header(num_entries=2**63), "are missing"),
        (header(num_tensors=2**63), "are missing"),
        (header(num_entries=1) + struct.pack("<Q", 2**62) + b"key", "are missing"),
        (header(num_entries=1) + struct.pack("<Q3sI", 3, b"key", 99), "unknown type 99"),
        # An array that claims more elements than the file has bytes, of each kind of element.
        (header(num_entries=1) + struct.pack("<Q3sIIQ", 3, b"key", 9, 0, 2**60), "are missing"),
        (header(num_entries=1) + struct.pack("<Q3sIIQ", 3, b"key", 9, 8, 2**60), "are missing"),
        (header(num_entries=1) + struct.pack("<Q3sIIQ", 3, b"key", 9, 9, 1), "array of type 9"),
        (header(num_tensors=1) + struct.pack("<Q1sI", 1, b"t", 9), "9 dimensions"),
        (header(num_tensors=1) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 8, 77, 0), "77"),
        (header(num_tensors=1) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 31, 3, 0), r"shape \[31\]"),
        (header(num_tensors=1) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 0, 0, 0), r"shape \[0\]"),
        (header(num_tensors=1) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 8, 0, 0), "are missing"),
    ],
)
def test_broken_headers(content: bytes, message: str, tmp_path: Path) -> None:
    """A header that contradicts itself or the file's size is refused at once."""
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"a\.gguf.*{message}"):
        read_gguf(path)


def test_flipped_bits_never_escape(tmp_path: Path) -> None:
    """Whatever bit of a header flips, the file is read or refused with a ModelError."""
    path = tmp_path / "a.gguf"
    write_gguf(path, make_tiny("llama", num_hidden_layers=1))
    whole = path.read_bytes()
    rng = random.Random(3)
    refused = 0
    for _ in range(300):
        flipped = bytearray(whole)
        flipped[rng.randrange(7000)] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        try:
            read_gguf(path)
        except ModelError:
            refused += 1
    assert 0 < refused < 300


def test_metadata_of_another_type() -> None:
    """An entry that is missing or has another type is refused by file, key and value."""
    metadata = Metadata({"n": 3, "x": 0.5, "yes": True, "ids": [1, 2]}, "a.gguf")
    assert metadata.require("n", int) == 3
    assert metadata.require("n", float) == 3.0
    assert metadata.require("gone", int, 7) == 7
    assert metadata.get("gone", int) is None
    assert metadata.require_list("ids", int) == [1, 2]
    for key, kind in (("x", int), ("yes", int), ("n", str), ("ids", int), ("n", bool)):
        with pytest.raises(ModelError, match=rf"a\.gguf: metadata '{key}' is .*; expected"):
            metadata.get(key, kind)
    with pytest.raises(ModelError, match="'gone' is missing"):
        metadata.require("gone", int)
    with pytest.raises(ModelError, match="'gone' is missing"):
        metadata.require_list("gone", int)
