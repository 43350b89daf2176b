"""The Hub: every operation on responses and conversations, and the way from an id to its actor.

The front calls the Hub and nothing below it. Coroutine methods raise `ApiError`; the plain ones
never raise and never block. Everything runs on the event loop that called `start`.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hillstar.server import reads
from hillstar.server.actors import ActorTable
from hillstar.server.census import take_census
from hillstar.server.conversation import Services
from hillstar.server.create_keys import CreateKeys
from hillstar.server.deletion import Deletion
from hillstar.server.directory import Directory
from hillstar.server.engineport import Engine
from hillstar.server.errors import (
    server_draining,
    storage_unavailable,
)
from hillstar.server.history import Historian, TextLayer, decode_request
from hillstar.server.items import Message
from hillstar.server.journal import Journal
from hillstar.server.leases import WriterLeases
from hillstar.server.lookup import Lookup
from hillstar.server.mail import (
    AwaitEnd,
    FollowIt,
    Mail,
    Show,
    ShowInput,
    Unfollow,
)
from hillstar.server.monitor import EngineMonitor
from hillstar.server.opening import Opening, conversation_object, new_conversation
from hillstar.server.ports import (
    Created,
    Followed,
    Follower,
    HubStats,
    Observer,
    Principal,
    Scope,
)
from hillstar.server.records import OpenConversation, TurnRow
from hillstar.server.request import CreateResponse
from hillstar.server.resource import input_items
from hillstar.server.sequences import SequenceTable

SWEEP_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HubLimits:
    """The Hub's bounds; what exceeds the first two is refused with `server_overloaded`."""

    max_responses: int = 8192  # unfinished at once
    max_responses_per_tenant: int = 4096
    max_active_sessions: int = 16384  # actors in memory; idle ones make room first
    idle_timeout_s: float = 300.0  # after which an idle actor leaves memory


class Hub:
    """Composes the parts below the front, and answers for them."""

    def __init__(
        self,
        *,
        journal: Journal,
        engine: Engine,
        text: TextLayer,
        observer: Observer,
        model_name: str,
        max_model_len: int,
        limits: HubLimits | None = None,
    ) -> None:
        """Takes the journal and the engine over: `close` closes them."""
        limits = limits or HubLimits()
        self._journal = journal
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._historian = Historian(
            journal, text, model_name=model_name, max_model_len=max_model_len
        )
        self._sequences = SequenceTable(engine, journal, observer, self._loop.time)
        self._monitor = EngineMonitor(self._sequences, self._historian, observer)
        self._directory = Directory(
            max_responses=limits.max_responses,
            max_responses_per_tenant=limits.max_responses_per_tenant,
        )
        self._keys = CreateKeys(journal, self._directory)
        self._actors = ActorTable(
            Services(
                journal=journal,
                sequences=self._sequences,
                historian=self._historian,
                directory=self._directory,
                leases=WriterLeases(),
                loop=self._loop,
            ),
            max_active=limits.max_active_sessions,
            idle_timeout_s=limits.idle_timeout_s,
        )
        self._lookup = Lookup(journal, self._directory, self._actors)
        self._deletion = Deletion(
            journal, self._directory, self._lookup, self._actors, self._sequences
        )
        self._opening = Opening(self._lookup, self._actors, self._keys, model_name=model_name)
        self._is_draining = False
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Start the journal and the engine, take unfinished responses up again.

        Returns as soon as requests are accepted; the engine may still be loading
        (`stats().engine_state`), responses then wait for it.
        """
        self._journal.start(self._sequences.storage)
        await self._engine.start(self._monitor)
        self._actors.num_stored = await self._journal.read(reads.num_conversations)
        for conversation_id in await self._journal.read(reads.unfinished_conversations):
            self._actors.get(conversation_id)
        self._sweep()

    async def drain(self, deadline_s: float) -> None:
        """Refuse new responses; wait for the running ones; stop at the deadline what remains.

        What has been sent by then is stored; the rest is taken up by the next server on the same
        data directory.
        """
        self._is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self._num_running():
                    await self._directory.wait_ended()
        self._sequences.close()
        await self._journal.flushed()

    async def close(self) -> None:
        """Stop the engine and close the journal. Responses still running stay resumable."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._sequences.close()
        await self._engine.close()
        await self._actors.close()
        await self._journal.close()
        self._historian.close()

    async def create(
        self,
        principal: Principal,
        request: CreateResponse,
        *,
        scope: Scope | None,
        follower: Follower | None,
    ) -> Created:
        """Open a response. Returns once it is stored.

        The follower gets every event from sequence number 0 on; the first ones may be posted
        before the caller runs again. `scope=None`: nothing happens to it on a disconnect
        (`background`). A `client_event_id` seen before answers with the response it made and
        follows that one from 0.

        Raises ApiError: model_not_found, previous_response_not_found, conversation_not_found,
        previous_response_in_progress, context_length_exceeded, server_overloaded,
        server_draining, storage_unavailable, and what the text layer refuses. What the engine
        refuses later ends the response as `failed`.
        """
        if self._is_draining:
            raise server_draining()
        if request.store and not self._journal.available:
            raise storage_unavailable("The server cannot store responses at the moment.")
        with self._actors.entered(scope):
            created = await self._opening.create(principal, request, scope, follower)
            if created.replayed and follower is not None:
                await self.follow(
                    principal,
                    created.response_id,
                    starting_after=None,
                    follower=follower,
                    scope=scope,
                )
            return created

    async def follow(
        self,
        principal: Principal,
        response_id: str,
        *,
        starting_after: int | None,
        follower: Follower,
        scope: Scope | None,
    ) -> Followed:
        """Follow a response: the events after `starting_after` (None: all), then live ones.

        Replay and attachment are one step of the actor: no gap, no duplicate. Events may be
        posted before the caller runs again, none before the answer is decided. A paused
        response goes on. Works on finished responses too. Raises response_not_found.
        """

        def ask(answer: "asyncio.Future[Followed | None]") -> Mail:
            return FollowIt(
                response_id=response_id,
                starting_after=starting_after,
                follower=follower,
                scope=scope,
                answer=answer,
            )

        with self._actors.entered(scope):
            answer = await self._lookup.ask_live(principal, response_id, ask, scope)
            if not isinstance(answer, TurnRow):
                return answer
            recalled = await self._historian.recall(answer)
        start = 0 if starting_after is None else starting_after + 1
        start = max(0, min(start, len(recalled.events)))
        if start < len(recalled.events):
            follower.post(response_id, recalled.events[start:])
        kv = {"tier": None, "cached_tokens": 0, "wake_ms": 0}
        return Followed(response_id, answer.conversation_id, True, start, kv)

    def unfollow(self, response_id: str, follower: Follower) -> None:
        """Post no more of this response to the follower; nothing else changes."""
        place = self._directory.find(response_id)
        actor = self._actors.active(place.conversation_id) if place is not None else None
        if actor is not None:
            actor.tell(Unfollow(response_id, follower))

    def disconnected(self, scope: Scope) -> None:
        """The scope is gone: its followers are dropped, and each running response it created or
        followed which nobody else follows goes by its `on_disconnect`: continue, cancel, pause.
        """
        self._actors.leave(scope)

    async def cancel(self, principal: Principal, response_id: str) -> dict[str, Any]:
        """End a response in whatever state it is and return it; idempotent.

        Followers get the terminal event before this returns. Raises response_not_found.
        """
        return await self._await_end(principal, response_id, cancel=True)

    async def wait_done(self, principal: Principal, response_id: str) -> dict[str, Any]:
        """The response object once it has ended. Raises response_not_found."""
        return await self._await_end(principal, response_id, cancel=False)

    async def get(self, principal: Principal, response_id: str) -> dict[str, Any]:
        """The response object as it stands. Raises response_not_found."""

        def ask(answer: "asyncio.Future[dict[str, Any] | None]") -> Mail:
            return Show(response_id, answer)

        answer = await self._lookup.ask_live(principal, response_id, ask)
        if isinstance(answer, TurnRow):
            return (await self._historian.recall(answer)).response
        return answer

    async def input_items(self, principal: Principal, response_id: str) -> list[dict[str, Any]]:
        """The response's own input as item objects, oldest first. Raises response_not_found."""

        def ask(answer: "asyncio.Future[CreateResponse | None]") -> Mail:
            return ShowInput(response_id, answer)

        answer = await self._lookup.ask_live(principal, response_id, ask)
        request = decode_request(answer.request) if isinstance(answer, TurnRow) else answer
        return input_items(response_id, request.input)

    async def delete(self, principal: Principal, response_id: str) -> None:
        """Cancel if running, then erase the response's tokens, text and unshared blocks.

        Later turns stay readable; what is continued from them no longer knows this turn.
        Raises response_not_found.
        """
        await self._await_end(principal, response_id, cancel=True)
        await self._deletion.response(response_id)

    async def create_conversation(
        self,
        principal: Principal,
        metadata: Mapping[str, str],
        items: Sequence[Message] = (),
    ) -> dict[str, Any]:
        """An empty conversation, or one whose first turn begins with `items`; the object.

        Raises server_draining, storage_unavailable.
        """
        if self._is_draining:
            raise server_draining()
        row = new_conversation(principal, metadata=metadata, items=items)
        await self._journal.stored(OpenConversation(row))
        self._actors.num_stored += 1
        return conversation_object(row)

    async def get_conversation(self, principal: Principal, conversation_id: str) -> dict[str, Any]:
        """The conversation object. Raises conversation_not_found."""
        return conversation_object(await self._lookup.conversation(principal, conversation_id))

    async def delete_conversation(self, principal: Principal, conversation_id: str) -> None:
        """Cancel and erase every response of the conversation.

        Raises conversation_not_found, storage_unavailable.
        """
        await self._deletion.conversation(principal, conversation_id)

    async def hint(
        self,
        principal: Principal,
        hint: str,
        *,
        conversation_id: str | None = None,
        previous_response_id: str | None = None,
    ) -> None:
        """`typing` activates the conversation ahead of its next turn. Never an error."""
        if hint != "typing":
            return
        if previous_response_id is not None:
            place = await self._lookup.find(principal, previous_response_id)
            conversation_id = place.conversation_id if place is not None else None
        elif conversation_id is not None:
            row = await self._journal.read(reads.load_conversation_row, conversation_id)
            if row is None or row.tenant != principal.tenant:
                return
        if conversation_id is not None:
            self._actors.get(conversation_id)

    def stats(self) -> HubStats:
        """A snapshot for /metrics and the health endpoints."""
        return take_census(
            self._monitor, self._actors, self._journal, is_draining=self._is_draining
        )

    async def _await_end(
        self, principal: Principal, response_id: str, *, cancel: bool
    ) -> dict[str, Any]:
        def ask(answer: "asyncio.Future[dict[str, Any] | None]") -> Mail:
            return AwaitEnd(response_id, cancel, answer)

        answer = await self._lookup.ask_live(principal, response_id, ask)
        if isinstance(answer, TurnRow):
            return (await self._historian.recall(answer)).response
        return answer

    def _num_running(self) -> int:
        """Unfinished responses that nobody has paused."""
        sessions = [actor.session for actor in self._actors]
        return sum(
            not turn.is_paused
            for session in sessions
            if session is not None
            for turn in session.turns
        )

    def _sweep(self) -> None:
        self._actors.sweep()
        self._keys.sweep()
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
