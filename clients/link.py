"""The one socket of a client: made on demand, made again when lost, shared by all its streams."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from hillstar.clients.backoff import Backoff, Outage
from hillstar.clients.codec import Codec
from hillstar.clients.errors import (
    ClientClosed,
    ClientError,
    ConnectionLostError,
    ProtocolError,
    RequestRefused,
)
from hillstar.clients.events import TERMINAL, ConnectionLost, Created, Resumed
from hillstar.clients.stream import Stream

RECONNECT_CODES = frozenset({1001, 1005, 1006, 1011, 1012, 1013, 1015})
"""Close codes after which a client comes back; any other is final."""

MAX_AUTOMATIC_LANES = 16
"""As many as a server runs at once on one connection; further streams wait for a lane."""

_CANCEL_LANE = "cancel"
"""Where the answer to a cancel goes that came after the end: to no stream. On the response's own
lane it could meet the next stream there."""

_CLOSE_S = 2.0  # for the peer's answer to our close

Connect = Callable[[], Awaitable[aiohttp.ClientWebSocketResponse]]
Notice = Callable[[Mapping[str, Any]], None]


class Link:
    """Owner of the socket and of the table lane -> stream. `run` is its only long task.

    One stream at a time has a lane, so whatever arrives on a lane belongs to that stream.
    """

    def __init__(self, connect: Connect, codec: Codec, backoff: Backoff, notice: Notice) -> None:
        self._connect = connect
        self._codec = codec
        self._backoff = backoff
        self._outage = Outage(backoff)
        self._notice = notice
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._streams: dict[str, Stream] = {}  # lane -> its stream
        self._attached: set[Stream] = set()  # streams that the present socket carries
        self._numbers: dict[int, Stream] = {}  # `r` of the present socket -> its stream
        self._changed = asyncio.Condition()  # a lane was taken or given back
        self._sending = asyncio.Lock()  # one frame after another; an attachment is not interrupted
        self._closed = False

    async def start(self, stream: Stream, lane: str | None) -> None:
        """Give `stream` a lane (waits for a free one) and send what opens it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or self._free_lane(lane) is not None)
            free = self._free_lane(lane)
            if self._closed or free is None:
                raise ClientClosed("the client is closed")
            stream.lane = free
            self._streams[free] = stream
            self._changed.notify_all()
        async with self._sending:
            await self._attach(stream)

    async def cancel(self, stream: Stream) -> None:
        """Send the cancel, now or as soon as there is a socket and an id to name."""
        async with self._sending:
            await self._write_cancel(stream)

    async def run(self) -> None:
        """Keep a socket while streams need one. Ends only by being cancelled."""
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: bool(self._streams))
                await self._attempt()
        finally:
            self._closed = True
            await self._fail_all(ClientClosed("the client is closed"))

    async def _attempt(self) -> None:
        """Connect, serve the socket until it is lost, and wait before the next attempt."""
        now_s = asyncio.get_running_loop().time
        code: int | None = None
        try:
            socket = await self._connect()
            opened_s = now_s()
            code, reason = await self._serve(socket)
            if now_s() - opened_s > self._backoff.max_s:
                self._outage.over()
        except ClientError as error:
            if not error.retryable:
                await self._fail_all(error)
                return
            reason = str(error)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
        for stream in [s for s in self._streams.values() if s.detached or s.done]:
            await self._give_back(stream)
        if code is not None and code not in RECONNECT_CODES:
            message = f"the server closed the connection with code {code} {reason}".rstrip()
            await self._fail_all(ConnectionLostError(message, close_code=code, retryable=False))
        elif self._streams:
            await self._wait(code, reason)

    async def _wait(self, code: int | None, reason: str) -> None:
        delay_s = self._outage.failed(asyncio.get_running_loop().time())
        if delay_s is None:
            message = f"no connection for {self._backoff.give_up_s:g} s: {reason}"
            self._outage.over()
            await self._fail_all(ConnectionLostError(message, close_code=code, retryable=True))
            return
        for stream in self._streams.values():
            stream.post(ConnectionLost(reason, self._outage.num_attempts, delay_s))
        await asyncio.sleep(delay_s)

    async def _serve(self, socket: aiohttp.ClientWebSocketResponse) -> tuple[int, str]:
        """Attach every stream to a fresh socket and deliver what comes; (close code, reason)."""
        try:
            async with self._sending:
                self._numbers.clear()
                self._attached.clear()
                self._socket = socket
                for stream in list(self._streams.values()):
                    await self._attach(stream)
            reason = ""
            async for frame in socket:
                if frame.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                    await self._deliver(self._codec.decode(frame.data))
                elif frame.type is aiohttp.WSMsgType.ERROR:
                    reason = str(frame.data)
            return socket.close_code or 1006, reason or "connection closed"
        finally:
            self._socket = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await socket.close()

    async def _deliver(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "error":
            await self._deliver_error(message)
            return
        stream = self._stream_of(message)
        if stream is None:
            if "r" not in message and "stream_id" not in message:
                self._notice(message)
            return
        extra = message.get("hillstar")
        if isinstance(extra, dict) and isinstance(number := extra.get("r"), int):
            self._numbers[number] = stream
        event = stream.take(message)
        if event is not None and not isinstance(event, Resumed):
            self._outage.over()
        if message["type"] in TERMINAL:
            await self._give_back(stream)
        elif isinstance(event, Created) and stream.cancelling:
            await self.cancel(stream)

    async def _deliver_error(self, message: Mapping[str, Any]) -> None:
        """An error ends the stream of its lane; one without a lane, those not yet created."""
        status = message.get("status", 500)
        if not isinstance(message.get("error"), Mapping) or not isinstance(status, int):
            raise ProtocolError("an error frame without an error")
        error = RequestRefused.from_body(status, message)
        lane = message.get("stream_id")
        streams = list(self._streams.values())
        concerned = [
            s for s in streams if (s.lane == lane if lane is not None else s.response_id is None)
        ]
        for stream in concerned:
            stream.fail(error)
            await self._give_back(stream)
        if not concerned:
            self._notice(message)

    def _stream_of(self, message: Mapping[str, Any]) -> Stream | None:
        if "r" in message:
            return self._numbers.get(message["r"])
        return self._streams.get(message.get("stream_id", ""))

    def _free_lane(self, wanted: str | None) -> str | None:
        names = [wanted] if wanted else [f"auto-{i}" for i in range(MAX_AUTOMATIC_LANES)]
        return next((name for name in names if name not in self._streams), None)

    async def _attach(self, stream: Stream) -> None:
        """Have the socket carry `stream`, once; without a socket, the next one will."""
        if self._socket is not None and stream not in self._attached:
            self._attached.add(stream)
            await self._write(stream.attach_message())
            if stream.cancelling:
                await self._write_cancel(stream)

    async def _write(self, message: Mapping[str, Any]) -> None:
        frame = self._codec.encode(message)
        if self._socket is None:
            return
        try:
            if isinstance(frame, str):
                await self._socket.send_str(frame)
            else:
                await self._socket.send_bytes(frame)
        except (aiohttp.ClientError, OSError):
            return  # the reader sees the loss, and the next attachment says it again

    async def _write_cancel(self, stream: Stream) -> None:
        if stream.response_id is not None:
            await self._write(
                {
                    "type": "response.cancel",
                    "response_id": stream.response_id,
                    "stream_id": _CANCEL_LANE,
                }
            )

    async def _give_back(self, stream: Stream) -> None:
        async with self._changed:
            self._streams.pop(stream.lane, None)
            self._numbers = {r: s for r, s in self._numbers.items() if s is not stream}
            self._changed.notify_all()

    async def _fail_all(self, error: ClientError) -> None:
        for stream in list(self._streams.values()):
            stream.fail(error)
            await self._give_back(stream)
