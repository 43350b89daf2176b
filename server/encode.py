"""Events to what a frame carries: UTF-8 JSON, or msgpack.

What only Hillstar's protocols carry (`first_token`, `num_tokens`, `hillstar: {"r"}`) is left out
for OpenAI's. `stream_id` is there exactly when the lane has a name.

There is a delta for every token, so deltas are written field by field, from parts that are encoded
already where a whole response shares them (`events.Part`).
"""

from typing import Any

import msgspec

from hillstar.server.errors import ApiError
from hillstar.server.events import Event, Notice, TextDelta
from hillstar.server.wire import Protocol

_HOT_DELTA = 1  # the first element of the msgpack array form
_NUMBERED = ("response.created", "hillstar.resumed")  # the events that tell a response's `r`

_to_json = msgspec.json.Encoder().encode
_to_msgpack = msgspec.msgpack.Encoder().encode
_JSON, _MSGPACK = Protocol.JSON, Protocol.MSGPACK  # looking a member up takes as long as encoding


def encode(
    event: Event | Notice, protocol: Protocol, *, stream_id: str | None = None, r: int | None = None
) -> bytes:
    """Anything but a delta. `r` is the number this socket gave the response; it goes into
    `response.created` and `hillstar.resumed` as `hillstar: {"r": r}`."""
    frame = _as_map(event)
    if r is not None and protocol.is_hillstar and event.type in _NUMBERED:
        frame["hillstar"] = {"r": r}
    return _with_lane(frame, protocol, stream_id)


def encode_delta(delta: TextDelta, protocol: Protocol, stream_id: str | None, r: int) -> bytes:
    """A delta: in msgpack the array `[1, r, sequence_number, output_index, content_index, delta,
    first_token, num_tokens]`, or a map where there are logprobs; in JSON always a map."""
    if protocol is not _MSGPACK:
        return _json_delta(delta, with_cover=protocol is _JSON, stream_id=stream_id)
    part = delta.part
    number, first, count = delta.sequence_number, delta.first_token, delta.num_tokens
    output_index, content_index = part.output_index, part.content_index
    if not delta.logprobs:
        return _to_msgpack(
            (_HOT_DELTA, r, number, output_index, content_index, delta.delta, first, count)
        )
    frame = {
        "type": "response.output_text.delta",
        "sequence_number": number,
        "item_id": part.item_id,
        "output_index": output_index,
        "content_index": content_index,
        "delta": delta.delta,
        "logprobs": delta.logprobs,
        "first_token": first,
        "num_tokens": count,
    }
    return _with_lane(frame, protocol, stream_id)


def encode_error(error: ApiError, protocol: Protocol, *, stream_id: str | None = None) -> bytes:
    """The error frame `{"type":"error","status",…,"error":{…}}`."""
    frame = {"type": "error", "status": error.status, "error": error.body()}
    return _with_lane(frame, protocol, stream_id)


def encode_sse(event: Event) -> bytes:
    """One server-sent event (`event:` and `data:` lines), OpenAI's fields only."""
    return b"event: %s\ndata: %s\n\n" % (event.type.encode(), _to_json(_as_map(event)))


def encode_sse_delta(delta: TextDelta) -> bytes:
    """The same for a delta."""
    return b"event: response.output_text.delta\ndata: %b\n\n" % _json_delta(delta)


def encode_sse_error(error: ApiError, sequence_number: int) -> bytes:
    """The `error` event of an SSE stream that cannot end with a terminal event."""
    fields = error.body()
    data = {
        "type": "error",
        "sequence_number": sequence_number,
        "code": fields["code"],
        "message": fields["message"],
        "param": fields["param"],
        "error": fields,
    }
    return b"event: error\ndata: " + _to_json(data) + b"\n\n"


def merge(first: TextDelta, second: TextDelta) -> TextDelta | None:
    """Both as one delta, with the second's sequence number; None unless they are adjacent.

    Adjacent: the same item and part, and the second's tokens begin where the first's end.
    """
    if (
        first.part != second.part
        or first.first_token + first.num_tokens != second.first_token
        or first.sequence_number >= second.sequence_number
    ):
        return None
    return TextDelta(
        second.sequence_number,
        first.part,
        first.delta + second.delta,
        first.first_token,
        first.num_tokens + second.num_tokens,
        [*first.logprobs, *second.logprobs] if first.logprobs or second.logprobs else (),
    )


def _json_delta(
    delta: TextDelta, *, with_cover: bool = False, stream_id: str | None = None
) -> bytes:
    cover = lane = b""
    if with_cover:
        cover = b',"first_token":%d,"num_tokens":%d' % (delta.first_token, delta.num_tokens)
    if stream_id is not None:
        lane = b',"stream_id":%b' % _to_json(stream_id)
    return b'{"type":"response.output_text.delta","sequence_number":%d%b,"delta":%b%b%b%b}' % (
        delta.sequence_number,
        delta.part.json_fields,
        _to_json(delta.delta),
        b',"logprobs":%b' % _to_json(delta.logprobs) if delta.logprobs else b',"logprobs":[]',
        cover,
        lane,
    )


def _as_map(event: Event | Notice) -> dict[str, Any]:
    if isinstance(event, Event):
        return {"type": event.type, "sequence_number": event.sequence_number, **event.body}
    return {"type": event.type, **event.body}


def _with_lane(frame: dict[str, Any], protocol: Protocol, stream_id: str | None) -> bytes:
    if stream_id is not None:
        frame["stream_id"] = stream_id
    return _to_msgpack(frame) if protocol is _MSGPACK else _to_json(frame)
