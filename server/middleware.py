"""Around every request: its id, the Origin check, typed errors, CORS, a line in the log."""

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from hillstar.server.auth import OriginPolicy
from hillstar.server.errors import ApiError, internal_error
from hillstar.server.handshake import VERSION
from hillstar.server.logs import current_request_id

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
SERVER = "hillstar"

_GIVEN_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

_METHODS = "GET, POST, DELETE, OPTIONS"
_HEADERS = "authorization, content-type, x-request-id, last-event-id"

_HTTP_CODES = {
    404: ("not_found", "There is nothing here: {method} {path}."),
    405: ("method_not_allowed", "{method} is not allowed on {path}."),
    413: ("request_too_large", "The body is larger than this server takes."),
}


def typed_errors(origins: OriginPolicy) -> Middleware:
    """The outermost middleware: whatever happens inside, the answer has a type and an id."""

    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get(REQUEST_ID, "")
        current_request_id.set(
            given if _GIVEN_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        )
        try:
            origins.check(request.headers.get("Origin"), request.headers.get("Host", ""))
            if request.method == "OPTIONS":
                return web.Response(status=204)
            return await handler(request)
        except ApiError as error:
            return error_answer(error)
        except web.HTTPException as error:
            return http_error(error, request)
        except (ConnectionError, asyncio.CancelledError):
            raise  # the peer is gone: nobody reads an answer
        except Exception:
            logger.exception("a request failed: %s %s", request.method, request.path)
            return error_answer(internal_error())

    return handle


def response_headers(
    origins: OriginPolicy,
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """The signal that gives each answer its request id, and listed pages their CORS headers."""

    async def prepare(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = SERVER
        response.headers[REQUEST_ID] = current_request_id.get()
        origin = request.headers.get("Origin")
        if origin is None:
            return
        response.headers["Vary"] = "Origin"
        if origins.allows(origin, request.headers.get("Host", "")):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = f"{REQUEST_ID}, retry-after"
            if request.method == "OPTIONS":
                response.headers["Access-Control-Allow-Methods"] = _METHODS
                response.headers["Access-Control-Allow-Headers"] = _HEADERS
                response.headers["Access-Control-Max-Age"] = "600"

    return prepare


def error_answer(error: ApiError) -> web.Response:
    """An ApiError as OpenAI's JSON body."""
    answer = web.Response(
        body=msgspec.json.encode({"error": error.body()}),
        status=error.status,
        content_type="application/json",
    )
    if error.retry_after_s is not None:
        answer.headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if error.status == 401:
        answer.headers["WWW-Authenticate"] = "Bearer"
    if error.status == 426:
        answer.headers["Upgrade"] = "websocket"
        answer.headers["Sec-WebSocket-Version"] = VERSION
    return answer


def http_error(error: web.HTTPException, request: web.BaseRequest) -> web.Response:
    """aiohttp's refusal with a type."""
    code, message = _HTTP_CODES.get(error.status, ("invalid_http", error.reason))
    text = message.format(method=request.method, path=request.path)
    answer = error_answer(ApiError(error.status, code, text))
    if "Allow" in error.headers:
        answer.headers["Allow"] = error.headers["Allow"]
    return answer
