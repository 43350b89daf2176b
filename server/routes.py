"""Every route of the server, and what each passes through."""

from collections.abc import Awaitable, Callable

from aiohttp import web

from hillstar.server import health, http
from hillstar.server.connection import responses_socket
from hillstar.server.echo import echo_socket
from hillstar.server.front import Front
from hillstar.server.middleware import response_headers, typed_errors
from hillstar.server.ports import Principal

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
