"""Deletion: what is erased, and who hears of it."""

import asyncio

from hillstar.server import reads
from hillstar.server.actors import ActorTable
from hillstar.server.directory import Directory
from hillstar.server.errors import response_not_found
from hillstar.server.journal import Journal
from hillstar.server.lookup import Lookup
from hillstar.server.mail import Close, Erased, Forget, Mail
from hillstar.server.ports import Principal
from hillstar.server.records import EraseTurns
from hillstar.server.sequences import SequenceTable


class Deletion:
    """Erases responses that have ended, and whole conversations."""

    def __init__(
        self,
        journal: Journal,
        directory: Directory,
        lookup: Lookup,
        actors: ActorTable,
        sequences: SequenceTable,
    ) -> None:
        self._journal = journal
        self._directory = directory
        self._lookup = lookup
        self._actors = actors
        self._sequences = sequences

    async def response(self, response_id: str) -> None:
        """Erase a response that has ended, whoever's. Raises response_not_found."""
        place = self._directory.find(response_id)
        if place is not None:  # kept in memory only

            def forget(answer: "asyncio.Future[bool]") -> Mail:
                return Forget(response_id, answer)

            await self._lookup.ask(self._actors.get(place.conversation_id), forget)
            return
        row = await self._journal.read(reads.load_turn, response_id)
        if row is None:
            raise response_not_found(response_id)
        ids = await self._journal.read(reads.conversations_upon, response_id)
        await self._journal.stored(EraseTurns((response_id,)))
        last_id = await self._journal.read(reads.last_in_history, row.conversation_id)
        for conversation_id in ids:
            actor = self._actors.active(conversation_id)
            if actor is not None:
                actor.tell(Erased(response_id, last_id))
            if actor is None or actor.session is None or actor.session.is_idle:
                self._sequences.release(conversation_id, erase=True)

    async def conversation(self, principal: Principal, conversation_id: str) -> None:
        """Cancel and erase every response of the conversation.

        Raises conversation_not_found, storage_unavailable.
        """
        await self._lookup.conversation(principal, conversation_id)
        actor = self._actors.get(conversation_id)
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        actor.tell(Close(closed))
        await closed
        try:
            await self._journal.stored(EraseTurns((), conversation_id))
            # Of deletions that came at once only the first finds the actor in its place.
            self._actors.num_stored -= self._actors.active(conversation_id) is actor
        finally:
            self._actors.drop(actor)  # where nothing was erased, the next one takes turns again
        self._sequences.release(conversation_id, erase=True)
