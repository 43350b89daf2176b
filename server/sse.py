"""Server-sent events: one response's events as one HTTP answer."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web
from aiohttp.http import StreamWriter

from hillstar.server.encode import encode_sse, encode_sse_delta, encode_sse_error
from hillstar.server.errors import ApiError, server_draining
from hillstar.server.events import TextDelta
from hillstar.server.followers import AnyEvent, is_terminal
from hillstar.server.front import Front
from hillstar.server.outbox import Outbox
from hillstar.server.socket import bound_send_buffer

COMMENT = b":\n\n"  # keeps proxies and clients from giving up on a silent stream

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class _Sink:
    """The outbox's view of a streamed answer; `writer` is there once its head was sent."""

    def __init__(self, request: web.Request) -> None:
        self._protocol = request.protocol
        self.writer: StreamWriter | None = None

    @property
    def is_full(self) -> bool:
        return self._protocol.writing_paused

    def send(self, frames: bytes) -> None:
        assert self.writer is not None
        transport = self.writer.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the peer is gone")
        is_chunked = self.writer.chunked  # not so for HTTP/1.0
        transport.write(b"%x\r\n%b\r\n" % (len(frames), frames) if is_chunked else frames)

    async def wait_writable(self) -> None:
        assert self.writer is not None
        await self.writer.drain()


class EventStream:
    """One streamed answer: the `Scope` and the `Follower` of its response, and a `Peer`."""

    def __init__(self, front: Front, request: web.Request) -> None:
        self._front = front
        self._sink = _Sink(request)
        self._outbox = Outbox(self._sink, front.limits, front.departures)
        self._next_sequence_number = 0
        self._posted_at = asyncio.get_running_loop().time()

    def post(self, response_id: str, events: Sequence[AnyEvent]) -> None:
        """Of `ports.Follower`."""
        for event in events:
            if isinstance(event, TextDelta):
                self._outbox.put_delta(event, self)
            else:
                self._outbox.put(encode_sse(event), self)
        if events:
            self._next_sequence_number = events[-1].sequence_number + 1
            self._posted_at = asyncio.get_running_loop().time()
            if is_terminal(events[-1]):
                self._outbox.finish()

    def frame(self, delta: TextDelta) -> bytes:
        """Of `outbox.Framer`."""
        return encode_sse_delta(delta)

    def lost(self, response_id: str, error: ApiError) -> None:
        """Of `ports.Follower`."""
        self._fail(error)

    def superseded(self, conversation_id: str) -> None:
        """Of `ports.Scope`: OpenAI's stream has no such event, and it goes on."""

    def beat(self, now: float) -> None:
        """Of `Peer`: a comment on a stream that has been silent."""
        if now - self._posted_at >= self._front.limits.heartbeat_s:
            self._posted_at = now
            self._outbox.put(COMMENT)

    def announce_drain(self, deadline_s: float) -> None:
        """Of `Peer`: OpenAI's stream has no such event."""

    def leave(self) -> None:
        """Of `Peer`: the response is parked; the stream ends with an error that is retryable."""
        self._fail(server_draining())

    @property
    def has_posted(self) -> bool:
        """Whether anything of the response came yet."""
        return self._next_sequence_number > 0

    def finish(self) -> None:
        """There is nothing more to come."""
        self._outbox.finish()

    def _fail(self, error: ApiError) -> None:
        """End with an error in place of the terminal event."""
        self._outbox.put(encode_sse_error(error, self._next_sequence_number))
        self._outbox.finish()

    async def send(self, request: web.Request) -> web.StreamResponse:
        """Answer the request with what was and will be posted, up to the terminal event."""
        answer = web.StreamResponse(headers=HEADERS)
        writer = await answer.prepare(request)
        assert isinstance(writer, StreamWriter)
        writer.send_headers()
        self._sink.writer = writer
        bound_send_buffer(request)
        if await self._outbox.run():
            await answer.write_eof()
        else:
            self._front.metrics.num_slow_readers += 1
            if request.transport is not None:
                request.transport.abort()
        return answer


async def stream_events(
    front: Front, request: web.Request, begin: Callable[[EventStream], Awaitable[None]]
) -> web.StreamResponse:
    """Stream what `begin` attaches. An ApiError from `begin` is an ordinary HTTP error."""
    stream = EventStream(front, request)
    with front.connections:
        front.peers.add(stream)
        try:
            await begin(stream)
            return await stream.send(request)
        finally:
            front.peers.discard(stream)
            if not front.is_draining:
                front.hub.disconnected(stream)
