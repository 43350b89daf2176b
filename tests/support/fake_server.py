"""A server that speaks `hillstar.v1.*` from a script and breaks off where it is told to."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
from aiohttp import WSMsgType, web

ANSWER = ("The", " capital", " of", " France", " is", " Paris", ".", " Élysée", " 🗼", "!")


@dataclass
class Script:
    """How the server behaves. Each connection takes the next cut; without one it lives on."""

    answer: Sequence[str] = ANSWER
    cuts: deque[int] = field(default_factory=deque)  # frames sent before the connection is cut
    close_code: int | None = None  # None: the transport is aborted
    handshakes: deque[int] = field(default_factory=deque)  # HTTP statuses given before a socket
    merge: int = 1  # deltas sent as one frame
    hold_after: int | None = None  # deltas sent before waiting for a cancel
    deaf: bool = False  # cancels are received and not acted on
    refuse: Mapping[str, Any] | None = None  # the error object every create gets
    recovered: bool = True
    repeat_events: int = 0  # events sent again after a resume
    raw_answer: tuple[int, str] | None = None  # status and body of every retrieve


class FakeServer:
    """Counts what it was asked; everything a response says is a function of `script.answer`."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.url = ""
        self.num_connections = 0
        self.creates: list[Mapping[str, Any]] = []
        self.resumes: list[Mapping[str, Any]] = []
        self.cancels: list[str] = []
        self.cancel_lanes: set[str] = set()
        self._by_event_id: dict[str, str] = {}
        self._cancelled: dict[str, asyncio.Event] = {}
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/v1/responses", self._socket)
        app.router.add_post("/v1/responses", self._post)
        app.router.add_get("/v1/responses/{id}", self._retrieve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def events(self, response_id: str) -> list[dict[str, Any]]:
        """The whole log of a response that is not cancelled."""
        response = {"id": response_id, "conversation": {"id": "conv_1"}, "output": []}
        text = "".join(self.script.answer)
        message = {"type": "message", "content": [{"type": "output_text", "text": text}]}
        usage = {
            "input_tokens": 7,
            "input_tokens_details": {"cached_tokens": 3},
            "output_tokens": len(self.script.answer),
            "total_tokens": 7 + len(self.script.answer),
        }
        log: list[dict[str, Any]] = [
            {"type": "response.created", "response": {**response, "status": "queued"}},
            {"type": "response.in_progress", "response": {**response, "status": "in_progress"}},
        ]
        log += [
            {
                "type": "response.output_text.delta",
                "output_index": 0,
                "content_index": 0,
                "delta": token,
                "first_token": index,
                "num_tokens": 1,
            }
            for index, token in enumerate(self.script.answer)
        ]
        done = {**response, "status": "completed", "output": [message], "usage": usage}
        log += [{"type": "response.completed", "response": done}]
        return [{**event, "sequence_number": number} for number, event in enumerate(log)]

    async def _post(self, request: web.Request) -> web.StreamResponse:
        """The whole log as server-sent events."""
        if self.script.refuse is not None:
            return web.json_response({"error": self.script.refuse}, status=400)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for event in self.events("resp_sse"):
            data = msgspec.json.encode(event).decode()
            await answer.write(f"event: {event['type']}\ndata: {data}\n\n".encode())
        return answer

    async def _retrieve(self, request: web.Request) -> web.Response:
        if self.script.raw_answer is not None:
            status, body = self.script.raw_answer
            return web.Response(status=status, text=body)
        response_id = request.match_info["id"]
        if response_id not in self._cancelled:
            error = {"code": "response_not_found", "message": "no such response"}
            return web.json_response({"error": error}, status=404)
        return web.json_response(self.events(response_id)[-1]["response"])

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        if self.script.handshakes:
            return web.Response(status=self.script.handshakes.popleft())
        self.num_connections += 1
        socket = web.WebSocketResponse(protocols=("hillstar.v1.json", "hillstar.v1.msgpack"))
        await socket.prepare(request)
        await _Connection(self, request, socket).run()
        return socket

    def open(self, create: Mapping[str, Any]) -> str:
        """The response of a create: the one its `client_event_id` already made, or a new one."""
        self.creates.append(create)
        event_id = create["hillstar"]["client_event_id"]
        response_id = self._by_event_id.setdefault(event_id, f"resp_{len(self._by_event_id)}")
        self.cancelled(response_id)
        return response_id

    def cancelled(self, response_id: str) -> asyncio.Event:
        """Set once the response was cancelled."""
        return self._cancelled.setdefault(response_id, asyncio.Event())


class _Connection:
    def __init__(
        self, server: FakeServer, request: web.Request, socket: web.WebSocketResponse
    ) -> None:
        self._server = server
        self._request = request
        self._socket = socket
        self._frames_left = server.script.cuts.popleft() if server.script.cuts else None
        self._num_responses = 0
        self._cut = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        reader = asyncio.create_task(self._read())
        cut = asyncio.create_task(self._cut.wait())
        await asyncio.wait({reader, cut}, return_when=asyncio.FIRST_COMPLETED)
        for task in (reader, cut, *self._tasks):
            task.cancel()
        await asyncio.wait({reader, cut, *self._tasks})

    async def _read(self) -> None:
        async for frame in self._socket:
            if frame.type is WSMsgType.TEXT:
                message = msgspec.json.decode(frame.data)
            else:
                message = msgspec.msgpack.decode(frame.data)
            match message["type"]:
                case "response.create":
                    response_id = self._server.open(message)
                    self._start(self._answer(response_id, message["stream_id"], 0, None))
                case "hillstar.resume":
                    self._server.resumes.append(message)
                    first = message.get("starting_after", -1) + 1
                    resumed = {
                        "type": "hillstar.resumed",
                        "response_id": message["response_id"],
                        "recovered": self._server.script.recovered,
                        "next_sequence_number": first - self._server.script.repeat_events,
                        "kv": {"tier": "gpu", "cached_tokens": 3, "wake_ms": 1.0},
                    }
                    lane = message["stream_id"]
                    self._start(self._answer(message["response_id"], lane, first, resumed))
                case "response.cancel":
                    self._server.cancels.append(message["response_id"])
                    self._server.cancel_lanes.add(message["stream_id"])
                    if not self._server.script.deaf:
                        self._server.cancelled(message["response_id"]).set()

    def _start(self, work: Any) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def _answer(
        self, response_id: str, lane: str, first: int, resumed: dict[str, Any] | None
    ) -> None:
        script = self._server.script
        if script.refuse is not None:
            frame = {"type": "error", "status": 400, "stream_id": lane, "error": script.refuse}
            await self._send(frame)
            return
        self._num_responses += 1
        r = self._num_responses
        if resumed is not None:
            await self._send({**resumed, "stream_id": lane, "hillstar": {"r": r}})
            first -= script.repeat_events
        log = self._server.events(response_id)
        cancelled = self._server.cancelled(response_id)
        number = first
        while number < len(log):
            event = {**log[number], "stream_id": lane}
            if event["type"] == "response.created":
                event["hillstar"] = {"r": r}
            if script.hold_after is not None and number == 2 + script.hold_after:
                await cancelled.wait()
            if cancelled.is_set():
                done = {**log[-1]["response"], "status": "cancelled"}
                event |= {"type": "response.incomplete", "response": done}
                await self._send(event)
                return
            number += await self._send_event(event, log, number, r)

    async def _send_event(
        self, event: dict[str, Any], log: list[dict[str, Any]], number: int, r: int
    ) -> int:
        """Send one event, or several deltas as one; how many events it was."""
        if event["type"] != "response.output_text.delta":
            await self._send(event)
            return 1
        parts = [
            e
            for e in log[number : number + self._server.script.merge]
            if e["type"] == "response.output_text.delta"
        ]
        event["delta"] = "".join(part["delta"] for part in parts)
        event["num_tokens"] = len(parts)
        event["sequence_number"] = parts[-1]["sequence_number"]
        if self._socket.ws_protocol == "hillstar.v1.msgpack":
            order = ("sequence_number", "output_index", "content_index", "delta", "first_token")
            await self._send([1, r, *(event[key] for key in order), event["num_tokens"]])
        else:
            await self._send(event)
        return len(parts)

    async def _send(self, message: Any) -> None:
        if self._frames_left == 0:
            await self._break_off()
        if self._socket.ws_protocol == "hillstar.v1.msgpack":
            await self._socket.send_bytes(msgspec.msgpack.encode(message))
        else:
            await self._socket.send_str(msgspec.json.encode(message).decode())
        if self._frames_left is not None:
            self._frames_left -= 1

    async def _break_off(self) -> None:
        """Close as the script says; never returns."""
        if self._server.script.close_code is not None:
            await self._socket.close(code=self._server.script.close_code)
        elif self._request.transport is not None:
            self._request.transport.abort()
        self._cut.set()
        await asyncio.Event().wait()
