"""Frames of a socket: what is accepted, and what is refused and how."""

import json
from typing import Any

import msgspec
import pytest

from hillstar.server.items import Message
from hillstar.server.request import parse_create
from hillstar.server.wire import (
    AckEvent,
    CancelEvent,
    CreateEvent,
    FrameError,
    HibernateEvent,
    HintEvent,
    Protocol,
    ResumeEvent,
    SteerEvent,
    WakeEvent,
    parse_client_frame,
)


def frame_error(data: str | bytes, protocol: Protocol = Protocol.JSON) -> FrameError:
    with pytest.raises(FrameError) as caught:
        parse_client_frame(data, protocol)
    return caught.value


@pytest.mark.parametrize(
    ("frame", "event"),
    [
        ({"type": "response.cancel", "response_id": "r"}, CancelEvent("r")),
        (
            {"type": "hillstar.resume", "response_id": "r", "starting_after": 4, "stream_id": "a"},
            ResumeEvent("r", 4, "a"),
        ),
        (
            {"type": "hillstar.resume", "response_id": "r", "starting_after": None},
            ResumeEvent("r"),
        ),
        (
            {"type": "hillstar.ack", "response_id": "r", "sequence_number": 9},
            AckEvent("r", 9),
        ),
        (
            {"type": "hillstar.hint", "conversation": "c", "hint": "typing"},
            HintEvent("typing", "c"),
        ),
        ({"type": "hillstar.hibernate", "conversation": "c"}, HibernateEvent("c")),
        ({"type": "hillstar.wake", "conversation": "c"}, WakeEvent("c")),
        (
            {"type": "response.steer", "previous_response_id": "r", "input": "go"},
            SteerEvent("r", (Message("user", ("go",)),)),
        ),
    ],
)
def test_client_events(frame: dict[str, Any], event: object) -> None:
    """Each client event parses to its value, the same from JSON text and from msgpack."""
    assert parse_client_frame(json.dumps(frame), Protocol.JSON) == event
    assert parse_client_frame(msgspec.msgpack.encode(frame), Protocol.MSGPACK) == event


def test_create_event_carries_its_lane() -> None:
    """`response.create` is the HTTP body, flat, with a lane beside it."""
    frame = {"type": "response.create", "stream_id": "a.b-c_1", "input": "hi"}
    event = parse_client_frame(json.dumps(frame), Protocol.OPENAI)
    assert event == CreateEvent("a.b-c_1", parse_create({"input": "hi"}, surface="socket"))


def test_our_events_need_our_subprotocol() -> None:
    """On OpenAI's socket nothing but OpenAI's events exists."""
    frame = json.dumps({"type": "hillstar.wake", "conversation": "c", "stream_id": "a"})
    error = frame_error(frame, Protocol.OPENAI)
    assert (error.code, error.param, error.stream_id) == ("unknown_event", "type", "a")


@pytest.mark.parametrize("lane", ["", "a b", "é", "x" * 257, 5, ["a"], "a\n"])
def test_bad_lanes(lane: object) -> None:
    """A lane is 1 to 256 of A-Z a-z 0-9 _ . - and an error about it goes to no lane."""
    frame = {"type": "response.create", "input": "hi", "stream_id": lane}
    error = frame_error(json.dumps(frame))
    assert (error.code, error.param, error.stream_id) == ("invalid_stream_id", "stream_id", None)


def test_errors_carry_the_lane() -> None:
    """An error in a frame whose lane could be read names that lane."""
    frame = {"type": "response.create", "stream_id": "a", "temperature": 9, "input": "x"}
    error = frame_error(json.dumps(frame))
    assert (error.param, error.stream_id) == ("temperature", "a")


@pytest.mark.parametrize(
    "data",
    [
        "",
        "{",
        "[]",
        "null",
        "5",
        "{} {}",
        '{"type": NaN}',
        '{"type": 1e999}',
        '{"type": "\\ud800"}',
        '{"type": "\\ud800\\u0041"}',
        '{"type": "\\udc00"}',
        '{"type": null}',
        '{"type": []}',
        "[" * 200_000,
        '{"a":' * 200_000,
        b"\xff\xfe",
        "9" * 10_000,
    ],
)
def test_malformed_json(data: str | bytes) -> None:
    """Whatever is not a frame is refused as a typed 400."""
    assert frame_error(data).status == 400


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x81\x90\x01",
        b"\x91" * 200_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xa3\xed\xa0\x80",
        b"\x81\xa4type\xd6\xff\x00\x00\x00\x01",
        b"\x82\x01\x02\xa4type\xafresponse.create",
    ],
)
def test_malformed_msgpack(data: bytes) -> None:
    """The same of msgpack: lying lengths, unhashable keys, timestamps, keys that are no strings."""
    assert frame_error(data, Protocol.MSGPACK).status == 400


def test_msgpack_sockets_take_binary_frames_only() -> None:
    """A text frame on a msgpack socket is refused."""
    assert frame_error("{}", Protocol.MSGPACK).code == "invalid_msgpack"
