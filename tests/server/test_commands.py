"""What a socket's client asks for: lanes, resumes, cancels. The Hub behind it is a fake."""

from typing import Any

import pytest

from hillstar.server.limits import SocketLimits
from support.server import fake_hub_server
from support.socket_client import connect, text_of

JSON = "hillstar.v1.json"


async def test_lanes_interleave_and_each_is_fifo() -> None:
    """Two lanes run at once; the second create of a lane begins after the first has ended."""
    async with fake_hub_server() as running, connect(running.socket_url) as client:
        running.hub.hold_after = 1
        for lane in ("a", "b", "a"):
            await client.send("response.create", input="xyz", stream_id=lane)
        seen: dict[str, list[str]] = {"a": [], "b": []}

        async def read_until(count: int, kind: str) -> None:
            while sum(found.count(kind) for found in seen.values()) < count:
                frame = await client.receive()
                seen[frame["stream_id"]].append(frame["type"])

        await read_until(2, "response.output_text.delta")
        assert len(running.hub.responses) == 2
        running.hub.go.set()
        await read_until(3, "response.completed")
    assert seen["b"].count("response.created") == 1
    first_end = seen["a"].index("response.completed")
    assert [i for i, kind in enumerate(seen["a"]) if kind == "response.created"] == [
        0,
        first_end + 1,
    ]


async def test_an_error_stays_on_its_lane() -> None:
    """A refused create answers on its own lane and frees it; the others notice nothing."""
    async with fake_hub_server() as running, connect(running.socket_url) as client:
        running.hub.hold_after = 1
        await client.send("response.create", input="xy", stream_id="good")
        await client.until("response.output_text.delta")
        await client.send(
            "response.create", input="x", previous_response_id="resp_none", stream_id="bad"
        )
        error = await client.receive()
        assert (error["stream_id"], error["status"]) == ("bad", 400)
        assert error["error"]["code"] == "previous_response_not_found"
        await client.send("response.create", input=7, stream_id="bad")
        assert (await client.receive())["error"]["code"] == "invalid_type"
        await client.send("response.create", input="x", stream_id="no spaces")
        assert (await client.receive())["error"]["code"] == "invalid_stream_id"
        running.hub.go.set()
        assert (await client.until("response.completed"))[-1]["stream_id"] == "good"
        await client.send("response.create", input="z", stream_id="bad")
        assert text_of(await client.until("response.completed")) == "z"


async def test_a_bug_behind_the_hub_is_an_error_frame() -> None:
    """An unexpected failure answers `internal_error` on its lane; the socket lives on."""
    async with fake_hub_server() as running, connect(running.socket_url) as client:
        running.hub.fail_with = RuntimeError("boom")
        await client.send("response.create", input="x")
        assert (await client.receive())["error"]["code"] == "internal_error"
        running.hub.fail_with = None
        assert text_of(await client.response(input="ok")) == "ok"


async def test_the_33rd_lane_is_refused() -> None:
    """A connection takes 32 named lanes, and says so to the next."""
    async with fake_hub_server() as running, connect(running.socket_url) as client:
        for lane in range(32):
            await client.send("response.create", input="x", stream_id=f"lane-{lane}")
        for _ in range(32):
            await client.until("response.completed")
        await client.send("response.create", input="x", stream_id="one-more")
        error = await client.receive()
        assert error["error"]["code"] == "websocket_stream_limit_reached"
        assert error["stream_id"] == "one-more"
        assert text_of(await client.response(input="default")) == "default"


async def test_sixteen_run_and_the_rest_wait_up_to_a_bound() -> None:
    """Beyond the responses in flight creates wait; beyond the bound they are refused."""
    limits = SocketLimits(max_in_flight=2, max_queued=1, close_timeout_s=1.0)
    async with fake_hub_server(limits) as running, connect(running.socket_url) as client:
        running.hub.hold_after = 0
        for lane in "abcd":
            await client.send("response.create", input="x", stream_id=lane)
        frames = await client.until("error")
        assert frames[-1]["error"]["code"] == "rate_limit_exceeded"
        assert frames[-1]["stream_id"] == "d"
        assert len(running.hub.responses) == 2
        running.hub.go.set()
        for _ in range(3):
            await client.until("response.completed")
        assert len(running.hub.responses) == 3


async def test_resume_goes_on_after_the_number() -> None:
    """A resume answers `hillstar.resumed` first, then exactly the missed events, then live ones."""
    async with fake_hub_server() as running:
        async with connect(running.socket_url, JSON) as client:
            running.hub.hold_after = 3
            await client.send("response.create", input="hello")
            head = await client.until("response.output_text.delta")
        response_id = head[0]["response"]["id"]
        async with connect(running.socket_url, JSON) as client:
            await client.send(
                "hillstar.resume",
                response_id=response_id,
                starting_after=head[-1]["sequence_number"],
                stream_id="again",
            )
            resumed = await client.receive()
            assert resumed["type"] == "hillstar.resumed"
            assert resumed["recovered"] is True
            assert resumed["next_sequence_number"] == head[-1]["sequence_number"] + 1
            assert resumed["hillstar"] == {"r": 1}
            await client.send("hillstar.resume", response_id=response_id, stream_id="again")
            *missed, busy = await client.until("error")
            running.hub.go.set()
            tail = missed + await client.until("response.completed")
    assert (busy["status"], busy["error"]["code"]) == (409, "stream_busy")
    assert text_of(head + tail) == "hello"
    numbers = [frame["sequence_number"] for frame in head + tail]
    assert numbers == list(range(len(numbers)))
    assert {frame["stream_id"] for frame in tail} == {"again"}


async def test_resume_after_the_end_frees_the_lane() -> None:
    """A resume behind the terminal event is answered, and nothing more comes on that lane."""
    async with fake_hub_server() as running, connect(running.socket_url, JSON) as client:
        frames = await client.response(input="x")
        response_id = frames[0]["response"]["id"]
        last = frames[-1]["sequence_number"]
        for _ in range(2):
            await client.send("hillstar.resume", response_id=response_id, starting_after=last)
            assert (await client.receive())["type"] == "hillstar.resumed"
        assert text_of(await client.response(input="next")) == "next"


async def test_resume_of_an_unknown_response_frees_the_lane() -> None:
    """A resume that fails is an error on its lane, which is free again."""
    async with fake_hub_server() as running, connect(running.socket_url, JSON) as client:
        for _ in range(2):
            await client.send("hillstar.resume", response_id="resp_none", stream_id="a")
            error = await client.receive()
            assert (error["error"]["code"], error["stream_id"]) == ("response_not_found", "a")


async def test_a_response_that_is_lost_frees_its_lane() -> None:
    """A response that will have no terminal event ends in an error frame on its lane."""
    async with fake_hub_server() as running, connect(running.socket_url, JSON) as client:
        running.hub.hold_after = 1
        await client.send("response.create", input="abc", stream_id="a")
        while (await client.receive())["type"] != "response.output_text.delta":
            pass  # up to where the answer is held
        (response,) = running.hub.responses.values()
        response.lose()
        frame = await client.receive()
        assert (frame["type"], frame["stream_id"]) == ("error", "a")
        running.hub.go.set()
        assert (await client.response(input="d", stream_id="a"))[-1]["type"] == "response.completed"


async def test_cancel_answers_with_the_terminal_event_in_every_state() -> None:
    """A cancel of a running, an ended and a foreign-lane response gives its terminal event."""
    async with (
        fake_hub_server() as running,
        connect(running.socket_url, JSON) as client,
        connect(running.socket_url, JSON) as other,
    ):
        running.hub.hold_after = 1
        await client.send("response.create", input="hello", stream_id="a")
        head = await client.until("response.output_text.delta")
        response_id = head[0]["response"]["id"]
        await client.send("response.cancel", response_id=response_id)
        end = (await client.until("response.incomplete"))[-1]
        assert end["response"]["status"] == "cancelled"
        assert end["response"]["usage"]["output_tokens"] == 1
        assert end["stream_id"] == "a"
        for asker in (client, other):
            await asker.send("response.cancel", response_id=response_id)
            again = await asker.receive()
            assert again["type"] == "response.incomplete"
            assert again["sequence_number"] == end["sequence_number"]
        await client.send("response.cancel", response_id="resp_none")
        assert (await client.receive())["error"]["code"] == "response_not_found"


async def test_ack_and_hint_are_taken_without_an_answer() -> None:
    """Nothing comes back of `hillstar.ack` and `hillstar.hint`; the Hub is told of the hint."""
    async with fake_hub_server() as running, connect(running.socket_url, JSON) as client:
        running.hub.hold_after = 1
        await client.send("response.create", input="ab")
        head = await client.until("response.output_text.delta")
        response_id = head[0]["response"]["id"]
        await client.send("hillstar.ack", response_id=response_id, sequence_number=4)
        await client.send("hillstar.ack", response_id="resp_none", sequence_number=4)
        await client.send("hillstar.hint", hint="typing", previous_response_id=response_id)
        await client.send("response.cancel", response_id=response_id)
        rest = await client.until("response.incomplete")
        assert all(event["type"].startswith("response.") for event in rest)
        assert ("hint", "typing") in running.hub.calls


async def test_commands_beside_the_lanes_are_bounded() -> None:
    """Cancels that pile up are refused beyond a bound; each that was taken is answered."""
    limits = SocketLimits(max_queued=2, close_timeout_s=1.0)
    async with fake_hub_server(limits) as running, connect(running.socket_url, JSON) as client:
        running.hub.cancel_gate.clear()
        for _ in range(3):
            await client.send("response.cancel", response_id="resp_none", stream_id="a")
        assert (await client.receive())["error"]["code"] == "rate_limit_exceeded"
        running.hub.cancel_gate.set()
        for _ in range(2):
            assert (await client.receive())["error"]["code"] == "response_not_found"


@pytest.mark.parametrize(
    "frame",
    [
        {"type": "response.steer", "previous_response_id": "resp_x", "input": "more"},
        {"type": "hillstar.hibernate", "conversation": "conv_x"},
        {"type": "hillstar.wake", "conversation": "conv_x"},
    ],
)
async def test_what_is_not_there_yet_says_so(frame: dict[str, Any]) -> None:
    """A documented event without an implementation answers `unsupported_event`."""
    async with fake_hub_server() as running, connect(running.socket_url, JSON) as client:
        await client.send(**{"kind": frame.pop("type"), **frame})
        assert (await client.receive())["error"]["code"] == "unsupported_event"


async def test_a_subscription_tells_the_session() -> None:
    """`include: ["hillstar.session"]` answers with the conversation's state."""
    async with fake_hub_server() as running, connect(running.socket_url, JSON) as client:
        frames = await client.response(input="x", include=["hillstar.session"])
        session = next(frame for frame in frames if frame["type"] == "hillstar.session")
        assert session["state"] == "awake"
        assert session["conversation"] == frames[0]["response"]["conversation"]["id"]


async def test_a_tenants_rate_is_limited_on_its_lane() -> None:
    """Creates beyond the tenant's rate answer 429 on their lane."""
    async with (
        fake_hub_server(max_creates_per_minute=1) as running,
        connect(running.socket_url) as client,
    ):
        await client.response(input="x")
        await client.send("response.create", input="x", stream_id="a")
        error = await client.receive()
    assert (error["status"], error["stream_id"]) == (429, "a")
