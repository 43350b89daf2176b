"""Frames to maps and back, one codec for each subprotocol.

Under msgpack the hot event travels as an array; here it becomes the same map as any other event,
with `r` in the place of a lane.
"""

from collections.abc import Mapping
from typing import Any, Literal, cast

import msgpack
import msgspec

from hillstar.clients.errors import ProtocolError

Encoding = Literal["msgpack", "json"]

DELTA = "response.output_text.delta"
_DELTA_TAG = 1
_DELTA_FIELDS = (
    "r",
    "sequence_number",
    "output_index",
    "content_index",
    "delta",
    "first_token",
    "num_tokens",
)


class Codec:
    """Translates between maps and the frames of `hillstar.v1.msgpack` or `hillstar.v1.json`."""

    def __init__(self, encoding: Encoding) -> None:
        if encoding not in ("msgpack", "json"):
            raise ValueError(f"{encoding=} must be 'msgpack' or 'json'")
        self.encoding = encoding
        self.subprotocol = f"hillstar.v1.{encoding}"

    def encode(self, message: Mapping[str, Any]) -> str | bytes:
        """The frame of `message`: text for JSON, binary for msgpack."""
        if self.encoding == "json":
            return msgspec.json.encode(message).decode()
        return cast(bytes, msgpack.packb(message))

    def decode(self, frame: str | bytes) -> Mapping[str, Any]:
        """The event in a frame, as a map with `type`. Raises ProtocolError."""
        try:
            if isinstance(frame, str):
                message = msgspec.json.decode(frame)
            else:
                message = msgpack.unpackb(frame)
        except (msgspec.DecodeError, ValueError) as error:
            raise ProtocolError(f"a frame cannot be decoded: {error}") from None
        if isinstance(message, list):
            if len(message) != len(_DELTA_FIELDS) + 1 or message[0] != _DELTA_TAG:
                raise ProtocolError(f"an array frame of an unknown kind: {message[:2]!r}")
            return {"type": DELTA, **dict(zip(_DELTA_FIELDS, message[1:], strict=True))}
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            raise ProtocolError("a frame is no event: it has no `type`")
        return message
