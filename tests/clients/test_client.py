"""The client against a server that breaks off at chosen points."""

import asyncio
import socket
from collections import deque
from collections.abc import Iterator

import pytest

from hillstar.clients import client as client_module
from hillstar.clients.backoff import Backoff
from hillstar.clients.client import Client
from hillstar.clients.errors import (
    ClientClosed,
    ClientError,
    ConnectionLostError,
    EventsLost,
    HandshakeRefused,
    ProtocolError,
    RequestRefused,
)
from hillstar.clients.events import (
    ConnectionLost,
    Created,
    Finished,
    Resumed,
    StreamEvent,
    TextDelta,
)
from hillstar.clients.link import RECONNECT_CODES
from hillstar.clients.stream import Stream
from support.fake_server import ANSWER, FakeServer, Script

TEXT = "".join(ANSWER)
NUM_FRAMES = 2 + len(ANSWER) + 1
QUICK = Backoff(first_s=0.001, max_s=0.01, give_up_s=5.0)
HOPELESS = Backoff(first_s=0.001, max_s=0.005, give_up_s=0.05)


async def read(stream: Stream) -> list[StreamEvent]:
    return [event async for event in stream]


def text_of(events: list[StreamEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


@pytest.fixture(params=["msgpack", "json"])
def encoding(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


async def test_a_stream_yields_created_text_and_finished(encoding: str) -> None:
    """An uncut stream has one Created first, one Finished last, and the text between."""
    async with FakeServer(Script()) as server, Client(server.url, encoding=encoding) as client:
        events = await read(client.stream(input="hi"))
    assert isinstance(events[0], Created)
    assert isinstance(events[-1], Finished)
    assert text_of(events) == TEXT == events[-1].response.text
    assert events[-1].response.usage.cached_tokens == 3
    assert events[-1].response.conversation_id == "conv_1"


@pytest.mark.parametrize("cut", range(NUM_FRAMES + 1))
@pytest.mark.parametrize("close_code", [None, 1012])
async def test_a_cut_after_any_frame_repeats_and_loses_nothing(
    cut: int, close_code: int | None, encoding: str
) -> None:
    """Wherever the connection breaks, the text is whole, once, and one response was made."""
    script = Script(cuts=deque([cut]), close_code=close_code)
    async with (
        FakeServer(script) as server,
        Client(server.url, encoding=encoding, backoff=QUICK) as client,
    ):
        events = await read(client.stream(input="hi"))
    assert text_of(events) == TEXT
    assert sum(isinstance(event, Finished) for event in events) == 1
    assert sum(isinstance(event, Created) for event in events) == 1
    was_cut = cut < NUM_FRAMES
    assert sum(isinstance(event, ConnectionLost) for event in events) == was_cut
    assert len({create["hillstar"]["client_event_id"] for create in server.creates}) == 1
    assert len(server.resumes) == (was_cut and cut > 0)


async def test_cuts_at_every_event_in_turn() -> None:
    """A connection that yields one event each time still brings the whole stream."""
    script = Script(cuts=deque([1] + [2] * (NUM_FRAMES - 1)))
    async with FakeServer(script) as server, Client(server.url, backoff=QUICK) as client:
        events = await read(client.stream(input="hi"))
    assert text_of(events) == TEXT
    assert server.num_connections == NUM_FRAMES


@pytest.mark.parametrize("cut", range(1, 7))
async def test_a_resume_after_a_merged_delta_goes_on_behind_it(cut: int) -> None:
    """A merged delta counts as all its parts: the resume begins after the last of them."""
    script = Script(cuts=deque([cut]), merge=3)
    async with FakeServer(script) as server, Client(server.url, backoff=QUICK) as client:
        events = await read(client.stream(input="hi"))
    assert text_of(events) == TEXT


async def test_events_sent_twice_are_delivered_once() -> None:
    """Events that the server repeats after a resume are dropped."""
    script = Script(cuts=deque([6]), repeat_events=3)
    async with FakeServer(script) as server, Client(server.url, backoff=QUICK) as client:
        events = await read(client.stream(input="hi"))
    assert text_of(events) == TEXT
    assert any(isinstance(event, Resumed) for event in events)


@pytest.mark.parametrize("code", sorted(RECONNECT_CODES - {1005, 1006, 1015}))
async def test_reconnects_after_the_codes_that_allow_it(code: int) -> None:
    """1001, 1011, 1012 and 1013 are ridden out."""
    script = Script(cuts=deque([5]), close_code=code)
    async with FakeServer(script) as server, Client(server.url, backoff=QUICK) as client:
        assert (await client.create(input="hi")).text == TEXT
    assert server.num_connections == 2


@pytest.mark.parametrize("code", [1000, 1008, 1009, 4409])
async def test_other_close_codes_are_final(code: int) -> None:
    """A close that forbids coming back ends the stream with the code in the error."""
    script = Script(cuts=deque([5]), close_code=code)
    async with FakeServer(script) as server, Client(server.url, backoff=QUICK) as client:
        with pytest.raises(ConnectionLostError) as caught:
            await client.create(input="hi")
    assert (caught.value.close_code, caught.value.retryable) == (code, False)
    assert server.num_connections == 1


async def test_several_lanes_share_one_socket_and_survive_its_loss() -> None:
    """Eight streams at once on one socket, cut in the middle, are all whole."""
    script = Script(cuts=deque([37]))
    async with FakeServer(script) as server, Client(server.url, backoff=QUICK) as client:
        results = await asyncio.gather(*(read(client.stream(input=str(i))) for i in range(8)))
    assert all(text_of(events) == TEXT for events in results)
    assert server.num_connections == 2


async def test_more_streams_than_lanes_wait_their_turn() -> None:
    """Streams beyond the lanes are served when one is free, none is refused."""
    async with FakeServer(Script()) as server, Client(server.url) as client:
        responses = await asyncio.gather(*(client.create(input=str(i)) for i in range(40)))
    assert {response.text for response in responses} == {TEXT}
    assert len({create["stream_id"] for create in server.creates}) <= 16


async def test_one_named_lane_runs_one_stream_at_a_time() -> None:
    """Streams on the same lane follow each other."""
    async with FakeServer(Script()) as server, Client(server.url) as client:
        both = [client.stream(lane="a", input="1"), client.stream(lane="a", input="2")]
        results = await asyncio.gather(*(stream.result() for stream in both))
    assert [result.text for result in results] == [TEXT, TEXT]
    assert [create["stream_id"] for create in server.creates] == ["a", "a"]


async def test_cancel_ends_the_stream_with_its_terminal_event() -> None:
    """After a cancel the stream still yields the terminal event, with usage."""
    script = Script(hold_after=2)
    async with FakeServer(script) as server, Client(server.url) as client:
        events: list[StreamEvent] = []
        async with client.stream(input="hi") as stream:
            async for event in stream:
                events.append(event)
                if isinstance(event, TextDelta):
                    await stream.cancel()
    assert isinstance(events[-1], Finished)
    assert events[-1].response.status == "cancelled"
    assert server.cancels[0] == "resp_0"


async def test_the_answer_to_a_late_cancel_reaches_no_other_stream() -> None:
    """A cancel names a lane that no stream has: its answer may come after the response's end."""
    script = Script(hold_after=0)
    async with FakeServer(script) as server, Client(server.url) as client:
        stream = client.stream(input="hi")
        await stream.cancel()
        await stream.result()
    assert server.cancel_lanes.isdisjoint(create["stream_id"] for create in server.creates)


async def test_a_cancel_asked_for_before_the_response_exists_reaches_it() -> None:
    """A cancel that has no id to name yet is sent once the response is created."""
    script = Script(hold_after=0)
    async with FakeServer(script) as server, Client(server.url) as client:
        stream = client.stream(input="hi")
        await stream.cancel()
        response = await stream.result()
    assert response.status == "cancelled"
    assert server.cancels == ["resp_0"]


async def test_a_cancel_survives_a_lost_connection() -> None:
    """A cancel asked for while there is no connection is said after the resume."""
    script = Script(hold_after=3, cuts=deque([4]))
    async with FakeServer(script) as server, Client(server.url, backoff=QUICK) as client:
        async for event in (stream := client.stream(input="hi")):
            if isinstance(event, ConnectionLost):
                await stream.cancel()
    assert isinstance(event, Finished)
    assert event.response.status == "cancelled"
    assert server.cancels == ["resp_0"]


async def test_a_refusal_is_typed_and_ends_its_stream_alone() -> None:
    """An error frame becomes RequestRefused; the next stream on the socket works."""
    refusal = {"code": "context_length_exceeded", "message": "too long", "param": "input"}
    async with FakeServer(Script(refuse=refusal)) as server, Client(server.url) as client:
        with pytest.raises(RequestRefused) as caught:
            await client.create(input="hi")
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
        assert not caught.value.retryable
        server.script.refuse = None
        assert (await client.create(input="hi")).text == TEXT
    assert server.num_connections == 1


async def test_a_refused_handshake_is_final_where_trying_again_is_useless() -> None:
    """401 at the upgrade raises at once."""
    script = Script(handshakes=deque([401]))
    async with FakeServer(script) as server, Client(server.url, backoff=QUICK) as client:
        with pytest.raises(HandshakeRefused) as caught:
            await client.create(input="hi")
    assert (caught.value.status, caught.value.retryable) == (401, False)


async def test_a_server_that_is_not_ready_is_waited_for() -> None:
    """503 at the upgrade is tried again."""
    script = Script(handshakes=deque([503, 503]))
    async with FakeServer(script) as server, Client(server.url, backoff=QUICK) as client:
        assert (await client.create(input="hi")).text == TEXT


async def test_gives_up_when_the_outage_lasts_too_long() -> None:
    """Nobody listening: attempts are reported, then ConnectionLostError, retryable."""
    async with FakeServer(Script()) as server:
        url = server.url
    seen: list[StreamEvent] = []
    async with Client(url, backoff=HOPELESS) as client:
        with pytest.raises(ConnectionLostError) as caught:
            async for event in client.stream(input="hi"):
                seen.append(event)
    assert caught.value.retryable
    assert len(seen) >= 2
    assert all(isinstance(event, ConnectionLost) for event in seen)


async def test_connections_that_bring_nothing_count_as_one_outage() -> None:
    """A server that accepts and drops every connection is given up too."""
    script = Script(cuts=deque([0] * 1000))
    async with FakeServer(script) as server, Client(server.url, backoff=HOPELESS) as client:
        with pytest.raises(ConnectionLostError):
            await client.create(input="hi")
    assert server.num_connections > 2


async def test_a_log_that_is_gone_is_said_instead_of_wrong_text() -> None:
    """`recovered: false` raises EventsLost."""
    script = Script(cuts=deque([5]), recovered=False)
    async with FakeServer(script) as server, Client(server.url, backoff=QUICK) as client:
        with pytest.raises(EventsLost):
            await client.create(input="hi")


async def test_resume_follows_a_response_from_any_number() -> None:
    """`resume` yields exactly the events behind `starting_after`."""
    async with FakeServer(Script()) as server, Client(server.url) as client:
        response = await client.create(input="hi")
        events = await read(client.resume(response.id, starting_after=4))
        whole = await read(client.resume(response.id))
        assert (await client.retrieve(response.id)).text == TEXT
    assert text_of(events) == "".join(ANSWER[3:])
    assert text_of(whole) == TEXT


async def test_retrieving_an_unknown_response_is_refused() -> None:
    """HTTP errors carry the server's code."""
    async with FakeServer(Script()) as server, Client(server.url) as client:
        with pytest.raises(RequestRefused) as caught:
            await client.retrieve("resp_unknown")
    assert (caught.value.status, caught.value.code) == (404, "response_not_found")


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (502, "<html>", RequestRefused),
        (200, "<html>", ProtocolError),
        (503, "null", RequestRefused),
        (503, '{"error": "no upstream"}', RequestRefused),
        (200, "[]", ProtocolError),
    ],
)
async def test_an_answer_that_is_not_the_servers(
    status: int, body: str, fault: type[ClientError]
) -> None:
    """What a proxy makes of an answer is a typed error."""
    async with (
        FakeServer(Script(raw_answer=(status, body))) as server,
        Client(server.url) as client,
    ):
        with pytest.raises(fault):
            await client.retrieve("resp_1")


async def test_a_request_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes a request and never answers is a retryable error."""
    monkeypatch.setattr(client_module, "_REQUEST_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with Client(f"http://127.0.0.1:{silent.getsockname()[1]}") as client:
            with pytest.raises(ClientError, match="Timeout") as caught:
                await client.retrieve("resp_1")
    assert caught.value.retryable


async def test_closing_the_client_ends_open_streams() -> None:
    """A reader that waits when the client closes gets ClientClosed."""
    script = Script(hold_after=1)
    async with FakeServer(script) as server:
        async with Client(server.url) as client:
            stream = client.stream(input="hi")
            async for event in stream:
                if isinstance(event, TextDelta):
                    break
            waiting = asyncio.create_task(stream.result())
        with pytest.raises(ClientClosed):
            await waiting


async def test_leaving_a_stream_early_keeps_its_events_from_the_next_one() -> None:
    """What still arrives for an abandoned stream never reaches another."""
    script = Script(hold_after=3)
    async with FakeServer(script) as server, Client(server.url) as client:
        async with client.stream(input="1") as first:
            async for event in first:
                if isinstance(event, TextDelta):
                    break
        server.script.hold_after = None
        assert (await client.create(input="2")).text == TEXT
        assert len({create["stream_id"] for create in server.creates}) == 2
