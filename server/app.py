"""The aiohttp application, and the server's life: start, ready, drain, gone."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from hillstar.server import health, http
from hillstar.server.connection import responses_socket
from hillstar.server.echo import echo_socket
from hillstar.server.front import Front
from hillstar.server.middleware import response_headers, typed_errors
from hillstar.server.ports import Principal
from hillstar.server.registry import Hub

logger = logging.getLogger(__name__)

KEEPALIVE_S = 75.0  # of an idle HTTP connection
BACKLOG = 1024

GuardedHandler = Callable[[Front, Principal, web.Request], Awaitable[web.StreamResponse]]


def build_app(front: Front) -> web.Application:
    """Every route. `/health/*` needs no key; everything else passes through `guarded`."""

    def guarded(handler: GuardedHandler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await handler(front, front.keys.authenticate(request.headers), request)

        return handle

    async def live(request: web.Request) -> web.StreamResponse:
        return health.live()

    async def ready(request: web.Request) -> web.StreamResponse:
        return health.ready(front)

    app = web.Application(
        client_max_size=front.config.max_frame_bytes, middlewares=[typed_errors(front.origins)]
    )
    app.on_response_prepare.append(response_headers(front.origins))
    response = "/v1/responses/{response_id}"
    conversation = "/v1/conversations/{conversation_id}"
    app.add_routes(
        [
            web.get("/v1/responses", guarded(responses_socket), allow_head=False),
            web.post("/v1/responses", guarded(http.create_response)),
            web.get(response, guarded(http.get_response), allow_head=False),
            web.delete(response, guarded(http.delete_response)),
            web.post(f"{response}/cancel", guarded(http.cancel_response)),
            web.get(f"{response}/input_items", guarded(http.list_input_items)),
            web.post("/v1/conversations", guarded(http.create_conversation)),
            web.get(conversation, guarded(http.get_conversation)),
            web.delete(conversation, guarded(http.delete_conversation)),
            web.get("/v1/models", guarded(http.list_models)),
            web.get("/v1/models/{model:.+}", guarded(http.get_model)),
            web.get("/metrics", guarded(health.metrics)),
            web.get("/health/live", live),
            web.get("/health/ready", ready),
        ]
    )
    if front.config.debug:
        app.add_routes([web.get("/debug/echo", guarded(echo_socket), allow_head=False)])
    return app


class Server:
    """A listening server around a Hub. `start`, then `drain` (or not), then `close`."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._runner = web.AppRunner(
            build_app(front),
            handle_signals=False,
            handler_cancellation=True,
            access_log=None,
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


async def wait_ready(hub: Hub, on_loading: Callable[[int, int], None]) -> None:
    """Return once the engine takes work; `on_loading(done, total)` is told of the weights."""
    seen = (0, 0)
    while (stats := hub.stats()).engine_state != "ready":
        if stats.loading != seen:
            seen = stats.loading
            on_loading(*seen)
        await asyncio.sleep(0.05)
