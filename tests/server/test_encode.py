"""Frames: what each protocol sees of an event, and merging that no client can tell."""

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hillstar.server.encode import (
    encode,
    encode_delta,
    encode_error,
    encode_sse,
    encode_sse_delta,
    encode_sse_error,
    merge,
)
from hillstar.server.errors import invalid
from hillstar.server.events import Event, Notice, Part, TextDelta
from hillstar.server.wire import Protocol

PART = Part("msg_1", 0, 0)
DELTA = TextDelta(7, PART, "é", 3, 2)
LOGPROB = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}
OPENAI_DELTA = {
    "type": "response.output_text.delta",
    "sequence_number": 7,
    "item_id": "msg_1",
    "output_index": 0,
    "content_index": 0,
    "delta": "é",
    "logprobs": [],
}
CREATED = Event("response.created", 0, {"response": {"id": "resp_1"}})


def decoded(payload: bytes, protocol: Protocol = Protocol.JSON) -> Any:
    is_msgpack = protocol is Protocol.MSGPACK
    return msgspec.msgpack.decode(payload) if is_msgpack else json.loads(payload)


def delta_map(delta: TextDelta, protocol: Protocol, stream_id: str | None = None) -> Any:
    return decoded(encode_delta(delta, protocol, stream_id, 9), protocol)


def test_openai_sees_openai_fields() -> None:
    """OpenAI's protocol carries nothing of ours, and the lane only if it has a name."""
    assert delta_map(DELTA, Protocol.OPENAI) == OPENAI_DELTA
    assert delta_map(DELTA, Protocol.OPENAI, "a") == {**OPENAI_DELTA, "stream_id": "a"}
    assert "hillstar" not in decoded(encode(CREATED, Protocol.OPENAI, r=1))


def test_json_adds_the_cover() -> None:
    """Our JSON protocol adds the tokens that a delta covers."""
    expected = {**OPENAI_DELTA, "first_token": 3, "num_tokens": 2, "stream_id": "a"}
    assert delta_map(DELTA, Protocol.JSON, "a") == expected


def test_msgpack_delta_is_an_array() -> None:
    """The hot event is PROTOCOL's array; with logprobs a map."""
    assert delta_map(DELTA, Protocol.MSGPACK, "a") == [1, 9, 7, 0, 0, "é", 3, 2]
    with_logprobs = msgspec.structs.replace(DELTA, logprobs=(LOGPROB,))
    expected = {**OPENAI_DELTA, "first_token": 3, "num_tokens": 2, "logprobs": [LOGPROB]}
    assert delta_map(with_logprobs, Protocol.MSGPACK) == expected
    assert delta_map(with_logprobs, Protocol.JSON) == expected


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_survives(text: str) -> None:
    """Quotes, control characters and everything else of Unicode come out as they went in."""
    delta = msgspec.structs.replace(DELTA, delta=text)
    for protocol in (Protocol.OPENAI, Protocol.JSON):
        assert delta_map(delta, protocol)["delta"] == text
    assert delta_map(delta, Protocol.MSGPACK)[5] == text


@pytest.mark.parametrize("protocol", [Protocol.JSON, Protocol.MSGPACK])
def test_created_tells_the_number_of_the_response(protocol: Protocol) -> None:
    """`r` is in response.created and hillstar.resumed, and in no other map."""
    assert decoded(encode(CREATED, protocol, r=4), protocol)["hillstar"] == {"r": 4}
    resumed = Notice("hillstar.resumed", {"response_id": "resp_1"})
    assert decoded(encode(resumed, protocol, r=4), protocol)["hillstar"] == {"r": 4}
    other = Event("response.in_progress", 1, {"response": {}})
    assert "hillstar" not in decoded(encode(other, protocol, r=4), protocol)


@pytest.mark.parametrize("protocol", list(Protocol))
def test_events_keep_their_fields(protocol: Protocol) -> None:
    """Type, number, body and lane travel; encoding leaves the event as it was."""
    body = {"output_index": 0, "item": None}
    event = Event("response.output_item.added", 2, body)
    frame = decoded(encode(event, protocol, stream_id="a"), protocol)
    assert frame == {"type": event.type, "sequence_number": 2, **body, "stream_id": "a"}
    assert body == {"output_index": 0, "item": None}


def test_error_frames() -> None:
    """An error frame has the status, the error object, and the lane if there is one."""
    error = invalid("Bad.", "input")
    frame = decoded(encode_error(error, Protocol.OPENAI, stream_id="a"))
    assert frame == {"type": "error", "status": 400, "error": error.body(), "stream_id": "a"}
    assert "stream_id" not in decoded(encode_error(error, Protocol.MSGPACK), Protocol.MSGPACK)


def test_server_sent_events() -> None:
    """SSE names the event and carries OpenAI's JSON on one line."""
    frame = encode_sse_delta(DELTA)
    head, data, *rest = frame.decode().split("\n")
    assert head == "event: response.output_text.delta"
    assert json.loads(data.removeprefix("data: ")) == OPENAI_DELTA
    assert rest == ["", ""]
    assert encode_sse(CREATED).startswith(b"event: response.created\ndata: {")
    error = json.loads(encode_sse_error(invalid("Bad."), 3).split(b"data: ")[1])
    assert (error["type"], error["sequence_number"], error["message"]) == ("error", 3, "Bad.")


@given(
    parts=st.lists(st.tuples(st.text(max_size=3), st.integers(0, 3), st.booleans()), min_size=1),
    data=st.data(),
)
def test_merging_keeps_text_cover_and_number(
    parts: list[tuple[str, int, bool]], data: st.DataObject
) -> None:
    """Merging any neighbours keeps the joined text, a contiguous cover and the last numbers."""
    deltas: list[TextDelta] = []
    token = 0
    for number, (text, num_tokens, has_logprob) in enumerate(parts):
        logprobs = (LOGPROB,) if has_logprob else ()
        deltas.append(TextDelta(number, PART, text, token, num_tokens, logprobs))
        token += num_tokens
    text = "".join(delta.delta for delta in deltas)
    num_logprobs = sum(len(delta.logprobs) for delta in deltas)
    while len(deltas) > 1 and data.draw(st.booleans()):
        i = data.draw(st.integers(0, len(deltas) - 2))
        merged = merge(deltas[i], deltas[i + 1])
        assert merged is not None
        assert merged.sequence_number == deltas[i + 1].sequence_number
        deltas[i : i + 2] = [merged]
    assert "".join(delta.delta for delta in deltas) == text
    assert sum(len(delta.logprobs) for delta in deltas) == num_logprobs
    assert deltas[0].first_token == 0
    for before, after in itertools.pairwise(deltas):
        assert after.first_token == before.first_token + before.num_tokens
    assert deltas[-1].first_token + deltas[-1].num_tokens == token
    assert deltas[-1].sequence_number == len(parts) - 1


@pytest.mark.parametrize(
    "other",
    [
        msgspec.structs.replace(DELTA, sequence_number=8),
        msgspec.structs.replace(DELTA, sequence_number=8, first_token=6),
        msgspec.structs.replace(DELTA, sequence_number=8, first_token=5, part=Part("msg_2", 0, 0)),
        msgspec.structs.replace(DELTA, sequence_number=6, first_token=5),
    ],
)
def test_only_neighbours_merge(other: TextDelta) -> None:
    """Deltas with a gap, an overlap, another item or the wrong order do not merge."""
    assert merge(DELTA, other) is None
