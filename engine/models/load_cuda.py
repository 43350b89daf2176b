"""Fills parameters on a GPU from safetensors files, at the disk's own pace.

Threads read pieces of the files into pinned memory, each with a stream on which it copies them on:
one thread's read goes on during another's copy. All of it happens beside the caller, who may put an
engine together meanwhile: kernels and graphs need the parameters' addresses, not their values.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import torch

from hillstar.engine.models.checkpoint import DTYPES
from hillstar.engine.models.errors import ModelError

_NUM_THREADS = 8
_PIECE_BYTES = 16 << 20
_MOST_VALUE_BYTES = max(dtype.itemsize for dtype in DTYPES.values())
_NUM_BUFFERS = 2  # of a thread: one is read into while the other is copied


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor of a file and where its values go."""

    file: Path
    name: str
    target: torch.Tensor  # contiguous, on the device


@dataclass(frozen=True, slots=True)
class _Piece:
    file: Path
    offset: int
    dtype: torch.dtype  # in the file
    target: torch.Tensor  # flat


class Filling:
    """Parameters being filled. Owns the threads that do it."""

    def __init__(self, copies: Sequence[Copy], progress: Callable[[int], None]) -> None:
        """Starts. progress: called with the bytes done, by one thread at a time and not after
        `wait` has returned."""
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0
        self._is_over = False
        self._pieces: SimpleQueue[_Piece] = SimpleQueue()
        for piece in sorted(_pieces(copies), key=lambda piece: (piece.file, piece.offset)):
            self._pieces.put(piece)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="weights")
        device = copies[0].target.device
        if device.type == "cuda":  # the memory may still be in use by what was launched before
            torch.cuda.synchronize(device)
        self._work: list[Future[None]] = [
            self._threads.submit(self._fill, device) for _ in range(_NUM_THREADS)
        ]

    def wait(self) -> None:
        """Return when every value is there. Raises ModelError when a file ends too early, and
        what reading or `progress` has raised."""
        try:
            for work in self._work:
                work.result()
        finally:
            self.stop()

    def stop(self) -> None:
        """Leave off; returns when the threads have ended."""
        self._is_over = True
        self._threads.shutdown()

    def _fill(self, device: torch.device) -> None:
        with _Files() as files, _Lane(device) as lane, torch.inference_mode():
            while not self._is_over:
                try:
                    piece = self._pieces.get_nowait()
                except Empty:
                    return
                num_bytes = piece.target.numel() * piece.dtype.itemsize
                buffer = lane.next_buffer()[:num_bytes]
                files.read_into(piece.file, piece.offset, buffer)
                lane.copy(buffer.view(piece.dtype), piece.target)
                with self._lock:
                    self._done += num_bytes
                    self._progress(self._done)


class _Lane:
    """A thread's buffers, and its stream if the way leads to a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        is_pinned = self._stream is not None
        self._buffers = [
            torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
            for _ in range(_NUM_BUFFERS)
        ]
        self._copied: list[torch.cuda.Event | None] = [None] * _NUM_BUFFERS
        self._turn = 0

    def __enter__(self) -> "_Lane":
        return self

    def __exit__(self, *_: object) -> None:
        """All copies have arrived, and no buffer is in use any more."""
        if self._stream is not None:
            self._stream.synchronize()

    def next_buffer(self) -> torch.Tensor:
        """Waits until it has been copied."""
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        return self._buffers[self._turn]

    def copy(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """values: of the buffer that came last."""
        if self._stream is None:
            target.copy_(values)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(self._stream)
        self._copied[self._turn] = copied


class _Files:
    """A thread's own descriptors: the kernel reads ahead for each apart."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def read_into(self, file: Path, offset: int, buffer: torch.Tensor) -> None:
        """Fill the buffer (uint8, host)."""
        descriptor = self._descriptors.get(file)
        if descriptor is None:
            descriptor = self._descriptors[file] = os.open(file, os.O_RDONLY)
        left = buffer.numpy().data
        while left:
            num_read = os.preadv(descriptor, [left], offset)
            if not num_read:
                raise ModelError(f"{file}: ends within a tensor")
            left, offset = left[num_read:], offset + num_read


def _pieces(copies: Sequence[Copy]) -> Iterator[_Piece]:
    headers: dict[Path, tuple[dict[str, dict[str, object]], int]] = {}
    for copy in copies:
        if copy.file not in headers:
            headers[copy.file] = _header(copy.file)
        entries, base = headers[copy.file]
        entry = entries[copy.name]
        dtype = DTYPES[str(entry["dtype"])]
        offsets = entry["data_offsets"]
        assert isinstance(offsets, list), "the header was checked"
        offset = base + int(offsets[0])
        for part in copy.target.view(-1).split(_PIECE_BYTES // _MOST_VALUE_BYTES):  # type: ignore[no-untyped-call]
            yield _Piece(copy.file, offset, dtype, part)
            offset += part.numel() * dtype.itemsize


def _header(file: Path) -> tuple[dict[str, dict[str, object]], int]:
    """A file's tensors by name, and where their data begin (safetensors' format: 8 bytes of
    length, so much JSON, data)."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        return json.loads(opened.read(size)), 8 + size
