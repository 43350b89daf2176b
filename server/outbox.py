"""What a peer has still to be sent, bounded: the writer's side of a socket or an event stream.

Whoever has something for the peer puts it here and never waits. While the peer reads, what is put
in one turn of the event loop leaves together at its end, in one write: a step of the engine costs
one, however many of its responses share the socket, and each delta is still a frame of its own.

When the peer lags (the transport is full, or much has piled up before the writer runs) everything
waits here for the writer task, and adjacent deltas of one response merge, so what is queued grows
with the text and not with the number of tokens. Beyond a byte bound, or when a full transport
makes no progress for the stall timeout, the peer is too slow and is cut; nothing else is ever
dropped, control and error frames least of all.
"""

import asyncio
from collections import deque
from typing import Protocol

from hillstar.server.encode import merge
from hillstar.server.events import TextDelta
from hillstar.server.limits import SocketLimits
from hillstar.server.runqueue import RunQueue

MAX_LEAVING = 64  # frames in one write
MAX_MERGED_CHARS = 4096  # bounds the copying of a long merge, and the frame
FRAME_OVERHEAD_BYTES = 96  # of an entry in memory, besides its text
LOGPROB_BYTES = 160  # of one token's logprob entry on the wire, alternatives apart


class Sink(Protocol):
    """The transport, as the writer sees it."""

    @property
    def is_full(self) -> bool:
        """Whether the transport's buffer is above its high-water mark."""
        ...

    def send(self, frames: bytes) -> None:
        """Write whole frames. Raises ConnectionError once the peer is gone."""
        ...

    async def wait_writable(self) -> None:
        """Return when the transport's buffer is below its low-water mark, or the peer is gone."""
        ...


class Framer(Protocol):
    """What one response is to the outbox: its deltas merge with each other while they wait."""

    def frame(self, delta: TextDelta) -> bytes:
        """The delta as it is sent."""
        ...


class _Pending:
    """A delta that waits, and who makes it a frame."""

    __slots__ = ("delta", "framer", "num_bytes")

    def __init__(self, delta: TextDelta, framer: Framer) -> None:
        self.delta = delta
        self.framer = framer
        self.num_bytes = _size(delta)


class Outbox:
    """Owned by its writer task (`run`); `put`, `put_delta`, `finish` and `stop` are for anybody
    on the loop."""

    def __init__(self, sink: Sink, limits: SocketLimits, departures: RunQueue) -> None:
        self._sink = sink
        self._limits = limits
        self._departures = departures
        self._leaving: list[bytes] = []  # frames that go at the end of this turn of the loop
        self._entries: deque[bytes | _Pending] = deque()  # what waits for the writer
        self._tails: dict[Framer, _Pending] = {}  # the last entry of a response, if a delta
        self._num_bytes = 0
        self._wake: asyncio.Future[None] | None = None  # the writer sleeps: nothing waits
        self._stall: asyncio.Timeout | None = None  # the writer waits for the transport
        self._is_closed = False  # nothing more is taken
        self._is_too_slow = False
        self.num_progress = 0  # grows whenever a full transport took more: the peer is alive

    @property
    def num_bytes(self) -> int:
        """An estimate of what waits."""
        return self._num_bytes

    @property
    def is_stalled(self) -> bool:
        """Whether the writer waits for the transport to take more."""
        return self._stall is not None

    def put(self, frame: bytes, framer: Framer | None = None) -> None:
        """Queue a frame. With `framer`, that response's later deltas do not merge across it."""
        if self._wake is not None:
            self._leave_soon(frame)
        elif not self._is_closed:
            if framer is not None:
                self._tails.pop(framer, None)
            self._append(frame, len(frame) + FRAME_OVERHEAD_BYTES)

    def put_delta(self, delta: TextDelta, framer: Framer) -> None:
        """Queue a delta, merged into the last one of its response on a lag."""
        if self._wake is not None:
            self._leave_soon(framer.frame(delta))
        elif not self._is_closed:
            self._append_delta(delta, framer)

    def finish(self) -> None:
        """Take nothing more; `run` returns once all that is queued was sent."""
        self._leave()
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
            self._wake = None
            self._forget()
        return not self._is_too_slow

    def _leave_soon(self, frame: bytes) -> None:
        """Send at the end of this turn of the loop; a long replay on the way there."""
        leaving = self._leaving
        if not leaving:
            self._departures.add(self._leave)
        leaving.append(frame)
        if len(leaving) >= MAX_LEAVING:
            self._leave()

    def _leave(self) -> bool:
        """Send what was put while the writer slept, and have it watch a transport that is full
        now. False, as a callback of `RunQueue`: once is enough."""
        frames = self._leaving
        if frames:
            self._leaving = []
            try:
                self._sink.send(b"".join(frames))
            except ConnectionError:
                self.stop()
            if self._sink.is_full:
                self._wake_writer()
        return False

    def _send_next(self) -> None:
        entry = self._entries.popleft()
        if isinstance(entry, _Pending):
            self._num_bytes -= entry.num_bytes
            if self._tails.get(entry.framer) is entry:
                del self._tails[entry.framer]
            frame = entry.framer.frame(entry.delta)
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

    def _append_delta(self, delta: TextDelta, framer: Framer) -> None:
        tail = self._tails.get(framer)
        if tail is not None and (self._sink.is_full or self._num_bytes > self._limits.merge_bytes):
            merged = merge(tail.delta, delta)
            if merged is not None and len(merged.delta) <= MAX_MERGED_CHARS:
                size = _size(merged)
                self._grow(size - tail.num_bytes)
                tail.delta, tail.num_bytes = merged, size
                return
        pending = _Pending(delta, framer)
        self._tails[framer] = pending
        self._append(pending, pending.num_bytes)

    def _append(self, entry: bytes | _Pending, num_bytes: int) -> None:
        self._entries.append(entry)
        self._grow(num_bytes)

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
        self._leaving = []
        self._entries.clear()
        self._tails.clear()
        self._num_bytes = 0


def _size(delta: TextDelta) -> int:
    return FRAME_OVERHEAD_BYTES + 2 * len(delta.delta) + LOGPROB_BYTES * len(delta.logprobs)
