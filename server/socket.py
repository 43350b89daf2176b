"""aiohttp's WebSocket with the settings and the closing that Hillstar needs.

No compression: deltas are a hundred bytes, and a deflate context would cost each idle connection
300 KB; so a frame on the wire is as large as it will ever get, and a decompression bomb cannot be
sent at all (a compressed frame is a protocol error, 1002).

Close frames must arrive. Closing a TCP socket that still has unread bytes resets it, and the peer
may lose the close frame with its code; so the writing half is closed, what still comes in is
thrown away, and the transport goes when the peer has closed its side or the time is up.
"""

import asyncio
import socket
import struct

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from hillstar.server.auth import subprotocols
from hillstar.server.errors import ApiError
from hillstar.server.front import forgive_cancellation
from hillstar.server.limits import SocketLimits
from hillstar.server.wire import Protocol

CLOSE_OK = 1000
CLOSE_RESTART = 1012
CLOSE_TOO_SLOW = 1013
CLOSE_SUPERSEDED = 4409

SEND_BUFFER_BYTES = 256 << 10

_NO_LIMIT = 1 << 62  # flow control is the outbox's
_FINAL = 0x80
_SHORT = [[bytes((_FINAL | opcode, size)) for size in range(126)] for opcode in range(16)]
_MEDIUM = struct.Struct(">BBH").pack
_LARGE = struct.Struct(">BBQ").pack


def negotiate(header: str) -> Protocol:
    """The protocol of a `Sec-WebSocket-Protocol` header; its first known name wins.

    Raises ApiError where only unknown ones are offered: a browser would fail the connection
    anyway if none of them were selected.
    """
    offered = subprotocols(header)
    for name in offered:
        for protocol in (Protocol.JSON, Protocol.MSGPACK):
            if name == protocol.value:
                return protocol
    if header.strip():
        raise ApiError(
            400,
            "unsupported_subprotocol",
            f"Offer one of {Protocol.JSON.value} and {Protocol.MSGPACK.value}, or none.",
        )
    return Protocol.OPENAI


class Socket(web.WebSocketResponse):
    """A WebSocket whose transport is half-closed first."""

    def __init__(self, limits: SocketLimits, max_frame_bytes: int) -> None:
        super().__init__(
            timeout=limits.close_timeout_s,
            autoping=False,
            protocols=(str(Protocol.JSON.value), str(Protocol.MSGPACK.value)),
            compress=False,
            max_msg_size=max_frame_bytes,
            writer_limit=_NO_LIMIT,
        )

    def abort(self) -> None:
        """Drop the connection now."""
        transport = self._req.transport if self._req is not None else None
        if transport is not None:
            transport.abort()

    def _close_transport(self) -> None:
        transport = self._req.transport if self._req is not None else None
        if transport is not None and not transport.is_closing() and transport.can_write_eof():
            transport.write_eof()


class SocketSink:
    """The outbox's view of a socket: straight to the transport.

    aiohttp's own `send_frame` is four calls, three of them coroutines, for each token.
    """

    def __init__(self, socket: Socket, request: web.Request, writer: AbstractStreamWriter) -> None:
        self._socket = socket
        self._protocol = request.protocol
        self._transport = request.transport
        self._writer = writer

    @property
    def is_full(self) -> bool:
        return self._protocol.writing_paused

    def send(self, frames: bytes) -> None:
        transport = self._transport
        if transport is None or self._socket.closed or transport.is_closing():
            raise ConnectionResetError("the peer is gone")
        transport.write(frames)

    async def wait_writable(self) -> None:
        await self._writer.drain()


def frame(opcode: int, payload: bytes) -> bytes:
    """A whole, unmasked message (RFC 6455, 5.2)."""
    size = len(payload)
    if size < 126:
        return _SHORT[opcode][size] + payload
    if size < 1 << 16:
        return _MEDIUM(_FINAL | opcode, 126, size) + payload
    return _LARGE(_FINAL | opcode, 127, size) + payload


def bound_send_buffer(request: web.Request) -> None:
    """Keep the kernel from queueing megabytes for a peer that does not read."""
    transport = request.transport
    raw = transport.get_extra_info("socket") if transport is not None else None
    if raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


async def linger(request: web.Request, timeout_s: float) -> None:
    """Wait until the peer has closed its side (aiohttp then cancels the handler), then abort."""
    transport = request.transport
    if transport is None:
        return
    try:
        await asyncio.sleep(timeout_s)
    except asyncio.CancelledError:
        forgive_cancellation()
    finally:
        transport.abort()
