"""Frames of very many values are refused unseen; long texts are not."""

import json
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hillstar.server import flood
from hillstar.server.errors import ApiError
from hillstar.server.flood import MAX_VALUES, refuse_json_flood, refuse_msgpack_flood
from hillstar.server.items import MAX_PARTS
from hillstar.server.wire import CreateEvent, Protocol, parse_client_frame

MANY = MAX_VALUES + 2
LONG = 'a, \\ " [{ é' * 100_000


@pytest.mark.parametrize(
    "text",
    [
        "[" + "0," * MANY + "0]",
        "[" + "[]," * MANY + "0]",
        "[" * MANY,
        "[" + '"",' * MANY + "0]",
        "{" + '"a":{},' * MANY + '"a":0}',
        '["\\\\",' + "0," * MANY + "0]",
    ],
)
def test_json_floods(text: str) -> None:
    """Too many JSON values of any kind are refused, as str and as bytes."""
    for data in (text, text.encode()):
        with pytest.raises(ApiError, match="too many values"):
            refuse_json_flood(data)


@pytest.mark.parametrize("number", ["1" * 101, "-0." + "3" * 101, "1e" + "0" * 101])
def test_numbers_without_end(number: str) -> None:
    """A number that would cost the decoder its square in time is refused, in a large frame."""
    text = f'{{"a":[0,{number}],"b":"{"x" * (1 << 17)}"}}'
    for data in (text, text.encode()):
        with pytest.raises(ApiError, match="more than 100 digits"):
            refuse_json_flood(data)
    refuse_json_flood(text.replace(number, f'"{number}"'))
    refuse_json_flood(text.replace(number, "1" * 100))


JSON = st.recursive(
    st.integers() | st.text('ab"\\,[{é', max_size=20),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text('k"\\,'), inner, max_size=5)
    ),
)


@given(value=JSON, piece=st.integers(2, 40), as_ascii=st.booleans())
def test_json_is_counted_alike_however_it_is_cut(value: Any, piece: int, as_ascii: bool) -> None:
    """Looked through in pieces of any size, what is outside of strings is what is outside."""
    text = json.dumps(value, ensure_ascii=as_ascii)
    with mock.patch.object(flood, "_PIECE", piece):
        for data in (text, text.encode()):
            outside = b"".join(flood._outside_strings(data))
            assert sum(map(outside.count, (b"[", b"{", b","))) == marks(value)


def marks(value: Any) -> int:
    """How many of `[ { ,` a JSON value is written with, outside of strings."""
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return max(1, len(value)) + sum(map(marks, inner))


@pytest.mark.parametrize(
    "value", [0, [], {}, "", b"", 1.5, -300, 1 << 40, "x" * 40, [[1]], "y" * 300]
)
def test_msgpack_floods(value: Any) -> None:
    """Too many msgpack values of any kind are refused."""
    with pytest.raises(ApiError, match="too many values"):
        refuse_msgpack_flood(msgspec.msgpack.encode([value] * 2 * MANY))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=400)
    | st.binary(max_size=400)
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=40)),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20),
)


@given(value=VALUES, tail=st.sampled_from([0, 2 * MANY]))
def test_msgpack_values_are_skipped_exactly(value: Any, tail: int) -> None:
    """Whatever comes first, the counter finds the flood after it, and only then."""
    data = msgspec.msgpack.encode([LONG, value, [0] * tail])
    if tail:
        with pytest.raises(ApiError):
            refuse_msgpack_flood(data)
    else:
        refuse_msgpack_flood(data)


@pytest.mark.parametrize("text", [LONG, '"' * 300_000, "\\" * 300_001, "," * 1_000_000])
def test_long_texts_pass(text: str) -> None:
    """A text is one value, whatever characters it is made of."""
    frame = {"type": "response.create", "input": text}
    for data, protocol in (
        (json.dumps(frame), Protocol.JSON),
        (json.dumps(frame, ensure_ascii=False).encode(), Protocol.JSON),
        (msgspec.msgpack.encode(frame), Protocol.MSGPACK),
    ):
        event = parse_client_frame(data, protocol)
        assert isinstance(event, CreateEvent)
        assert event.request.input[0].text == text


def test_the_largest_input_passes() -> None:
    """As many parts as an input may have are no flood, each with all that may come with it."""
    content = {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
    part = {"type": "message", "id": "i", "status": "completed", "role": "assistant"}
    part |= {"content": [content]}
    frame = {"type": "response.create", "input": [part] * MAX_PARTS}
    for data, protocol in (
        (json.dumps(frame), Protocol.JSON),
        (msgspec.msgpack.encode(frame), Protocol.MSGPACK),
    ):
        event = parse_client_frame(data, protocol)
        assert isinstance(event, CreateEvent)
        assert len(event.request.input) == MAX_PARTS


@given(data=st.binary(max_size=200))
def test_any_bytes_are_counted(data: bytes) -> None:
    """The counters raise ApiError and nothing else, and always end."""
    for refuse in (refuse_json_flood, refuse_msgpack_flood):
        try:
            refuse(data * 4096)
        except ApiError as error:
            assert error.code == "too_large"
