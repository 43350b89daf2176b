"""The HTTP surface of responses, conversations and models."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from hillstar.server import query
from hillstar.server.errors import ApiError, invalid, server_draining
from hillstar.server.followers import has_ended
from hillstar.server.front import Front, forgive_cancellation, uninterrupted
from hillstar.server.items import Message, parse_input
from hillstar.server.ports import Principal
from hillstar.server.request import CreateResponse, Metadata, parse_create
from hillstar.server.sse import EventStream, stream_events
from hillstar.server.validate import convert, decode_object, wrong_type

T = TypeVar("T")

MAX_PAGE = 100
DEFAULT_PAGE = 20
MAX_SEQUENCE_NUMBER = (1 << 63) - 1


class _Waiter:
    """A request that waits for its response: the `Scope` of it, and a `Peer`."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self.was_left = False

    def superseded(self, conversation_id: str) -> None:
        """Of `ports.Scope`: the request waits on."""

    def beat(self, now: float) -> None:
        """Of `Peer`: there is nobody to ping."""

    def announce_drain(self, deadline_s: float) -> None:
        """Of `Peer`: the answer may still be in time."""

    def leave(self) -> None:
        """Of `Peer`: the response is parked, the request ends."""
        self.was_left = True
        if self._task is not None:
            self._task.cancel()


async def create_response(
    front: Front, principal: Principal, request: web.Request
) -> web.StreamResponse:
    """`POST /v1/responses`: the object, or its events with `stream: true`."""
    create = await read_body(
        front,
        request,
        lambda data: parse_create(decode_object(data), surface="http", defaults=front.defaults),
    )
    front.rate.take(principal.tenant)
    if create.stream:

        async def begin(stream: EventStream) -> None:
            scope = None if create.background else stream
            await uninterrupted(front.hub.create(principal, create, scope=scope, follower=stream))

        return await stream_events(front, request, begin)
    if create.background:
        made = await uninterrupted(front.hub.create(principal, create, scope=None, follower=None))
        return answer(await front.hub.get(principal, made.response_id))
    return await _create_and_wait(front, principal, create)


async def _create_and_wait(
    front: Front, principal: Principal, create: CreateResponse
) -> web.Response:
    waiter = _Waiter()
    with front.connections:
        front.peers.add(waiter)
        try:
            made = await uninterrupted(
                front.hub.create(principal, create, scope=waiter, follower=None)
            )
            return answer(await front.hub.wait_done(principal, made.response_id))
        except asyncio.CancelledError:
            if not waiter.was_left:
                raise
            forgive_cancellation()
            raise server_draining() from None
        finally:
            front.peers.discard(waiter)
            if not front.is_draining:
                front.hub.disconnected(waiter)


async def get_response(
    front: Front, principal: Principal, request: web.Request
) -> web.StreamResponse:
    """`GET /v1/responses/{id}`: the object, or with `stream=true` its events after a number."""
    response_id = request.match_info["response_id"]
    query.check_names(request.query, _GET_QUERY)
    starting_after = query.integer(request.query, "starting_after", 0, MAX_SEQUENCE_NUMBER)
    if not query.boolean(request.query, "stream"):
        if starting_after is not None:
            raise invalid("'starting_after' needs stream=true.", "starting_after")
        return answer(await front.hub.get(principal, response_id))

    async def begin(stream: EventStream) -> None:
        await uninterrupted(
            front.hub.follow(
                principal,
                response_id,
                starting_after=starting_after,
                follower=stream,
                scope=stream,
            )
        )
        if not stream.has_posted and has_ended(await front.hub.get(principal, response_id)):
            stream.finish()  # asked for what comes after the end

    return await stream_events(front, request, begin)


_GET_QUERY = frozenset({"stream", "starting_after", "include", "include[]", "include_obfuscation"})


async def cancel_response(
    front: Front, principal: Principal, request: web.Request
) -> web.StreamResponse:
    """`POST /v1/responses/{id}/cancel`: the response as it ended."""
    work = front.hub.cancel(principal, request.match_info["response_id"])
    return answer(await uninterrupted(work))


async def delete_response(
    front: Front, principal: Principal, request: web.Request
) -> web.StreamResponse:
    """`DELETE /v1/responses/{id}`."""
    response_id = request.match_info["response_id"]
    await uninterrupted(front.hub.delete(principal, response_id))
    return answer({"id": response_id, "object": "response", "deleted": True})


async def list_input_items(
    front: Front, principal: Principal, request: web.Request
) -> web.StreamResponse:
    """`GET /v1/responses/{id}/input_items`, a page at a time, newest first unless asked."""
    query.check_names(request.query, _PAGE_QUERY)
    limit = query.integer(request.query, "limit", 1, MAX_PAGE) or DEFAULT_PAGE
    order = query.choice(request.query, "order", ("desc", "asc"))
    items = await front.hub.input_items(principal, request.match_info["response_id"])
    if order == "desc":
        items = items[::-1]
    return answer(page(items, limit, request.query.get("after")))


_PAGE_QUERY = frozenset({"limit", "order", "after", "include", "include[]"})


def page(items: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """OpenAI's list object: up to `limit` items behind the one called `after`."""
    start = 0
    if after is not None:
        start = next((i + 1 for i, item in enumerate(items) if item.get("id") == after), -1)
        if start < 0:
            raise invalid("'after' names no item of this list.", "after")
    data = items[start : start + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + limit < len(items),
    }


async def create_conversation(
    front: Front, principal: Principal, request: web.Request
) -> web.StreamResponse:
    """`POST /v1/conversations`: empty, or beginning with `items`."""
    metadata, items = await read_body(front, request, parse_conversation, may_be_empty=True)
    made = await uninterrupted(front.hub.create_conversation(principal, metadata, items))
    return answer(made)


async def get_conversation(
    front: Front, principal: Principal, request: web.Request
) -> web.StreamResponse:
    """`GET /v1/conversations/{id}`."""
    work = front.hub.get_conversation(principal, request.match_info["conversation_id"])
    return answer(await work)


async def delete_conversation(
    front: Front, principal: Principal, request: web.Request
) -> web.StreamResponse:
    """`DELETE /v1/conversations/{id}`: with everything that was said in it."""
    conversation_id = request.match_info["conversation_id"]
    await uninterrupted(front.hub.delete_conversation(principal, conversation_id))
    return answer({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


async def list_models(
    front: Front, principal: Principal, request: web.Request
) -> web.StreamResponse:
    """`GET /v1/models`: the one that is served."""
    return answer({"object": "list", "data": [_model(front)]})


async def get_model(front: Front, principal: Principal, request: web.Request) -> web.StreamResponse:
    """`GET /v1/models/{id}`."""
    name = request.match_info["model"]
    if name != front.model_name:
        raise ApiError(404, "model_not_found", f"The model '{name}' does not exist.", param="model")
    return answer(_model(front))


def _model(front: Front) -> Mapping[str, Any]:
    return {
        "id": front.model_name,
        "object": "model",
        "created": front.started_at,
        "owned_by": "hillstar",
    }


async def read_body(
    front: Front,
    request: web.Request,
    parse: Callable[[bytes], T],
    *,
    may_be_empty: bool = False,
) -> T:
    """The parsed JSON body.

    Raises ApiError 415, 408, 400 where it is not what its headers say, 413 (aiohttp's), and what
    `parse` raises.
    """
    has_body = request.can_read_body
    if request.content_type != "application/json" and (has_body or not may_be_empty):
        raise ApiError(415, "unsupported_media_type", "Content-Type must be application/json.")
    try:
        async with asyncio.timeout(front.limits.body_timeout_s):
            data = await request.read()
    except TimeoutError:
        raise ApiError(408, "request_timeout", "The body did not arrive in time.") from None
    except web.RequestPayloadError:
        raise invalid("The body is not encoded as its headers say.", code="invalid_json") from None
    return await front.parse(b"{}" if may_be_empty and not data else data, parse)


def answer(value: object, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )


class _ConversationBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    metadata: Metadata | None = None


def parse_conversation(data: bytes) -> tuple[dict[str, str], tuple[Message, ...]]:
    """The body of a conversation's creation: metadata, and the messages it begins with."""
    fields = decode_object(data)
    items = fields.pop("items", None)
    if items is not None and not isinstance(items, list):
        raise wrong_type("items", items, "an array of items")
    return convert(fields, _ConversationBody).metadata or {}, parse_input(items or [])
