"""Events to frames. JSON in text frames (`str`), msgpack in binary ones (`bytes`).

What only Hillstar's protocols carry (`first_token`, `num_tokens`, `hillstar: {"r"}`) is left out
for OpenAI's. `stream_id` is there exactly when the lane has a name.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from hillstar.server.errors import ApiError
from hillstar.server.events import Event, Notice, TextDelta
from hillstar.server.wire import Protocol


class _AnyDelta(
    msgspec.Struct,
    tag_field="type",
    tag="response.output_text.delta",
    omit_defaults=True,
    gc=False,
):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: Sequence[dict[str, Any]]


class _Delta(_AnyDelta):
    """A delta as OpenAI writes it."""

    stream_id: str | None = None


class _CoveredDelta(_AnyDelta):
    """A delta with the tokens it covers."""

    first_token: int
    num_tokens: int
    stream_id: str | None = None


_HOT_DELTA = 1  # the first element of the msgpack array form
_NUMBERED = ("response.created", "hillstar.resumed")  # the events that tell a response's `r`

_to_json = msgspec.json.Encoder().encode
_to_msgpack = msgspec.msgpack.Encoder().encode


def encode(
    event: Event | TextDelta | Notice,
    protocol: Protocol,
    *,
    stream_id: str | None = None,
    r: int | None = None,
) -> str | bytes:
    """One frame. `r` is the number this socket gave the response.

    It goes into `response.created` and `hillstar.resumed` as `hillstar: {"r": r}`, and heads the
    msgpack form of a delta, `[1, r, sequence_number, output_index, content_index, delta,
    first_token, num_tokens]`. A delta with logprobs, or without `r`, stays a map.
    """
    if not isinstance(event, TextDelta):
        frame = _as_map(event)
        if r is not None and protocol.is_hillstar and event.type in _NUMBERED:
            frame["hillstar"] = {"r": r}
        return _frame(frame, protocol, stream_id)
    if protocol is Protocol.MSGPACK and r is not None and not event.logprobs:
        return _to_msgpack(
            (
                _HOT_DELTA,
                r,
                event.sequence_number,
                event.output_index,
                event.content_index,
                event.delta,
                event.first_token,
                event.num_tokens,
            )
        )
    if protocol is Protocol.OPENAI:
        return _to_json(_openai_delta(event, stream_id)).decode()
    delta = _CoveredDelta(
        event.sequence_number,
        event.item_id,
        event.output_index,
        event.content_index,
        event.delta,
        event.logprobs,
        event.first_token,
        event.num_tokens,
        stream_id,
    )
    return _to_json(delta).decode() if protocol is Protocol.JSON else _to_msgpack(delta)


def encode_error(
    error: ApiError, protocol: Protocol, *, stream_id: str | None = None
) -> str | bytes:
    """The error frame `{"type":"error","status",…,"error":{…}}`."""
    frame = {"type": "error", "status": error.status, "error": error.body()}
    return _frame(frame, protocol, stream_id)


def encode_sse(event: Event | TextDelta) -> bytes:
    """One server-sent event (`event:` and `data:` lines), OpenAI's fields only."""
    if isinstance(event, TextDelta):
        data = _to_json(_openai_delta(event, None))
        return b"event: response.output_text.delta\ndata: " + data + b"\n\n"
    return b"event: %s\ndata: %s\n\n" % (event.type.encode(), _to_json(_as_map(event)))


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
        first.item_id != second.item_id
        or first.output_index != second.output_index
        or first.content_index != second.content_index
        or first.first_token + first.num_tokens != second.first_token
        or first.sequence_number >= second.sequence_number
    ):
        return None
    return TextDelta(
        second.sequence_number,
        first.item_id,
        first.output_index,
        first.content_index,
        first.delta + second.delta,
        first.first_token,
        first.num_tokens + second.num_tokens,
        [*first.logprobs, *second.logprobs] if first.logprobs or second.logprobs else (),
    )


def _openai_delta(event: TextDelta, stream_id: str | None) -> _Delta:
    return _Delta(
        event.sequence_number,
        event.item_id,
        event.output_index,
        event.content_index,
        event.delta,
        event.logprobs,
        stream_id,
    )


def _as_map(event: Event | Notice) -> dict[str, Any]:
    if isinstance(event, Event):
        return {"type": event.type, "sequence_number": event.sequence_number, **event.body}
    return {"type": event.type, **event.body}


def _frame(frame: dict[str, Any], protocol: Protocol, stream_id: str | None) -> str | bytes:
    if stream_id is not None:
        frame["stream_id"] = stream_id
    return _to_msgpack(frame) if protocol is Protocol.MSGPACK else _to_json(frame).decode()
