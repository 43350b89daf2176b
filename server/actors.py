"""The table of active actors: always addressable, activated by use, dropped when idle."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator

from hillstar.server.actor import Actor
from hillstar.server.conversation import Services
from hillstar.server.errors import ApiError, conversation_not_found
from hillstar.server.mail import AwaitEnd, Disconnected
from hillstar.server.ports import Scope
from hillstar.server.records import ConversationRow
from hillstar.server.runqueue import RunQueue
from hillstar.server.tasks import Tasks

log = logging.getLogger(__name__)


class ActorTable:
    """Owner of conversation id → actor, and of which conversations a scope has touched.

    An idle actor has no state that the journal lacks, so it is simply dropped: what it wrote is
    queued before the claim of its next activation, which loads only after that. Those that do
    know more (`store: false`) are kept for the connections it is for, while there is room.
    """

    def __init__(self, services: Services, *, max_active: int, idle_timeout_s: float) -> None:
        self._services = services
        self._max_active = max_active
        self._idle_timeout_s = idle_timeout_s
        self._tasks = Tasks()
        self._queue = RunQueue(services.loop)
        self._actors: dict[str, Actor] = {}  # least recently asked for first
        self._epochs = itertools.count(time.time_ns())
        self._touched: dict[Scope, set[str]] = {}
        self._entered: Counter[Scope] = Counter()
        self._left: set[Scope] = set()
        self._num_crashes = 0  # of actors that are gone
        self.num_stored = 0  # conversations in the journal

    def __len__(self) -> int:
        return len(self._actors)

    def __iter__(self) -> Iterator[Actor]:
        return iter(self._actors.values())

    @property
    def num_crashes(self) -> int:
        return self._num_crashes + sum(actor.num_crashes for actor in self)

    def active(self, conversation_id: str) -> Actor | None:
        """The actor if it is active."""
        return self._actors.get(conversation_id)

    def get(self, conversation_id: str) -> Actor:
        """The conversation's actor, activated if need be."""
        actor = self._actors.pop(conversation_id, None)
        if actor is None:
            self._make_room(for_one=True)
            actor = self._new(conversation_id)
            actor.activate()
        actor.idle_since_s = self._services.loop.time()
        self._actors[conversation_id] = actor
        return actor

    def begin(self, row: ConversationRow, *, is_durable: bool) -> Actor:
        """The actor of a new conversation."""
        self._make_room(for_one=True)
        actor = self._actors[row.id] = self._new(row.id)
        actor.begin(row, is_durable=is_durable)
        return actor

    def drop(self, actor: Actor, error: ApiError | None = None) -> None:
        """End an activation; whoever still asks it something gets `error`: it is not there."""
        if self._actors.get(actor.conversation_id) is actor:
            del self._actors[actor.conversation_id]
        self._num_crashes += actor.num_crashes
        actor.num_crashes = 0
        for message in actor.retire():
            answer: asyncio.Future[object] | None = getattr(message, "answer", None)
            if answer is not None and not answer.done():
                answer.set_exception(error or conversation_not_found(actor.conversation_id))
        session = actor.session
        if session is not None:
            session.forget_all()

    @contextlib.contextmanager
    def entered(self, scope: Scope | None) -> Iterator[None]:
        """While a create or follow of this scope is on its way, its leaving waits."""
        if scope is None:
            yield
            return
        self._entered[scope] += 1
        try:
            yield
        finally:
            self._entered[scope] -= 1
            if not self._entered[scope]:
                del self._entered[scope]
                if scope in self._left:
                    self._left.discard(scope)
                    self.leave(scope)

    def touch(self, scope: Scope | None, conversation_id: str) -> None:
        """The scope has something to do with this conversation."""
        if scope is not None:
            self._touched.setdefault(scope, set()).add(conversation_id)

    def leave(self, scope: Scope) -> None:
        """Tell every actor that the scope has touched that it is gone."""
        if scope in self._entered:
            self._left.add(scope)
            return
        self._services.leases.leave(scope)
        for conversation_id in self._touched.pop(scope, ()):
            actor = self._actors.get(conversation_id)
            if actor is not None:
                actor.tell(Disconnected(scope))

    def sweep(self) -> None:
        """Drop what has been idle for long, and memory-only conversations nobody can continue."""
        for touched in self._touched.values():
            touched.intersection_update(self._actors)  # a dropped one holds nothing of the scope
        now = self._services.loop.time()
        for actor in list(self):
            for response_id in actor.session.overdue(now) if actor.session is not None else ():
                actor.tell(AwaitEnd(response_id, True, self._services.loop.create_future()))
            if not actor.is_idle:
                actor.idle_since_s = now
            elif actor.is_durable:
                is_old = now - actor.idle_since_s >= self._idle_timeout_s
                if is_old and not actor.knows_more:
                    self.drop(actor)
            elif actor.session is not None and actor.session.is_orphan:
                self.drop(actor)
        self._make_room()

    async def close(self) -> None:
        await self._tasks.close()

    def _make_room(self, *, for_one: bool = False) -> None:
        """Above the cap, drop idle ones: those first that lose nothing, asked for longest ago."""
        excess = len(self._actors) + for_one - self._max_active
        if excess <= 0:
            return
        idle = [actor for actor in self if actor.is_idle]
        idle.sort(key=lambda actor: actor.knows_more)
        for actor in idle[:excess]:
            self.drop(actor)

    def _new(self, conversation_id: str) -> Actor:
        new_epoch: Callable[[], int] = self._epochs.__next__
        return Actor(
            self._services, self._queue, self._tasks, conversation_id, new_epoch, self.drop
        )
