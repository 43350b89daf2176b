"""The client's codec reads what the server's encoder writes, and nothing that is no event."""

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hillstar.clients.codec import DELTA, Codec, Encoding
from hillstar.clients.errors import ProtocolError
from hillstar.server.encode import encode, encode_delta
from hillstar.server.events import Notice, Part, TextDelta
from hillstar.server.validate import decode_json, decode_msgpack
from hillstar.server.wire import Protocol

PROTOCOLS: dict[Encoding, Protocol] = {"json": Protocol.JSON, "msgpack": Protocol.MSGPACK}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)  # no lone surrogates
NAMES = TEXT.filter(lambda name: name != "type")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 53), 1 << 53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def received(payload: bytes, encoding: Encoding) -> str | bytes:
    """What a socket hands over: text frames as text."""
    return payload if encoding == "msgpack" else payload.decode()


@pytest.mark.parametrize("encoding", PROTOCOLS)
@given(fields=st.dictionaries(NAMES, VALUES, max_size=4))
def test_maps_pass_both_ways(encoding: Encoding, fields: dict[str, Any]) -> None:
    """The server decodes what a client sends, and a client what the server sends, unchanged."""
    codec = Codec(encoding)
    message = fields | {"type": "hillstar.test"}
    frame = codec.encode(message)
    decoded = decode_json(frame) if isinstance(frame, str) else decode_msgpack(frame)
    assert decoded == message
    notice = encode(Notice("hillstar.test", fields), PROTOCOLS[encoding])
    assert codec.decode(received(notice, encoding)) == message


@pytest.mark.parametrize("encoding", PROTOCOLS)
def test_a_delta_is_the_same_map_under_both(encoding: Encoding) -> None:
    """The array of the hot event becomes a map, with `r` in the place of a lane."""
    delta = TextDelta(7, Part("msg_1", 0, 0), "hé", 3, 2)
    payload = encode_delta(delta, PROTOCOLS[encoding], stream_id="a", r=5)
    decoded = Codec(encoding).decode(received(payload, encoding))
    expected = {"type": DELTA, "sequence_number": 7, "delta": "hé", "first_token": 3}
    assert expected.items() <= decoded.items() and decoded["num_tokens"] == 2
    assert decoded.get("r") == (5 if encoding == "msgpack" else None)


@pytest.mark.parametrize(
    "frame",
    [
        "",
        "{",
        "[1, 2]",
        '{"type": 1}',
        "null",
        b"",
        b"\xc1",
        b"\x81",
        b"\xa1\xff",
        msgpack.packb({"type": "a"}) + b"\0",
        msgpack.packb({1: 2, "type": "a"}),
        msgpack.packb([1, 2]),
        msgpack.packb([2, 0, 0, 0, 0, "", 0, 0]),
        msgpack.packb({"kind": "a"}),
        b"\x91" * 2000,
    ],
)
def test_what_is_no_event_breaks_the_protocol(frame: str | bytes) -> None:
    """Anything but one whole event is a ProtocolError, whatever the library says of it."""
    with pytest.raises(ProtocolError):
        Codec("msgpack").decode(frame)


def test_an_unknown_encoding_is_refused_by_name() -> None:
    """There are two encodings."""
    with pytest.raises(ValueError, match="'cbor'"):
        Codec("cbor")  # type: ignore[arg-type]
