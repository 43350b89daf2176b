"""One socket: its protocols, its frames, its heartbeat, its end. The Hub behind it is a fake."""

import asyncio
from typing import Any

import aiohttp
import pytest

from hillstar.server.limits import SocketLimits
from support.server import fake_hub_server
from support.socket_client import connect, text_of

JSON = "hillstar.v1.json"
MSGPACK = "hillstar.v1.msgpack"


def types(frames: list[Any]) -> list[str]:
    return [frame["type"] for frame in frames]


async def test_a_response_streams_as_numbered_events() -> None:
    """A create is answered by its events in order, without gaps, on the default lane."""
    async with fake_hub_server() as running, connect(running.socket_url) as client:
        frames = await client.response(input="hello")
    assert [frame["sequence_number"] for frame in frames] == list(range(len(frames)))
    assert text_of(frames) == "hello"
    assert types(frames)[-1] == "response.completed"
    assert all("stream_id" not in frame for frame in frames)


async def test_openais_protocol_carries_nothing_of_ours() -> None:
    """Without a subprotocol there are no token counts and no `hillstar` objects."""
    async with fake_hub_server() as running, connect(running.socket_url) as client:
        frames = await client.response(input="hi")
        await client.send("hillstar.resume", response_id="resp_x")
        error = await client.receive()
    assert not any({"first_token", "hillstar"} & frame.keys() for frame in frames)
    assert error["error"]["code"] == "unknown_event"


async def test_msgpack_deltas_are_arrays_that_name_their_response() -> None:
    """Under msgpack a delta is `[1, r, …]` with the `r` of its `response.created`."""
    async with fake_hub_server() as running, connect(running.socket_url, MSGPACK) as client:
        assert client.socket.protocol == MSGPACK
        for expected in (1, 2):
            frames = await client.response(input="hi")
            assert frames[0]["hillstar"] == {"r": expected}
            deltas = [frame for frame in frames if isinstance(frame, list)]
            assert [(d[0], d[1], d[5], d[6], d[7]) for d in deltas] == [
                (1, expected, "h", 0, 1),
                (1, expected, "i", 1, 1),
            ]


async def test_text_under_msgpack_is_a_typed_error() -> None:
    """A text frame on a msgpack socket is refused and the socket lives on."""
    async with fake_hub_server() as running, connect(running.socket_url, MSGPACK) as client:
        await client.socket.send_str('{"type":"response.create","input":"x"}')
        assert (await client.receive())["error"]["code"] == "invalid_msgpack"
        await client.socket.send_bytes(b"\xc1\xff")
        assert (await client.receive())["type"] == "error"
        assert (await client.response(input="hi"))[-1]["type"] == "response.completed"


async def test_a_lost_connection_is_told_to_the_hub() -> None:
    """However a socket ends, the Hub hears once that its scope is gone."""
    async with fake_hub_server() as running:
        running.hub.hold_after = 1
        async with connect(running.socket_url, JSON) as client:
            await client.send("response.create", input="ab", hillstar={"on_disconnect": "cancel"})
            await client.until("response.output_text.delta")
            response = next(iter(running.hub.responses.values()))
            transport = client.socket.get_extra_info("socket")
            assert transport is not None
            client.socket._response.connection.transport.abort()  # type: ignore[union-attr]
            await asyncio.wait_for(response.done.wait(), 10)
    assert response.stream.response_object()["status"] == "cancelled"
    assert [call for call, _ in running.hub.calls].count("disconnected") == 1


async def test_superseded_writers_are_told_and_idle_ones_closed() -> None:
    """A superseded socket hears it; one with nothing left to follow is closed 4409."""
    async with fake_hub_server() as running, connect(running.socket_url, JSON) as client:
        frames = await client.response(input="x")
        conversation = frames[0]["response"]["conversation"]["id"]
        scope = next(iter(running.hub.responses.values())).scopes.pop()
        scope.superseded("conv_other")
        assert (await client.receive())["conversation"] == "conv_other"
        scope.superseded(conversation)
        assert (await client.receive())["type"] == "hillstar.superseded"
        assert await client.close_code() == 4409


async def test_draining_tells_then_closes_1012_and_refuses_upgrades() -> None:
    """A drain announces itself, refuses new sockets with 503, and ends in 1012."""
    async with (
        fake_hub_server() as running,
        connect(running.socket_url, JSON) as ours,
        connect(running.socket_url) as plain,
    ):
        running.front.announce_drain(5.0)
        assert await ours.receive() == {"type": "hillstar.draining", "deadline_ms": 5000}
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            async with connect(running.socket_url):
                pass
        assert refusal.value.status == 503
        running.front.leave()
        assert await ours.close_code() == 1012
        assert await plain.close_code() == 1012
    assert "disconnected" not in [call for call, _ in running.hub.calls]


async def test_frames_over_the_limit_close_1009() -> None:
    """A message above the limit closes the socket with 1009, and the client learns the code."""
    async with (
        fake_hub_server(max_frame_bytes=1 << 20) as running,
        connect(running.socket_url) as client,
    ):
        running.hub.fail_with = RuntimeError("parsed")
        await client.send("response.create", input="x" * (1 << 19))
        assert (await client.receive())["error"]["code"] == "internal_error"
        await client.send("response.create", input="x" * (3 << 20))
        assert await client.close_code() == 1009


async def test_a_large_create_does_not_stall_others() -> None:
    """While 8 MiB are read and parsed, pings on another socket are answered in time."""
    async with (
        fake_hub_server() as running,
        connect(running.socket_url) as large,
        connect(running.socket_url) as small,
    ):
        running.hub.fail_with = RuntimeError("parsed")
        sending = asyncio.create_task(large.send("response.create", input="\n" * (7 << 20)))
        while not any(call == "create" for call, _ in running.hub.calls):
            await small.send("hillstar.nothing")
            assert (await small.receive())["error"]["code"] == "unknown_event"
        await sending
        assert (await large.receive())["error"]["code"] == "internal_error"


async def test_pings_are_answered() -> None:
    """A client's ping gets its pong while a response waits."""
    async with (
        fake_hub_server() as running,
        aiohttp.ClientSession() as session,
        session.ws_connect(running.socket_url, autoping=False) as socket,
    ):
        await socket.ping(b"mark")
        message = await socket.receive(10)
    assert (message.type, message.data) == (aiohttp.WSMsgType.PONG, b"mark")


async def test_silent_peers_are_pinged_and_dead_ones_dropped() -> None:
    """A peer that answers pings lives; one that does not is dropped."""
    limits = SocketLimits(heartbeat_s=0.08, close_timeout_s=0.2)
    async with fake_hub_server(limits) as running, connect(running.socket_url) as alive:
        reading = asyncio.create_task(alive.receive())
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(running.socket_url, autoping=False) as dead,
        ):
            kinds = [(await dead.receive(10)).type for _ in range(2)]
            assert kinds[0] is aiohttp.WSMsgType.PING
            assert kinds[1] is not aiohttp.WSMsgType.PING
        await alive.send("response.create", input="x")
        assert (await reading)["type"] == "response.created"


async def test_echo_is_there_with_debug_alone() -> None:
    """`/debug/echo` sends frames back under --debug and is unknown without."""
    async with (
        fake_hub_server(debug=True) as running,
        connect(f"{running.url}/debug/echo") as client,
    ):
        await client.socket.send_str("text")
        assert (await client.socket.receive(10)).data == "text"
        await client.socket.send_bytes(b"\x00")
        assert (await client.socket.receive(10)).data == b"\x00"
    async with (
        fake_hub_server() as running,
        aiohttp.ClientSession() as session,
        session.get(f"{running.url}/debug/echo") as answer,
    ):
        assert answer.status == 404
