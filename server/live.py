"""A response that has not ended yet: its log, its followers, and where it stands."""

import asyncio
import enum
from typing import Any

from hillstar.engine.messages import TokenLogprobs
from hillstar.server.errors import ApiError
from hillstar.server.events import Event, ResponseStream, TextDelta, TurnEnd
from hillstar.server.history import Prepared, push_all, stored_logprobs
from hillstar.server.ports import Follower, Scope
from hillstar.server.records import TurnRow
from hillstar.server.request import CreateResponse
from hillstar.server.sequence import Sequence


class Phase(enum.Enum):
    """Where an unfinished turn stands."""

    PREPARING = enum.auto()  # its prompt is being built
    OPENING = enum.auto()  # it is being stored
    QUEUED = enum.auto()  # stored; the turns before it have not ended
    RUNNING = enum.auto()  # with the engine, or parked there
    ENDING = enum.auto()  # its end is being stored
    ENDED = enum.auto()


class LiveTurn:
    """Owned by its session's actor.

    The log is kept whole while the turn lives: a replay is a slice of it. After the end it is
    rebuilt from tokens. Whoever follows has been given all of it, as far as it was posted.
    """

    def __init__(
        self,
        row: TurnRow,
        request: CreateResponse,
        stream: ResponseStream,
        phase: Phase,
        opened_at_s: float,
    ) -> None:
        self.row = row
        self.request = request
        self.stream = stream
        self.phase = phase
        self.opened_at_s = opened_at_s
        self.followers: dict[Follower, Scope | None] = {}
        self.num_posted = 0  # events
        self.scopes: set[Scope] = set()  # that created or followed it and are still there
        self.waiters: list[asyncio.Future[Any]] = []  # get the response at its end
        self.answer: asyncio.Future[Any] | None = None  # of the create that waits for storage
        self.prepared: Prepared | None = None
        self.sequence: Sequence | None = None
        self.end: TurnEnd | None = None
        self.is_stored = False
        self.is_cancelled = False
        self.is_paused = False
        self.is_rewritten = False  # the journal has forgotten what its prompt was built from
        self.num_cached_tokens = 0

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def events(self) -> list[Event | TextDelta]:
        """The log."""
        return self.stream.log

    @property
    def state(self) -> str:
        """For the metrics: `queued`, `running` or `parked`."""
        if self.is_paused:
            return "parked"
        return "running" if self.phase is Phase.RUNNING else "queued"

    @property
    def joins_history(self) -> bool:
        """Whether later turns of the conversation build on it: cancelled and failed ones do not."""
        return self.end is not None and self.end.reason in ("stop", "length", "prefilled")

    @property
    def num_context_tokens(self) -> int:
        """Prompt and output so far."""
        num_prompt = self.prepared.prompt.num_tokens if self.prepared is not None else 0
        return num_prompt + self.stream.num_tokens

    def output_ids(self) -> bytes:
        """What the response said, up to the token that completed a stop string."""
        said = self.row.output_ids if self.sequence is None else self.sequence.output_ids
        return bytes(said[: 4 * self.stream.num_tokens])

    def output_logprobs(self) -> list[TokenLogprobs]:
        """The logprobs of `output_ids`; [] where they were not asked for."""
        if self.sequence is None:
            entries = stored_logprobs(self.row) or []
        else:
            entries = self.sequence.logprobs
        return entries[: self.stream.num_tokens]

    def emit(self, events: list[Event | TextDelta]) -> None:
        """Give what the log has gained to everybody who follows."""
        self.num_posted += len(events)
        for follower in self.followers:
            follower.post(self.row.id, events)

    def restore(self, old: "LiveTurn | None") -> None:
        """Catch up with the row's stored tokens; take over who followed `old`."""
        self.is_stored = True
        self.stream.open()
        push_all(self.stream, self.row)
        if old is not None:
            self.is_cancelled, self.is_paused = old.is_cancelled, old.is_paused
            self.scopes, self.waiters, self.followers = old.scopes, old.waiters, old.followers
            self.num_posted = old.num_posted
        self.catch_up(self.events)

    def catch_up(self, events: list[Event | TextDelta]) -> None:
        """Give every follower what it lacks of the log `events`."""
        missed = events[self.num_posted :]
        if missed:
            self.emit(missed)

    def follow(self, follower: Follower, scope: Scope | None, next_number: int) -> None:
        """Give the log from `next_number` on, then what comes. Following twice moves it."""
        self.unfollow(follower)
        if scope is not None:
            self.scopes.add(scope)
        self.followers[follower] = scope
        missed = self.events[next_number:]
        if missed:
            follower.post(self.row.id, missed)

    def unfollow(self, follower: Follower) -> None:
        self.followers.pop(follower, None)

    def leave(self, scope: Scope) -> bool:
        """The scope is gone. True: it held this response, and nobody else follows it."""
        if scope not in self.scopes:
            return False
        self.scopes.remove(scope)
        self.followers = {
            follower: its for follower, its in self.followers.items() if its is not scope
        }
        return not self.followers

    def answer_waiters(self, response: dict[str, Any]) -> None:
        """Everybody who waits for the end gets the response."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(response)
        self.waiters.clear()

    def lose(self, error: ApiError) -> None:
        """Nobody will know of the end: tell who waits for it and who follows."""
        for follower in self.followers:
            follower.lost(self.row.id, error)
        self.followers.clear()
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self.waiters.clear()

    def reject(self, error: Exception) -> None:
        """Tell the create that waits."""
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error)
        self.answer = None
