"""The asyncio client: streams that survive lost connections and restarted servers.

    async with Client("http://127.0.0.1:8040") as client:
        async for event in client.stream(input="What is the capital of France?"):
            if isinstance(event, TextDelta):
                print(event.text, end="", flush=True)

One socket carries all streams of a client, each on its own lane. When it is lost, it is made
again with back-off, and every stream goes on behind the last event it saw: no text is lost and
none comes twice. A create carries a `client_event_id`, so that repeating it after a cut makes no
second response.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack

import aiohttp
import msgspec

from hillstar.clients.backoff import Backoff
from hillstar.clients.codec import Codec, Encoding
from hillstar.clients.errors import (
    ClientClosed,
    ClientError,
    HandshakeRefused,
    ProtocolError,
    RequestRefused,
)
from hillstar.clients.events import Response
from hillstar.clients.link import Link, Notice
from hillstar.clients.stream import Progress, Stream

_MAX_FRAME_BYTES = 64 << 20
_REQUEST_S = 60.0  # for an HTTP request and its answer
_HEARTBEAT_S = 20.0  # a peer that answers no ping for half of this is gone


class Options(TypedDict, total=False):
    """The `hillstar` object of a create; docs/protocol.md explains each."""

    on_disconnect: Literal["continue", "cancel", "pause"]
    priority: int
    seed: int
    top_k: int
    min_p: float
    repetition_penalty: float
    stop: Sequence[str]
    ignore_eos: bool
    min_tokens: int
    draft: str
    category: str
    client_event_id: str


class CreateParams(TypedDict, total=False):
    """The fields of a create; docs/protocol.md explains each."""

    input: str | Sequence[Mapping[str, Any]]
    model: str
    instructions: str
    conversation: str
    previous_response_id: str
    max_output_tokens: int
    temperature: float
    top_p: float
    top_logprobs: int
    include: Sequence[str]
    store: bool
    generate: bool
    metadata: Mapping[str, str]
    hillstar: Options


class Client:
    """A connection to one server, for one tenant. Use it as an async context manager.

    url: the server's address. key: an API key, where the server wants one. encoding: the
    subprotocol's. backoff: how an outage is ridden out, and how long (`give_up_s`).
    on_notice: called with what the server says about the connection or a session, such as
    `hillstar.draining`.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8040",
        *,
        key: str | None = None,
        encoding: Encoding = "msgpack",
        backoff: Backoff | None = None,
        on_notice: Notice | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._codec = Codec(encoding)
        self._backoff = backoff or Backoff()
        self._on_notice = on_notice
        self._http: aiohttp.ClientSession | None = None
        self._link: Link | None = None
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            headers=self._headers, timeout=aiohttp.ClientTimeout(total=None, sock_connect=10)
        )
        self._link = Link(self._connect, self._codec, self._backoff, self._notice)
        self._running = asyncio.create_task(self._link.run(), name="hillstar-client")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._running is not None and self._http is not None
        self._running.cancel()
        await asyncio.wait([self._running])
        await self._http.close()
        self._link = self._http = None
        if not self._running.cancelled() and (fault := self._running.exception()):
            raise fault

    def stream(self, *, lane: str | None = None, **params: Unpack[CreateParams]) -> Stream:
        """A new response, as a stream of events. Nothing is sent before it is first read.

        `lane` names the socket's lane (default: any free one); one response at a time runs on a
        lane, further ones wait here. Reading raises RequestRefused, HandshakeRefused,
        ConnectionLostError, EventsLost, ProtocolError or ClientClosed.
        """
        options: dict[str, Any] = {"client_event_id": uuid.uuid4().hex}
        opening = {**params, "hillstar": options | dict(params.get("hillstar", {}))}
        return self._new_stream(opening, Progress(), lane)

    async def create(self, **params: Unpack[CreateParams]) -> Response:
        """A new response, once it has ended, whatever its status. Raises as `stream` does."""
        return await self.stream(**params).result()

    def resume(
        self, response_id: str, *, starting_after: int | None = None, lane: str | None = None
    ) -> Stream:
        """Follow an existing response from behind `starting_after` (None: from its start)."""
        after = -1 if starting_after is None else starting_after
        return self._new_stream(None, Progress(response_id, after), lane)

    async def retrieve(self, response_id: str) -> Response:
        """The response as it stands. Raises RequestRefused, or ConnectionLostError's kin."""
        return Response.from_wire(await self._request("GET", f"/v1/responses/{response_id}"))

    async def cancel(self, response_id: str) -> Response:
        """End a response, whoever reads it; idempotent. Raises as `retrieve` does."""
        path = f"/v1/responses/{response_id}/cancel"
        return Response.from_wire(await self._request("POST", path))

    async def delete(self, response_id: str) -> None:
        """Erase a response. Raises as `retrieve` does."""
        await self._request("DELETE", f"/v1/responses/{response_id}")

    def _new_stream(
        self, opening: Mapping[str, Any] | None, progress: Progress, lane: str | None
    ) -> Stream:
        if self._link is None:
            raise ClientClosed("the client is not open: use `async with Client(...)`")
        return Stream(opening, progress, self._link, lane)

    def _notice(self, message: Mapping[str, Any]) -> None:
        if self._on_notice:
            self._on_notice(message)

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        assert self._http is not None
        try:
            async with asyncio.timeout(10):
                socket = await self._http.ws_connect(
                    f"{self._url}/v1/responses",
                    protocols=(self._codec.subprotocol,),
                    heartbeat=_HEARTBEAT_S,
                    max_msg_size=_MAX_FRAME_BYTES,
                )
        except aiohttp.WSServerHandshakeError as error:
            message = f"{self._url} answered the upgrade with {error.status} {error.message}"
            raise HandshakeRefused(error.status, message) from None
        if socket.protocol != self._codec.subprotocol:
            await socket.close()
            raise ProtocolError(f"{self._url} does not speak {self._codec.subprotocol}")
        return socket

    async def _request(self, method: str, path: str) -> dict[str, Any]:
        if self._http is None:
            raise ClientClosed("the client is not open: use `async with Client(...)`")
        try:
            async with (
                asyncio.timeout(_REQUEST_S),
                self._http.request(method, self._url + path) as answer,
            ):
                data = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            message = f"{method} {path}: {str(error) or type(error).__name__}"
            raise ClientError(message, retryable=True) from None
        try:
            body = msgspec.json.decode(data)
        except msgspec.DecodeError:
            body = None
        if answer.status >= 400:
            raise RequestRefused.from_body(answer.status, body)
        if not isinstance(body, dict):
            raise ProtocolError(f"{method} {path}: the answer is no JSON object")
        return body
