"""How messages between server and engine become bytes: used by both ends of the socket.

A frame is a 4-byte big-endian length and that many bytes of msgpack. The server's first frame
is the engine's configuration (`encode_config`); every later one is a `ToEngine`. The engine
answers with `FromEngine` frames only. A frame of no bytes is a heartbeat: the server asks with it
whether the loop still turns, the engine answers with another when it next takes its messages.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hillstar.engine.config import EngineConfig
from hillstar.engine.messages import FromEngine, ToEngine

MAX_FRAME_BYTES = 1 << 30
_HEADER = struct.Struct(">I")
HEARTBEAT = _HEADER.pack(0)

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


class FramingError(ValueError):
    """The bytes are no frames: the stream is lost and cannot be read on."""


def encode_message(message: ToEngine | FromEngine) -> bytes:
    """One message as a whole frame."""
    return frame(_encoder.encode(message))


def decode_to_engine(payload: bytes) -> ToEngine:
    """Raises msgspec.DecodeError (msgspec.ValidationError included) for anything else."""
    return _to_engine.decode(payload)


def decode_from_engine(payload: bytes) -> FromEngine:
    """Raises msgspec.DecodeError (msgspec.ValidationError included) for anything else."""
    return _from_engine.decode(payload)


def encode_config(config: EngineConfig) -> bytes:
    """The configuration as a whole frame."""
    return frame(msgspec.msgpack.encode(config, enc_hook=_encode_path))


def decode_config(payload: bytes) -> EngineConfig:
    """Raises msgspec.DecodeError when the payload is no valid configuration."""
    return msgspec.msgpack.decode(payload, type=EngineConfig, dec_hook=_decode_path)


def frame(payload: bytes) -> bytes:
    """`payload` behind its length."""
    return _HEADER.pack(len(payload)) + payload


class FrameReader:
    """Cuts a byte stream into payloads, however the stream was chopped. Does no I/O."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take `data` in and yield every payload that is now complete.

        Raises FramingError for a length above the limit, before anything is buffered for it.
        """
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                (length,) = _HEADER.unpack_from(self._buffer, start)
                if length > self._max_frame_bytes:
                    raise FramingError(
                        f"a frame of {length} bytes; at most {self._max_frame_bytes}"
                    )
                end = start + _HEADER.size + length
                if end > len(self._buffer):
                    break
                payload = bytes(self._buffer[start + _HEADER.size : end])
                start = end
                yield payload
        finally:
            del self._buffer[:start]


def _encode_path(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"cannot encode {type(value).__name__}")


def _decode_path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"{value!r} is no {kind.__name__}")
