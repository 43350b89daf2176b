"""From an id to what it names: the one place where ownership is checked."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from hillstar.server import reads
from hillstar.server.actor import Actor
from hillstar.server.actors import ActorTable
from hillstar.server.directory import Directory
from hillstar.server.errors import conversation_not_found, response_not_found, server_overloaded
from hillstar.server.journal import Journal
from hillstar.server.mail import Mail
from hillstar.server.ports import Principal, Scope
from hillstar.server.reads import Place
from hillstar.server.records import ConversationRow, TurnRow

MAX_ATTEMPTS = 8  # of catching a response between its session and the journal

T = TypeVar("T")


class Lookup:
    """Somebody else's id is an unknown id, on every path."""

    def __init__(self, journal: Journal, directory: Directory, actors: ActorTable) -> None:
        self._journal = journal
        self._directory = directory
        self._actors = actors

    async def find(self, principal: Principal, response_id: str) -> Place | None:
        """Where the principal's response lives."""
        place = self._directory.find(response_id)
        if place is None:
            place = await self._journal.read(reads.find_response, response_id)
        return place if place is not None and place.tenant == principal.tenant else None

    async def conversation(self, principal: Principal, conversation_id: str) -> ConversationRow:
        """The principal's stored conversation. Raises conversation_not_found."""
        row = await self._journal.read(reads.load_conversation_row, conversation_id)
        if row is None or row.tenant != principal.tenant:
            raise conversation_not_found(conversation_id)
        return row

    async def ask(self, actor: Actor, message: Callable[["asyncio.Future[T]"], Mail]) -> T:
        """Post a message with an answer and wait for it. Raises server_overloaded, and errors."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if not actor.offer(message(answer)):
            raise server_overloaded("Too many requests wait for this conversation.")
        return await answer

    async def ask_live(
        self,
        principal: Principal,
        response_id: str,
        message: Callable[["asyncio.Future[T | None]"], Mail],
        scope: Scope | None = None,
    ) -> T | TurnRow:
        """Ask the session where the response lives; once it has ended, its stored row instead.

        Raises response_not_found.
        """
        for _ in range(MAX_ATTEMPTS):
            place = self._directory.find(response_id)
            row: TurnRow | None = None
            if place is None:
                row = await self._journal.read(reads.load_turn, response_id)
                if row is not None:
                    place = Place(row.id, row.conversation_id, row.tenant)
            if place is None or place.tenant != principal.tenant:
                raise response_not_found(response_id)
            if row is not None and row.finish is not None:
                return row
            # It is unfinished, or was a moment ago.
            self._actors.touch(scope, place.conversation_id)
            answer = await self.ask(self._actors.get(place.conversation_id), message)
            if answer is not None:
                return answer
        raise server_overloaded("This response changes too quickly; try again.")
