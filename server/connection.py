"""One WebSocket: its reader, its lanes, its followers, its single writer.

    frame -> parse -> lane -> Hub.create / follow … -> follower.post -> outbox -> writer -> frame

The reader never waits for a response: creates run as tasks of the connection, and whatever is
too much is refused with a type, so pings and cancels always get through. All writing, the close
frame included, is the writer's.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import WSMsgType, web

from hillstar.server.encode import encode, encode_error
from hillstar.server.errors import ApiError, internal_error, server_draining
from hillstar.server.events import Event, Notice, TextDelta
from hillstar.server.followers import LaneFollower, LastEvent, has_ended
from hillstar.server.front import Front, forgive_cancellation
from hillstar.server.lanes import Lanes
from hillstar.server.outbox import Outbox
from hillstar.server.ports import Principal
from hillstar.server.request import INCLUDE_SESSION, CreateResponse
from hillstar.server.socket import (
    CLOSE_OK,
    CLOSE_RESTART,
    CLOSE_SUPERSEDED,
    CLOSE_TOO_SLOW,
    ControlFrame,
    Socket,
    SocketFrame,
    SocketSink,
    bound_send_buffer,
    linger,
    negotiate,
)
from hillstar.server.wire import (
    AckEvent,
    CancelEvent,
    ClientEvent,
    CreateEvent,
    FrameError,
    HintEvent,
    Protocol,
    ResumeEvent,
    parse_client_frame,
)

logger = logging.getLogger(__name__)


async def responses_socket(
    front: Front, principal: Principal, request: web.Request
) -> web.StreamResponse:
    """`GET /v1/responses` with Upgrade. Refusals come before the upgrade, as HTTP."""
    if request.headers.get("Upgrade", "").lower() != "websocket":
        raise ApiError(426, "upgrade_required", "This is a WebSocket, or POST a response here.")
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
    """Owner of one socket's state. Is the `Scope` of what is created through it."""

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
        self._protocol = protocol
        self._socket = socket
        self._outbox: Outbox[SocketFrame] = Outbox(sink, front.limits)
        self._lanes: Lanes[CreateResponse] = Lanes(front.limits)
        self._followers: dict[str, LaneFollower] = {}  # by response, while it runs
        self._tasks = asyncio.TaskGroup()
        self._is_open = True
        self._close = (CLOSE_OK, b"")
        self._num_numbered = 0  # responses given a number on this socket
        self._written: str | None = None  # the conversation last created in or continued
        self._heard_at = asyncio.get_running_loop().time()
        self._pinged_at: float | None = None
        self._num_progress = 0

    # Life cycle

    async def run(self) -> None:
        """Serve until the peer or the server has closed."""
        try:
            async with self._tasks:
                self._tasks.create_task(self._write())
                try:
                    await self._read()
                except asyncio.CancelledError:
                    forgive_cancellation()  # the connection was lost
                self._is_open = False
                self._outbox.stop()
        finally:
            self._is_open = False
            if not self._front.is_draining:
                self._front.hub.disconnected(self)

    async def _write(self) -> None:
        if not await self._outbox.run():
            self._front.metrics.num_slow_readers += 1
            self._close = (CLOSE_TOO_SLOW, b"too slow a reader")
        code, reason = self._close
        try:
            async with asyncio.timeout(self._front.limits.close_timeout_s):
                await self._socket.close(code=code, message=reason, drain=False)
        except TimeoutError:
            logger.info("a peer did not answer the closing handshake")

    async def _read(self) -> None:
        while True:
            message = await self._socket.receive()
            self._heard_at = asyncio.get_running_loop().time()
            self._pinged_at = None
            if message.type is WSMsgType.TEXT or message.type is WSMsgType.BINARY:
                await self._take(message.data)
            elif message.type is WSMsgType.PING:
                self._outbox.put(ControlFrame(WSMsgType.PONG, bytes(message.data)))
            elif message.type is not WSMsgType.PONG:
                return

    def _finish(self, code: int, reason: bytes = b"") -> None:
        """Send what is queued, then close."""
        self._close = (code, reason)
        self._outbox.finish()

    # Peer

    def beat(self, now: float) -> None:
        """Ping a silent peer; drop one that stays silent."""
        heartbeat_s = self._front.limits.heartbeat_s
        if self._outbox.num_progress != self._num_progress:  # what it takes, it acknowledges
            self._num_progress = self._outbox.num_progress
            self._heard_at, self._pinged_at = now, None
        elif self._pinged_at is not None:
            if now - self._pinged_at >= heartbeat_s / 2:
                self._socket.abort()
        elif now - self._heard_at >= heartbeat_s:
            self._pinged_at = now
            self._outbox.put(ControlFrame(WSMsgType.PING))

    def announce_drain(self, deadline_s: float) -> None:
        """Say `hillstar.draining`, where the protocol has it."""
        self._notify("hillstar.draining", {"deadline_ms": round(deadline_s * 1000)})

    def leave(self) -> None:
        """Close as a restart: clients reconnect."""
        self._finish(CLOSE_RESTART, b"restarting")

    # Scope

    def superseded(self, conversation_id: str) -> None:
        """Another socket writes to the conversation now; this one may go on reading."""
        self._notify("hillstar.superseded", {"conversation": conversation_id})
        is_idle = self._lanes.num_busy == 0 and self._lanes.num_waiting == 0
        if self._protocol.is_hillstar and is_idle and self._written == conversation_id:
            self._finish(CLOSE_SUPERSEDED, b"superseded")

    # Followers' side

    def send_event(self, follower: LaneFollower, event: Event | Notice) -> None:
        """Queue anything but a delta."""
        frame = encode(event, self._protocol, stream_id=follower.stream_id, r=follower.number)
        self._outbox.put(frame, key=follower)

    def send_delta(self, follower: LaneFollower, delta: TextDelta) -> None:
        """Queue a delta; it may merge while it waits."""
        self._outbox.put_delta(delta, follower, follower.encode_delta)

    def encode_delta(self, follower: LaneFollower, delta: TextDelta) -> SocketFrame:
        """A delta's frame, made when it is its turn."""
        return encode(delta, self._protocol, stream_id=follower.stream_id, r=follower.number)

    def ended(self, follower: LaneFollower) -> None:
        """A follower's response is over (or never began): its lane is free."""
        if self._followers.get(follower.response_id or "") is follower:
            del self._followers[follower.response_id or ""]
        self._lanes.release(follower.stream_id)
        self._start_waiting()

    def began(self, follower: LaneFollower, response_id: str) -> None:
        """A follower got its response's first event."""
        self._followers[response_id] = follower

    # Commands

    async def _take(self, data: str | bytes) -> None:
        try:
            event = await self._front.parse(data, self._parse)
            self._dispatch(event)
        except FrameError as error:
            self._refuse(error, error.stream_id)

    def _parse(self, data: str | bytes) -> ClientEvent:
        return parse_client_frame(data, self._protocol)

    def _dispatch(self, event: ClientEvent) -> None:
        match event:
            case CreateEvent():
                self._submit(event)
            case CancelEvent():
                self._spawn(self._cancel(event), event.stream_id)
            case ResumeEvent():
                self._resume(event)
            case AckEvent():
                follower = self._followers.get(event.response_id)
                if follower is not None:
                    self._front.hub.ack(event.response_id, follower, event.sequence_number)
            case HintEvent():
                self._spawn(self._hint(event), None)
            case _:
                self._refuse(
                    ApiError(
                        400, "unsupported_event", "This event is not supported.", param="type"
                    ),
                    None,
                )

    def _submit(self, event: CreateEvent) -> None:
        try:
            self._front.rate.take(self._principal.tenant)
            self._lanes.submit(event.stream_id, event.request)
        except ApiError as error:
            self._refuse(error, event.stream_id)
        else:
            self._start_waiting()

    def _start_waiting(self) -> None:
        while self._is_open and (started := self._lanes.start_next()) is not None:
            lane, request = started
            follower = self._new_follower(lane)
            self._spawn(self._create(follower, request), lane, on_failure=follower.abandon)

    async def _create(self, follower: LaneFollower, request: CreateResponse) -> None:
        created = await self._front.hub.create(
            self._principal, request, scope=self, follower=follower
        )
        self._written = created.conversation_id
        if INCLUDE_SESSION in request.include:
            self._tell_session(follower, created.conversation_id)

    def _resume(self, event: ResumeEvent) -> None:
        try:
            self._lanes.occupy(event.stream_id)
        except ApiError as error:
            self._refuse(error, event.stream_id)
            return
        follower = self._new_follower(event.stream_id)
        follower.hold()
        self._spawn(self._follow(follower, event), event.stream_id, on_failure=follower.abandon)

    async def _follow(self, follower: LaneFollower, event: ResumeEvent) -> None:
        followed = await self._front.hub.follow(
            self._principal,
            event.response_id,
            starting_after=event.starting_after,
            follower=follower,
            scope=self,
        )
        is_over = follower.response_id is None and has_ended(
            await self._front.hub.get(self._principal, event.response_id)
        )
        body = {
            "response_id": followed.response_id,
            "recovered": followed.recovered,
            "next_sequence_number": followed.next_sequence_number,
            "kv": dict(followed.kv),
        }
        self.send_event(follower, Notice("hillstar.resumed", body))
        if INCLUDE_SESSION in event.include:
            self._tell_session(follower, followed.conversation_id)
        follower.release()
        if is_over:
            follower.abandon()  # asked for what comes after the end

    async def _cancel(self, event: CancelEvent) -> None:
        is_followed = event.response_id in self._followers
        await self._front.hub.cancel(self._principal, event.response_id)
        if is_followed:
            return  # its follower has the terminal event already
        follower = self._new_follower(event.stream_id)
        await self._front.hub.follow(
            self._principal,
            event.response_id,
            starting_after=None,
            follower=LastEvent(self, follower),
            scope=None,
        )

    async def _hint(self, event: HintEvent) -> None:
        await self._front.hub.hint(
            self._principal,
            event.hint,
            conversation_id=event.conversation,
            previous_response_id=event.previous_response_id,
        )

    # Helpers

    def _new_follower(self, stream_id: str | None) -> LaneFollower:
        self._num_numbered += 1
        return LaneFollower(self, stream_id, self._num_numbered)

    def _spawn(
        self,
        work: Awaitable[None],
        stream_id: str | None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._tasks.create_task(self._guard(work, stream_id, on_failure))

    async def _guard(
        self, work: Awaitable[None], stream_id: str | None, on_failure: Callable[[], None]
    ) -> None:
        """The boundary of a command's task: a failure is an error frame on its lane."""
        try:
            await work
        except ApiError as error:
            self._refuse(error, stream_id)
            on_failure()
        except Exception:
            logger.exception("a command failed", extra={"tenant": self._principal.tenant})
            self._refuse(internal_error(), stream_id)
            on_failure()

    def _refuse(self, error: ApiError, stream_id: str | None) -> None:
        self._outbox.put(encode_error(error, self._protocol, stream_id=stream_id))

    def _notify(self, kind: str, body: dict[str, object]) -> None:
        if self._protocol.is_hillstar:
            self._outbox.put(encode(Notice(kind, body), self._protocol))

    def _tell_session(self, follower: LaneFollower, conversation_id: str) -> None:
        body = {
            "conversation": conversation_id,
            "state": "awake",
            "tier": "gpu",
            "cached_tokens": 0,
            "bytes": 0,
        }
        self.send_event(follower, Notice("hillstar.session", body))
