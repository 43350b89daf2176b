"""One WebSocket: its reader, its heartbeat, its single writer, its end.

    frame -> parse -> commands -> Hub -> follower.post -> outbox -> writer -> frame

The reader never waits for a response, so pings and cancels always get through. All writing, the
close frame included, is the writer's.
"""

import asyncio
import logging

from aiohttp import WSMsgType, web

from hillstar.server.commands import Commands
from hillstar.server.errors import server_draining
from hillstar.server.followers import Sender
from hillstar.server.front import Front, forgive_cancellation
from hillstar.server.handshake import check_handshake
from hillstar.server.outbox import Outbox
from hillstar.server.ports import Principal
from hillstar.server.socket import (
    CLOSE_OK,
    CLOSE_RESTART,
    CLOSE_SUPERSEDED,
    CLOSE_TOO_SLOW,
    Socket,
    SocketSink,
    bound_send_buffer,
    frame,
    linger,
    negotiate,
)
from hillstar.server.wire import ClientEvent, FrameError, Protocol, parse_client_frame

logger = logging.getLogger(__name__)


async def responses_socket(
    front: Front, principal: Principal, request: web.Request
) -> web.StreamResponse:
    """`GET /v1/responses` with Upgrade. Refusals come before the upgrade, as HTTP."""
    check_handshake(request)
    if front.is_draining:
        raise server_draining()
    protocol = negotiate(request.headers.get("Sec-WebSocket-Protocol", ""))
    with front.connections:
        socket = Socket(front.limits, front.config.max_frame_bytes)
        writer = await socket.prepare(request)
        bound_send_buffer(request)
        sink = SocketSink(socket, request, writer)
        connection = Connection(front, principal, protocol, socket, sink)
        front.peers.add(connection)
        try:
            await connection.run()
        finally:
            front.peers.discard(connection)
            await linger(request, front.limits.close_timeout_s)
    return socket


class Connection:
    """Owner of one socket. Is the `Scope` of what is created through it, and a `Peer`."""

    def __init__(
        self,
        front: Front,
        principal: Principal,
        protocol: Protocol,
        socket: Socket,
        sink: SocketSink,
    ) -> None:
        self._front = front
        self._principal = principal
        self._socket = socket
        self._outbox = Outbox(sink, front.limits, front.departures)
        self._sender = Sender(self._outbox, protocol)
        self._tasks = asyncio.TaskGroup()
        self._commands = Commands(front, principal, self, self._sender, self._tasks)
        self._close = (CLOSE_OK, b"")
        self._heard_at = asyncio.get_running_loop().time()
        self._pinged_at: float | None = None
        self._num_progress = 0

    async def run(self) -> None:
        """Serve until the peer or the server has closed."""
        try:
            async with self._tasks:
                self._tasks.create_task(self._write())
                try:
                    await self._read()
                except asyncio.CancelledError:
                    forgive_cancellation()  # the connection was lost
                self._commands.close()
                self._outbox.stop()
        finally:
            if not self._front.is_draining:
                self._front.hub.disconnected(self)

    async def _read(self) -> None:
        while True:
            message = await self._socket.receive()
            self._heard_at = asyncio.get_running_loop().time()
            self._pinged_at = None
            if message.type is WSMsgType.TEXT or message.type is WSMsgType.BINARY:
                await self._take(message.data)
            elif message.type is WSMsgType.PING:
                self._outbox.put(frame(WSMsgType.PONG, bytes(message.data)))
            elif message.type is not WSMsgType.PONG:
                return

    async def _take(self, data: str | bytes) -> None:
        try:
            event = await self._front.parse(data, self._parse)
        except FrameError as error:
            self._sender.refuse(error, error.stream_id)
        else:
            self._commands.take(event)

    def _parse(self, data: str | bytes) -> ClientEvent:
        return parse_client_frame(data, self._sender.protocol, self._front.defaults)

    async def _write(self) -> None:
        if not await self._outbox.run():
            self._front.metrics.num_slow_readers += 1
            logger.warning("a slow reader is closed", extra={"tenant": self._principal.tenant})
            self._close = (CLOSE_TOO_SLOW, b"too slow a reader")
        code, reason = self._close
        try:
            async with asyncio.timeout(self._front.limits.close_timeout_s):
                await self._socket.close(code=code, message=reason, drain=False)
        except TimeoutError:
            logger.info("a peer did not answer the closing handshake")

    def _finish(self, code: int, reason: bytes) -> None:
        """Send what is queued, then close."""
        self._close = (code, reason)
        self._outbox.finish()

    def beat(self, now: float) -> None:
        """Of `Peer`: ping a silent peer; drop one that stays silent."""
        heartbeat_s = self._front.limits.heartbeat_s
        if self._outbox.is_stalled:
            return  # the stall timeout decides
        if self._outbox.num_progress != self._num_progress:  # what it takes, it acknowledges
            self._num_progress = self._outbox.num_progress
            self._heard_at, self._pinged_at = now, None
        elif self._pinged_at is not None:
            if now - self._pinged_at >= heartbeat_s / 2:
                self._socket.abort()
        elif now - self._heard_at >= heartbeat_s:
            self._pinged_at = now
            self._outbox.put(frame(WSMsgType.PING, b""))

    def announce_drain(self, deadline_s: float) -> None:
        """Of `Peer`."""
        self._sender.notify("hillstar.draining", {"deadline_ms": round(deadline_s * 1000)})

    def leave(self) -> None:
        """Of `Peer`: close as a restart, so that clients reconnect."""
        self._finish(CLOSE_RESTART, b"restarting")

    def superseded(self, conversation_id: str) -> None:
        """Of `Scope`: another socket writes to the conversation; this one may go on reading."""
        self._sender.notify("hillstar.superseded", {"conversation": conversation_id})
        has_nothing_left = self._commands.is_idle and self._commands.written == conversation_id
        if self._sender.protocol.is_hillstar and has_nothing_left:
            self._finish(CLOSE_SUPERSEDED, b"superseded")
