"""The listening server: accept, drain, leave; a typed answer even to what is no HTTP.

aiohttp answers what its parser or its application refuse before any middleware in plain text. Its
classes for a connection (`RequestHandler`) and for making them (`Server`) are built upon here for
the sake of those answers alone.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from hillstar.server.errors import ApiError, internal_error
from hillstar.server.front import Front
from hillstar.server.middleware import SERVER, error_answer, http_error
from hillstar.server.routes import build_app

KEEPALIVE_S = 75.0  # of an idle HTTP connection
BACKLOG = 1024


class Server:
    """A listening server around a Hub. `start`, then `drain` (or not), then `close`."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._runner = _Runner(
            build_app(front),
            handle_signals=False,
            handler_cancellation=True,
            access_log=None,
            logger=_HttpLogger(logging.getLogger("aiohttp.server")),
            keepalive_timeout=KEEPALIVE_S,
            shutdown_timeout=front.limits.close_timeout_s,
        )
        self._beats: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self) -> None:
        """Accept requests. Raises OSError where the address is taken."""
        config = self._front.config
        await self._runner.setup()
        site = web.TCPSite(self._runner, config.host, config.port, backlog=BACKLOG)
        await site.start()
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"http://{host}:{self._runner.addresses[0][1]}"
        self._beats = asyncio.create_task(self._front.beat_forever())

    async def drain(self) -> None:
        """Let running responses end or be parked, then tell everybody to reconnect."""
        deadline_s = self._front.config.drain_timeout_s
        self._front.announce_drain(deadline_s)
        await self._front.hub.drain(deadline_s)
        self._front.leave()

    async def close(self) -> None:
        """Close what is still connected and stop listening."""
        self._front.leave()
        if self._beats is not None:
            self._beats.cancel()
        await self._runner.cleanup()
        self._front.close()


class _Runner(web.AppRunner):
    """An application's runner whose connections answer refusals with a type."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Connections(
            made.request_handler, request_factory=made.request_factory, **self._kwargs
        )


class _Connections(web.Server):
    """Makes the connections."""

    def __call__(self) -> web.RequestHandler:
        return _HttpConnection(self, loop=self._loop, **self._kwargs)


class _HttpConnection(web.RequestHandler):
    """One client's connection."""

    async def _handle_request(
        self,
        request: web.BaseRequest,
        start_time: float | None,
        request_handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    ) -> tuple[web.StreamResponse, bool]:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            try:
                return await request_handler(request)
            except web.HTTPException as error:  # an expectation, say, that is not met
                return http_error(error, request)

        return await super()._handle_request(request, start_time, handle)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What aiohttp says of a fault, in our words: its own quote what came, maybe a key."""
        super().handle_error(request, status, exc, message)
        if status < 500:
            error = ApiError(status, "invalid_http", "The request is not valid HTTP.")
        else:
            error = internal_error()
        answer = error_answer(error)
        answer.headers["Server"] = SERVER
        answer.force_close()
        return answer


class _HttpLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs for aiohttp. What is no HTTP is named and not quoted: it may be a prompt or a key."""

    def log(
        self, level: int, msg: object, *args: object, exc_info: Any = None, **options: Any
    ) -> None:
        """As `Logger.log`; a fault of the peer's is no error of ours."""
        if isinstance(exc_info, HttpProcessingError | web.RequestPayloadError):
            msg = f"{msg} ({type(exc_info).__name__})"
            level, exc_info = min(level, logging.INFO), None
        super().log(level, msg, *args, exc_info=exc_info, **options)
