"""A peer that does not read: deltas merge, memory stays flat, then the socket is closed."""

import asyncio
import socket
from urllib.parse import urlsplit

import aiohttp
import pytest

from hillstar.server.limits import SocketLimits
from support.server import fake_hub_server
from support.socket_client import connect, text_of
from support.wait import until

LIMITS = SocketLimits(max_outbox_bytes=256 << 10, stall_timeout_s=5.0, close_timeout_s=0.5)


def lazy_socket(url: str) -> socket.socket:
    """A connected TCP socket with a small receive buffer, to be read when the test wants."""
    parts = urlsplit(url)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect((parts.hostname, parts.port))
    raw.setblocking(False)
    return raw


async def test_a_slow_socket_is_closed_1013_and_others_go_on() -> None:
    """Whoever does not read is closed 1013 within the byte bound; nobody else notices."""
    async with (
        fake_hub_server(LIMITS) as running,
        connect(running.socket_url) as healthy,
        connect(running.socket_url, max_msg_size=0) as slow,
    ):
        transport = slow.socket._response.connection.transport  # type: ignore[union-attr]
        transport.pause_reading()
        running.hub.delta, running.hub.repeat = 1024, 40
        await slow.send("response.create", input="s" * 100_000)
        await until(lambda: running.front.metrics.num_slow_readers == 1)
        running.hub.delta, running.hub.repeat = 1, 1
        assert text_of(await healthy.response(input="well")) == "well"
        transport.resume_reading()
        assert await slow.close_code() == 1013


async def test_a_lagging_socket_catches_up_with_merged_deltas() -> None:
    """A peer that pauses and reads again gets the whole text, in fewer and larger deltas."""
    limits = SocketLimits(merge_bytes=1 << 30, close_timeout_s=0.5)
    async with fake_hub_server(limits) as running, connect(running.socket_url) as client:
        transport = client.socket._response.connection.transport  # type: ignore[union-attr]
        transport.pause_reading()
        await client.send("response.create", input="0123456789" * 5_000)
        await until(lambda: len(running.hub.responses) == 1)
        response = next(iter(running.hub.responses.values()))
        await until(response.done.is_set, 30)
        transport.resume_reading()
        frames = await client.until("response.completed")
    deltas = [frame for frame in frames if frame["type"] == "response.output_text.delta"]
    assert text_of(frames) == "0123456789" * 5_000
    assert len(deltas) < 25_000
    numbers = [frame["sequence_number"] for frame in frames]
    assert numbers == sorted(set(numbers))


async def test_a_slow_event_stream_is_cut() -> None:
    """An SSE reader that stalls is cut and its slot is free again."""
    async with fake_hub_server(LIMITS) as running:
        running.hub.delta, running.hub.repeat = 1024, 40
        body = '{"stream":true,"input":"' + "s" * 100_000 + '"}'
        raw = lazy_socket(running.url)
        head = (
            "POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        await asyncio.get_running_loop().sock_sendall(raw, (head + body).encode())
        await until(lambda: running.front.metrics.num_slow_readers == 1)
        await until(lambda: running.front.connections.num_open == 0)
        raw.close()


async def test_a_reset_peer_frees_everything() -> None:
    """A connection reset in the middle of a stream leaves nothing behind."""
    async with fake_hub_server(LIMITS) as running:
        running.hub.hold_after = 1
        async with connect(running.socket_url) as client:
            await client.send("response.create", input="ab")
            await client.until("response.output_text.delta")
            client.socket._response.connection.transport.abort()  # type: ignore[union-attr]
            await until(lambda: running.front.connections.num_open == 0)
            assert not running.front.peers
        running.hub.go.set()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_is_told_to_the_hub(stream: bool) -> None:
    """A POST whose client disconnects ends its scope: `on_disconnect` applies."""
    async with fake_hub_server(LIMITS) as running, aiohttp.ClientSession() as session:
        running.hub.hold_after = 1
        body = {"input": "ab", "store": False, "stream": stream}
        posting = asyncio.create_task(session.post(f"{running.url}/v1/responses", json=body))
        await until(lambda: len(running.hub.responses) == 1)
        response = next(iter(running.hub.responses.values()))
        await until(lambda: len(response.log) > 4)
        if posting.done():
            posting.result().close()
        posting.cancel()
        await asyncio.wait_for(response.done.wait(), 10)
        assert response.stream.response_object()["status"] == "cancelled"
