"""What a peer has still to be sent, bounded: the writer's side of a socket or an event stream.

Whoever has something for the peer puts it here and never waits; one writer task sends. While it
sleeps because all was sent, what is put goes to the transport at once, on the writer's behalf: no
queue, no wake-up, in the same order. So each delta of a peer that reads is a frame of its own.
When the peer lags (the transport is full, or much has piled up at once), adjacent deltas of one
response merge while they wait, so what is queued grows with the text and not with the number of
tokens. Beyond a byte bound, or when a full transport makes no progress for the stall timeout, the
peer is too slow and is cut; nothing else is ever dropped, control and error frames least of all.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sized
from typing import Generic, Protocol, TypeVar

from hillstar.server.encode import merge
from hillstar.server.events import TextDelta
from hillstar.server.limits import SocketLimits

Frame = TypeVar("Frame", bound=Sized)
FrameIn = TypeVar("FrameIn", bound=Sized, contravariant=True)

MAX_MERGED_CHARS = 4096  # bounds the copying of a long merge, and the frame
FRAME_OVERHEAD_BYTES = 96  # of an entry in memory, besides its text
LOGPROB_BYTES = 160  # of one token's logprob entry on the wire, alternatives apart


class Sink(Protocol[FrameIn]):
    """The transport, as the writer sees it."""

    @property
    def is_full(self) -> bool:
        """Whether the transport's buffer is above its high-water mark."""
        ...

    def send(self, frame: FrameIn) -> None:
        """Write one frame. Raises ConnectionError once the peer is gone."""
        ...

    async def wait_writable(self) -> None:
        """Return when the transport's buffer is below its low-water mark, or the peer is gone."""
        ...


class _Pending(Generic[Frame]):
    """A delta that waits, and how to make it a frame."""

    __slots__ = ("delta", "encode", "key", "num_bytes")

    def __init__(self, delta: TextDelta, key: object, encode: Callable[[TextDelta], Frame]) -> None:
        self.delta = delta
        self.key = key
        self.encode = encode
        self.num_bytes = _size(delta)


class Outbox(Generic[Frame]):
    """Owned by its writer task (`run`); `put`, `put_delta`, `finish` and `stop` are for anybody
    on the loop."""

    def __init__(self, sink: Sink[Frame], limits: SocketLimits) -> None:
        self._sink = sink
        self._limits = limits
        self._entries: deque[Frame | _Pending[Frame]] = deque()
        self._tails: dict[object, _Pending[Frame]] = {}  # the last entry of a key, if a delta
        self._num_bytes = 0
        self._wake: asyncio.Future[None] | None = None  # the writer sleeps: nothing is queued
        self._stall: asyncio.Timeout | None = None  # the writer waits for the transport
        self._is_closed = False  # nothing more is taken
        self._is_too_slow = False
        self.num_progress = 0  # grows whenever a full transport took more: the peer is alive

    @property
    def num_bytes(self) -> int:
        """An estimate of what is queued."""
        return self._num_bytes

    @property
    def is_stalled(self) -> bool:
        """Whether the writer waits for the transport to take more."""
        return self._stall is not None

    def put(self, frame: Frame, key: object = None) -> None:
        """Queue a frame. With `key`, later deltas of that key do not merge across it."""
        if self._is_closed:
            return
        if self._wake is not None:
            self._send_at_once(frame)
            return
        if key is not None:
            self._tails.pop(key, None)
        self._append(frame, len(frame) + FRAME_OVERHEAD_BYTES)

    def put_delta(
        self, delta: TextDelta, key: object, encode: Callable[[TextDelta], Frame]
    ) -> None:
        """Queue a delta of the response `key` stands for, merged into its last one on a lag."""
        if self._is_closed:
            return
        if self._wake is not None:
            self._send_at_once(encode(delta))
            return
        tail = self._tails.get(key)
        if tail is not None and (self._sink.is_full or self._num_bytes > self._limits.merge_bytes):
            merged = merge(tail.delta, delta)
            if merged is not None and len(merged.delta) <= MAX_MERGED_CHARS:
                size = _size(merged)
                self._grow(size - tail.num_bytes)
                tail.delta, tail.num_bytes = merged, size
                return
        pending = _Pending(delta, key, encode)
        self._tails[key] = pending
        self._append(pending, pending.num_bytes)

    def finish(self) -> None:
        """Take nothing more; `run` returns once all that is queued was sent."""
        self._is_closed = True
        self._wake_writer()

    def stop(self) -> None:
        """Take nothing more and forget what is queued; `run` returns at once."""
        self._is_closed = True
        self._forget()
        self._wake_writer()
        if self._stall is not None and not self._stall.expired():
            self._stall.reschedule(0)

    async def run(self) -> bool:
        """Send until `finish` or `stop`, or until the peer is gone; False: it was too slow."""
        try:
            while not self._is_too_slow:
                if self._sink.is_full and not await self._wait_writable():
                    break
                if self._entries:
                    self._send_next()
                elif self._is_closed:
                    break
                else:
                    self._wake = asyncio.get_running_loop().create_future()
                    await self._wake
        except ConnectionError:
            pass
        finally:
            self._is_closed = True
            self._forget()
        return not self._is_too_slow

    def _send_at_once(self, frame: Frame) -> None:
        """Send while the writer sleeps, and have it watch a transport that is full now."""
        try:
            self._sink.send(frame)
        except ConnectionError:
            self.stop()
            return
        if self._sink.is_full:
            self._wake_writer()

    def _send_next(self) -> None:
        entry = self._entries.popleft()
        if isinstance(entry, _Pending):
            self._num_bytes -= entry.num_bytes
            if self._tails.get(entry.key) is entry:
                del self._tails[entry.key]
            frame = entry.encode(entry.delta)
        else:
            frame = entry
            self._num_bytes -= len(frame) + FRAME_OVERHEAD_BYTES
        self._sink.send(frame)

    async def _wait_writable(self) -> bool:
        """Whether the transport took something before the stall timeout or an overflow."""
        try:
            async with asyncio.timeout(self._limits.stall_timeout_s) as self._stall:
                await self._sink.wait_writable()
        except TimeoutError:
            self._is_too_slow = self._is_too_slow or bool(self._entries) or not self._is_closed
            return False
        finally:
            self._stall = None
        self.num_progress += 1
        return True

    def _append(self, entry: Frame | _Pending[Frame], num_bytes: int) -> None:
        self._entries.append(entry)
        self._grow(num_bytes)
        self._wake_writer()

    def _grow(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > self._limits.max_outbox_bytes and self._sink.is_full:
            self._is_too_slow = True
            self.stop()

    def _wake_writer(self) -> None:
        if self._wake is not None:
            if not self._wake.done():
                self._wake.set_result(None)
            self._wake = None

    def _forget(self) -> None:
        self._entries.clear()
        self._tails.clear()
        self._num_bytes = 0


def _size(delta: TextDelta) -> int:
    return FRAME_OVERHEAD_BYTES + 2 * len(delta.delta) + LOGPROB_BYTES * len(delta.logprobs)
