"""One suite for every channel, then what only a socket can do."""

import fcntl
import queue
import resource
import select
import socket
import threading
from collections.abc import Iterator
from typing import Protocol

import msgspec
import pytest

from hillstar.engine.channel import ChannelClosed, ChannelFull, QueueChannel, SocketChannel
from hillstar.engine.framing import (
    HEARTBEAT,
    FrameReader,
    decode_from_engine,
    encode_message,
    frame,
)
from hillstar.engine.messages import Cancel, Failed, FromEngine, Loading, Park, ToEngine

DEADLINE_S = 20.0


class Far(Protocol):
    """The server's end of a channel under test."""

    def tell(self, message: ToEngine) -> None: ...
    def hear(self) -> FromEngine: ...
    def leave(self) -> None: ...


class SocketFar:
    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._reader = FrameReader()
        self._heard: list[FromEngine] = []

    def tell(self, message: ToEngine) -> None:
        self.socket.sendall(encode_message(message))

    def hear(self) -> FromEngine:
        while not self._heard:
            data = self.socket.recv(1 << 16)
            assert data, "the engine's end is closed"
            self._heard += [decode_from_engine(payload) for payload in self._reader.feed(data)]
        return self._heard.pop(0)

    def leave(self) -> None:
        self.socket.close()


class QueueFar:
    def __init__(self, channel: QueueChannel) -> None:
        self._channel = channel

    def tell(self, message: ToEngine) -> None:
        self._channel.post(message)

    def hear(self) -> FromEngine:
        return self._channel.outputs.get(timeout=DEADLINE_S)

    def leave(self) -> None:
        self._channel.close()


Ends = tuple[SocketChannel | QueueChannel, Far]


@pytest.fixture
def pair() -> Iterator[tuple[SocketChannel, SocketFar]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(DEADLINE_S)
    channel = SocketChannel(ours, max_unsent_bytes=1 << 16)
    yield channel, SocketFar(theirs)
    channel.close()
    theirs.close()


@pytest.fixture(params=["socket", "queue"])
def ends(request: pytest.FixtureRequest) -> Ends:
    if request.param == "socket":
        ends: Ends = request.getfixturevalue("pair")
        return ends
    channel = QueueChannel(max_outputs=4)
    return channel, QueueFar(channel)


class TestEveryChannel:
    def test_has_nothing_at_first(self, ends: Ends) -> None:
        """receive_nowait never blocks, and an empty channel is not a closed one."""
        channel, _ = ends
        assert channel.receive_nowait() == []
        assert not channel.wait_readable(0.0)

    def test_hands_messages_out_in_order(self, ends: Ends) -> None:
        """What was told is received once, in order."""
        channel, far = ends
        told: list[ToEngine] = [Cancel("a", 3), Park("b"), Cancel("c")]
        for message in told:
            far.tell(message)
        assert channel.wait_readable(DEADLINE_S)
        assert channel.receive_nowait() == told
        assert channel.receive_nowait() == []

    def test_wakes_who_waits(self, ends: Ends) -> None:
        """wait_readable returns when a message comes, however long it was asked to wait."""
        channel, far = ends
        teller = threading.Timer(0.01, far.tell, [Park("a")])
        teller.start()
        assert channel.wait_readable(None)
        assert channel.receive_nowait() == [Park("a")]
        teller.join()

    def test_hands_out_what_came_before_the_end(self, ends: Ends) -> None:
        """The end is seen after the last message, and then for ever."""
        channel, far = ends
        far.tell(Park("a"))
        far.leave()
        assert channel.wait_readable(DEADLINE_S)
        assert channel.receive_nowait() == [Park("a")]
        for _ in range(2):
            assert channel.wait_readable(None)
            with pytest.raises(ChannelClosed):
                channel.receive_nowait()

    def test_says_things_in_order(self, ends: Ends) -> None:
        """What is sent is heard, in order."""
        channel, far = ends
        for done in range(3):
            channel.send(Loading(done, 3))
        assert channel.flush(DEADLINE_S)
        assert [far.hear() for _ in range(3)] == [Loading(done, 3) for done in range(3)]

    def test_blocks_while_full_and_goes_on(self, ends: Ends) -> None:
        """A reader that does not read stops the writer; nothing is lost when it reads again."""
        channel, far = ends
        text = "x" * 10_000
        sent = threading.Semaphore(0)

        def write() -> None:
            for number in range(200):
                channel.send(Failed(f"{number} {text}"))
                sent.release()
            channel.flush(DEADLINE_S)

        writer = threading.Thread(target=write)
        writer.start()
        num_sent = 0
        while sent.acquire(timeout=0.2):
            num_sent += 1
        assert num_sent < 200
        for number in range(200):
            message = far.hear()
            assert isinstance(message, Failed) and message.message == f"{number} {text}"
        writer.join()

    def test_sending_to_nobody_fails(self, ends: Ends) -> None:
        """Once the other end is known to be gone, send says so."""
        channel, far = ends
        far.leave()
        assert channel.wait_readable(DEADLINE_S)
        with pytest.raises(ChannelClosed):
            channel.receive_nowait()
        with pytest.raises(ChannelClosed):
            channel.send(Loading(1, 2))
        assert not channel.flush(0.0)

    def test_a_writer_that_waits_notices_the_end(self, ends: Ends) -> None:
        """A send that is blocked ends with ChannelClosed when the reader leaves."""
        channel, far = ends
        leaver = threading.Timer(0.1, far.leave)
        leaver.start()
        with pytest.raises(ChannelClosed):
            while True:
                channel.send(Failed("x" * 10_000))
        leaver.join()


class TestSocketChannel:
    def test_takes_frames_in_pieces(self, pair: tuple[SocketChannel, SocketFar]) -> None:
        """However the stream is cut, the messages are the same."""
        channel, far = pair
        stream = encode_message(Cancel("a", 3)) + encode_message(Park("b"))
        received: list[ToEngine] = []
        for index in range(len(stream)):
            far.socket.sendall(stream[index : index + 1])
            assert channel.wait_readable(DEADLINE_S)
            received += channel.receive_nowait()
        assert received == [Cancel("a", 3), Park("b")]

    def test_drops_what_it_cannot_decode(self, pair: tuple[SocketChannel, SocketFar]) -> None:
        """A frame that is no message is dropped alone; those around it are received."""
        channel, far = pair
        far.tell(Park("a"))
        for payload in (b"", b"\xc1", msgspec.msgpack.encode({"type": "park"}), b"\x00" * 50):
            far.socket.sendall(frame(payload))
        far.tell(Park("b"))
        assert channel.receive_nowait() == [Park("a"), Park("b")]

    def test_an_impossible_length_ends_the_stream(
        self, pair: tuple[SocketChannel, SocketFar]
    ) -> None:
        """Bytes that are no frames cannot be read on: the channel closes."""
        channel, far = pair
        far.socket.sendall(b"\xff" * 8)
        with pytest.raises(ChannelClosed):
            channel.receive_nowait()

    def test_the_first_payload_comes_alone(self, pair: tuple[SocketChannel, SocketFar]) -> None:
        """Reading the configuration takes no byte of the messages behind it."""
        channel, far = pair
        far.socket.sendall(frame(b"configuration") + encode_message(Park("a")))
        assert channel.receive_payload(DEADLINE_S) == b"configuration"
        assert channel.receive_nowait() == [Park("a")]

    def test_a_payload_that_does_not_come(self, pair: tuple[SocketChannel, SocketFar]) -> None:
        """Waiting for the configuration has a deadline, and sees the end."""
        channel, far = pair
        with pytest.raises(TimeoutError):
            channel.receive_payload(0.01)
        far.leave()
        with pytest.raises(ChannelClosed):
            channel.receive_payload(DEADLINE_S)

    def test_stop_receiving_wakes_who_waits(self, pair: tuple[SocketChannel, SocketFar]) -> None:
        """What has come is still received; then the end is seen, and sending still works."""
        channel, far = pair
        far.tell(Park("a"))
        channel.stop_receiving()
        assert channel.wait_readable(None)
        assert channel.receive_nowait() == [Park("a")]
        with pytest.raises(ChannelClosed):
            channel.receive_nowait()

    def test_unsent_bytes_leave_while_it_waits(self, pair: tuple[SocketChannel, SocketFar]) -> None:
        """What the socket did not take leaves while the loop waits for messages."""
        channel, far = pair
        far.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        text = "x" * 50_000
        for _ in range(5):
            channel.send(Failed(text))
        heard: queue.Queue[FromEngine] = queue.Queue()

        def read() -> None:
            for _ in range(5):
                heard.put(far.hear())
            far.tell(Park("done"))

        reader = threading.Thread(target=read)
        reader.start()
        assert channel.wait_readable(DEADLINE_S)
        assert channel.receive_nowait() == [Park("done")]
        reader.join()
        assert heard.qsize() == 5

    def test_takes_a_descriptor_of_any_number(self) -> None:
        """An engine works on the descriptor that a server with thousands of sockets gives it."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
        try:
            low, theirs = socket.socketpair()
            high = socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 2000))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with low, theirs:
            channel, far = SocketChannel(high), SocketFar(theirs)
            assert not channel.wait_readable(0.0)
            far.tell(Park("a"))
            assert channel.wait_readable(DEADLINE_S)
            assert channel.receive_nowait() == [Park("a")]
            channel.send(Loading(1, 2))
            assert channel.flush(DEADLINE_S) and far.hear() == Loading(1, 2)
            channel.close()


class TestQueueChannel:
    def test_refuses_what_is_too_much(self) -> None:
        """A full inbox raises and keeps what it has; the end can be told all the same."""
        channel = QueueChannel(max_messages=2)
        channel.post(Park("a"))
        assert channel.wait_readable(0.0)
        channel.post(Park("b"))
        with pytest.raises(ChannelFull):
            channel.post(Park("c"))
        assert channel.receive_nowait() == [Park("a"), Park("b")]
        channel.post(Park("d"))
        channel.post(Park("e"))
        channel.close()
        assert channel.receive_nowait() == [Park("d"), Park("e")]
        with pytest.raises(ChannelClosed):
            channel.receive_nowait()


def test_a_heartbeat_is_answered_when_messages_are_taken(
    pair: tuple[SocketChannel, SocketFar],
) -> None:
    """The engine's loop answers, not its socket: an engine that hangs in a step owes the answer."""
    channel, far = pair
    far.socket.sendall(HEARTBEAT + encode_message(Park("s")))
    assert channel.wait_readable(DEADLINE_S)
    assert select.select([far.socket], [], [], 0) == ([], [], [])
    assert channel.receive_nowait() == [Park("s")]
    assert far.socket.recv(64) == HEARTBEAT
