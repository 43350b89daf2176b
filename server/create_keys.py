"""Idempotent creates: a `client_event_id` makes one response, however often it is sent."""

import asyncio
from collections.abc import Awaitable, Callable

from hillstar.server import reads
from hillstar.server.directory import Directory
from hillstar.server.journal import Journal
from hillstar.server.ports import Created
from hillstar.server.reads import Place
from hillstar.server.request import CreateResponse


def client_key(tenant: str, request: CreateResponse) -> str | None:
    """The scope of a `client_event_id`: the tenant and the parent. None: not idempotent."""
    event_id = request.hillstar.client_event_id
    if event_id is None:
        return None
    return "\0".join((tenant, request.conversation or request.previous_response_id or "", event_id))


class CreateKeys:
    """Keys of creates that are under way, and of responses that only memory knows."""

    def __init__(self, journal: Journal, directory: Directory) -> None:
        self._journal = journal
        self._directory = directory
        self._under_way: dict[str, asyncio.Future[None]] = {}
        self._unstored: dict[str, Place] = {}

    async def once(self, key: str, create: Callable[[], Awaitable[Created]]) -> Created:
        """The response that this key made, or the one that `create` makes now.

        A create that fails leaves the key free for the next.
        """
        while (other := self._under_way.get(key)) is not None:
            await asyncio.shield(other)
        under_way: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under_way[key] = under_way
        try:
            place = await self._find(key)
            if place is not None:
                return Created(place.response_id, place.conversation_id, True)
            created = await create()
            live = self._directory.find(created.response_id)
            if live is not None:
                self._unstored[key] = live
            return created
        finally:
            del self._under_way[key]
            under_way.set_result(None)

    def sweep(self) -> None:
        """Forget keys whose response memory has forgotten (the journal knows the stored ones)."""
        for key, place in list(self._unstored.items()):
            if self._directory.find(place.response_id) is None:
                del self._unstored[key]

    async def _find(self, key: str) -> Place | None:
        place = self._unstored.get(key)
        if place is not None and self._directory.find(place.response_id) is not None:
            return place
        return await self._journal.read(reads.find_client_key, key)
