"""Files that appear whole or not at all, whoever else is working and whenever power fails."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's contents, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold `folder` (made when absent) against other processes; waits for its holder.

    The lock goes with the process, however that ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder at `path`, gone afterwards (or at the next call, after a kill)."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `path` if the block succeeds, and vanishes if not.

    Its files reach the disk before the rename. Callers with the same `path` must exclude each
    other (`exclusive`).
    """
    with scratch_folder(path.with_name(path.name + ".partial")) as partial:
        yield partial
        for file in partial.iterdir():
            flush(file)
        flush(partial)
        partial.rename(path)
        flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
