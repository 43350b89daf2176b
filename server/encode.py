"""Events to frames. JSON in text frames (`str`), msgpack in binary ones (`bytes`).

What only Hillstar's protocols carry (`first_token`, `num_tokens`, `hillstar: {"r"}`) is left out
for OpenAI's. `stream_id` is there exactly when the lane has a name.
"""

from hillstar.server.errors import ApiError
from hillstar.server.events import Event, Notice, TextDelta
from hillstar.server.wire import Protocol


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
    raise NotImplementedError


def encode_error(
    error: ApiError, protocol: Protocol, *, stream_id: str | None = None
) -> str | bytes:
    """The error frame `{"type":"error","status",…,"error":{…}}`."""
    raise NotImplementedError


def encode_sse(event: Event | TextDelta) -> bytes:
    """One server-sent event (`event:` and `data:` lines), OpenAI's fields only."""
    raise NotImplementedError


def encode_sse_error(error: ApiError, sequence_number: int) -> bytes:
    """The `error` event of an SSE stream that cannot end with a terminal event."""
    raise NotImplementedError


def merge(first: TextDelta, second: TextDelta) -> TextDelta | None:
    """Both as one delta, with the second's sequence number; None unless they are adjacent.

    Adjacent: the same item and part, and the second's tokens begin where the first's end.
    """
    raise NotImplementedError
