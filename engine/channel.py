"""Where the loop's messages come from and go to: a Unix socket, or queues on a thread.

The loop sees only `Inbox` and `Outbox`. A channel is both, and belongs to the loop thread.
"""

import contextlib
import logging
import queue
import select
import socket
import time
from collections import deque
from typing import Protocol

import msgspec

from hillstar.engine.framing import (
    HEARTBEAT,
    FrameReader,
    FramingError,
    decode_to_engine,
    encode_message,
)
from hillstar.engine.messages import FromEngine, ToEngine

log = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 8 << 20
_READ_BYTES = 1 << 18


class ChannelClosed(Exception):
    """The other end is gone; nothing more will come or can be said."""


class ChannelFull(Exception):
    """The engine is too far behind with what it was told; nothing was added."""


class Inbox(Protocol):
    """What the engine is told."""

    def receive_nowait(self) -> list[ToEngine]:
        """Every whole message that is there, in order; never blocks.

        Raises ChannelClosed once all messages sent before the end have been handed out.
        """
        ...

    def wait_readable(self, timeout_s: float | None) -> bool:
        """Block until `receive_nowait` has something to say (its end included), or time is up."""
        ...


class Outbox(Protocol):
    """What the engine says. Bounded: when full, `send` blocks until the reader catches up."""

    def send(self, message: FromEngine) -> None:
        """Hand a message over. Raises ChannelClosed when nobody will ever read it."""
        ...

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was sent has left; False when time is up or nobody reads it."""
        ...


class SocketChannel:
    """Inbox and outbox over one connected stream socket (framing: `engine.framing`).

    Sending never blocks while less than `max_unsent_bytes` wait for the socket; then it blocks,
    for a server that does not read cannot use more tokens either. What is unsent leaves at the
    next `send`, `receive_nowait`, `wait_readable` or `flush`. `receive_nowait` answers heartbeats.
    """

    def __init__(self, sock: socket.socket, *, max_unsent_bytes: int = MAX_UNSENT_BYTES) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._max_unsent_bytes = max_unsent_bytes
        self._unsent: deque[memoryview] = deque()
        self._num_unsent_bytes = 0
        self._reader = FrameReader()
        self._closed = False

    def receive_nowait(self) -> list[ToEngine]:
        self._write_nowait()
        messages: list[ToEngine] = []
        while not self._closed:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return messages
            except OSError:
                data = b""
            self._closed = not data
            messages += self._decode(data)
        if not messages:
            raise ChannelClosed
        return messages

    def receive_payload(self, timeout_s: float) -> bytes:
        """The first frame as it is, before any message: the configuration.

        Raises ChannelClosed when the other end left before, TimeoutError when time is up. Reads
        no byte beyond that frame's, so that the messages after it are not lost.
        """
        deadline = time.monotonic() + timeout_s
        reader = FrameReader()
        while True:
            if not self.wait_readable(deadline - time.monotonic()):
                raise TimeoutError(f"no configuration came within {timeout_s} s")
            data = self._socket.recv(1)
            if not data:
                raise ChannelClosed
            for payload in reader.feed(data):
                return payload

    def wait_readable(self, timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed:
            self._write_nowait()
            happened = self._poll(select.POLLIN | (select.POLLOUT if self._unsent else 0), deadline)
            if happened & ~select.POLLOUT:
                return True
            if not happened:
                return False
        return True

    def send(self, message: FromEngine) -> None:
        if self._closed:
            raise ChannelClosed
        self._queue(encode_message(message))
        while self._num_unsent_bytes > self._max_unsent_bytes:
            if self._closed:
                raise ChannelClosed
            self._poll(select.POLLOUT, None)
            self._write_nowait()

    def flush(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self._closed:
            self._write_nowait()
            if not self._unsent:
                return True
            if time.monotonic() >= deadline:
                return False
            self._poll(select.POLLOUT, deadline)
        return False

    def stop_receiving(self) -> None:
        """Read what is there, then no more: `receive_nowait` will see the end.

        May be called from a signal handler; a thread blocked in `wait_readable` wakes.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        self._closed = True
        self._socket.close()

    def _queue(self, data: bytes) -> None:
        """Send it as soon as the socket takes it."""
        self._unsent.append(memoryview(data))
        self._num_unsent_bytes += len(data)
        self._write_nowait()

    def _decode(self, data: bytes) -> list[ToEngine]:
        messages: list[ToEngine] = []
        try:
            for payload in self._reader.feed(data):
                if not payload:
                    self._queue(HEARTBEAT)
                    continue
                try:
                    messages.append(decode_to_engine(payload))
                except msgspec.DecodeError as error:
                    log.warning("dropped a message that cannot be decoded: %s", error)
        except FramingError as error:
            log.error("the stream from the server cannot be read on: %s", error)
            self._closed = True
        return messages

    def _write_nowait(self) -> None:
        """Write as much as the socket takes. A failed write is the end: the reader is gone."""
        try:
            while self._unsent and not self._closed:
                num_sent = self._socket.send(self._unsent[0])
                self._num_unsent_bytes -= num_sent
                self._unsent[0] = self._unsent[0][num_sent:]
                if not self._unsent[0]:
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._closed = True

    def _poll(self, events: int, deadline: float | None) -> int:
        """Wait for `events` or the end of the connection; what happened, 0: time is up.

        By `poll`: a server with a thousand sockets open hands over a descriptor whose number is
        too large for `select`.
        """
        poll = select.poll()
        poll.register(self._socket, events)
        left_ms = None if deadline is None else 1000 * max(0.0, deadline - time.monotonic())
        happened = poll.poll(left_ms)
        return happened[0][1] if happened else 0


class QueueChannel:
    """Inbox and outbox of a loop that runs on a thread of the embedding program.

    `post` and `close` are the program's; it reads what the engine says from `outputs`.
    """

    def __init__(self, *, max_outputs: int = 1024, max_messages: int = 65536) -> None:
        """While `max_outputs` are unread, the engine waits; `max_messages` bounds `post`."""
        self.outputs: queue.Queue[FromEngine] = queue.Queue(max_outputs)
        self._messages: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._max_messages = max_messages
        self._head: deque[ToEngine | None] = deque()  # taken by wait_readable, not handed out
        self._closed = False

    def post(self, message: ToEngine) -> None:
        """Tell the engine something; from any thread. Raises ChannelFull, never blocks."""
        if len(self._head) + self._messages.qsize() >= self._max_messages:
            raise ChannelFull
        self._messages.put(message)

    def close(self) -> None:
        """Say that nothing more will come; from any thread."""
        self._messages.put(None)

    def receive_nowait(self) -> list[ToEngine]:
        messages: list[ToEngine] = []
        while not self._closed:
            try:
                message = self._head.popleft() if self._head else self._messages.get_nowait()
            except queue.Empty:
                return messages
            if message is None:
                self._closed = True
            else:
                messages.append(message)
        if not messages:
            raise ChannelClosed
        return messages

    def wait_readable(self, timeout_s: float | None) -> bool:
        if self._head or self._closed:
            return True
        try:
            self._head.append(self._messages.get(timeout=timeout_s))
        except queue.Empty:
            return False
        return True

    def send(self, message: FromEngine) -> None:
        while True:
            if self._closed or None in self._head:
                raise ChannelClosed
            try:
                self.outputs.put(message, timeout=0.05)
                return
            except queue.Full:
                self._look_for_end()

    def flush(self, timeout_s: float) -> bool:
        return not self._closed

    def _look_for_end(self) -> None:
        """While blocked on a full output queue, notice that the program closed the channel."""
        while True:
            try:
                self._head.append(self._messages.get_nowait())
            except queue.Empty:
                return
