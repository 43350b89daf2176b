"""Files that appear whole or not at all."""

import hashlib
import threading
from pathlib import Path

import pytest

from hillstar.engine.models.files import exclusive, new_folder, scratch_folder, sha256_of


def test_a_folder_appears_when_its_block_succeeds(tmp_path: Path) -> None:
    """The folder is not there during the block and is there with its files after it."""
    with new_folder(tmp_path / "model") as partial:
        (partial / "file").write_text("x")
        assert not (tmp_path / "model").exists()
    assert (tmp_path / "model" / "file").read_text() == "x"
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]


def test_nothing_remains_of_a_block_that_fails(tmp_path: Path) -> None:
    """An exception, an interrupt included, leaves neither the folder nor a part of it."""
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "model") as partial:
        (partial / "file").write_text("x")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_scratch_starts_empty_and_vanishes(tmp_path: Path) -> None:
    """A scratch folder holds nothing of an earlier, killed use, and is gone afterwards."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "old").write_text("x")
    with scratch_folder(tmp_path / "scratch") as scratch:
        assert list(scratch.iterdir()) == []
    assert not scratch.exists()


def test_exclusive_admits_one_at_a_time(tmp_path: Path) -> None:
    """A second holder enters only after the first has left."""
    order: list[str] = []
    started = threading.Event()

    def second() -> None:
        started.set()
        with exclusive(tmp_path / "cache"):
            order.append("second")

    with exclusive(tmp_path / "cache"):
        thread = threading.Thread(target=second)
        thread.start()
        started.wait()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_sha256_of_a_file(tmp_path: Path) -> None:
    """The hash is that of the contents."""
    (tmp_path / "file").write_bytes(b"abc" * 100_000)
    expected = hashlib.sha256(b"abc" * 100_000).hexdigest()
    assert sha256_of(tmp_path / "file") == expected
