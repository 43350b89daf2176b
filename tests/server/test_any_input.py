"""Whatever arrives, it is a value or a typed error, and nothing else happens."""

import json
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from hillstar.server.errors import ApiError
from hillstar.server.request import CreateResponse, parse_create
from hillstar.server.validate import decode_object
from hillstar.server.wire import (
    FrameError,
    Protocol,
    parse_client_frame,
)

NAMES = st.sampled_from([*CreateResponse.__struct_fields__, "text", "tools", "reasoning", "type"])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(NAMES | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(body=st.dictionaries(NAMES | st.text(max_size=5), JSON_VALUES, max_size=6) | JSON_VALUES)
@example(body={"input": "\ud800"})
@example(body={"hillstar": {"`$.a`\n": 1}})
@example(body={5: 6})
def test_any_body_is_a_request_or_a_typed_error(body: object) -> None:
    """parse_create raises ApiError and nothing else, whatever the body."""
    for surface in ("http", "socket", "hillstar"):
        try:
            request = parse_create(body, surface=surface)
        except ApiError as error:
            json.dumps(error.body()).encode()
        else:
            assert isinstance(request, CreateResponse)


KINDS = st.sampled_from(
    [
        "response.create",
        "response.cancel",
        "response.steer",
        "hillstar.resume",
        "hillstar.ack",
        "hillstar.hint",
        "hillstar.hibernate",
        "hillstar.wake",
    ]
)
FIELDS = st.sampled_from(
    [
        "response_id",
        "starting_after",
        "stream_id",
        "sequence_number",
        "conversation",
        "hint",
        "input",
    ]
)


@given(
    kind=KINDS, fields=st.dictionaries(FIELDS | NAMES, JSON_VALUES, max_size=5), data=st.binary()
)
def test_any_frame_is_an_event_or_a_typed_error(
    kind: str, fields: dict[str, Any], data: bytes
) -> None:
    """parse_client_frame raises FrameError and nothing else, whatever the bytes."""
    frame = {"type": kind, **fields}
    packed = msgspec.msgpack.encode(frame) if _is_packable(frame) else data
    for given_data, protocol in (
        (data, Protocol.JSON),
        (data, Protocol.MSGPACK),
        (packed, Protocol.MSGPACK),
        (packed[:-1], Protocol.MSGPACK),
        (json.dumps(frame, default=str), Protocol.JSON),
    ):
        try:
            parse_client_frame(given_data, protocol)
        except FrameError as error:
            assert error.status == 400


def _is_packable(frame: object) -> bool:
    try:
        msgspec.msgpack.encode(frame)
    except (OverflowError, UnicodeEncodeError):
        return False
    return True


@given(data=st.binary() | st.text())
def test_any_http_body_decodes_or_is_a_typed_error(data: str | bytes) -> None:
    """decode_object raises ApiError and nothing else."""
    try:
        assert isinstance(decode_object(data), dict)
    except ApiError as error:
        assert error.status == 400
