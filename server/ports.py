"""What passes through the Hub's edge: who asks, who listens, and the answers that are values.

The front (connections, HTTP) implements `Scope`, `Follower` and `Observer`; the Hub implements
everything else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from hillstar.engine.messages import EngineStats, Ready
from hillstar.server.errors import ApiError
from hillstar.server.events import Event, TextDelta

EngineState = Literal["starting", "ready", "down", "failed"]
"""starting: it loads. down: it died, another will be started. failed: so too, but the last ones
could not start."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. Every look-up compares `tenant`; somebody else's id is an unknown id."""

    tenant: str
    operator: bool = False


class Scope(Protocol):
    """One connection's (or one HTTP request's) identity; compared by identity, hashable.

    A `store: false` response is a parent only within its scope, and `Hub.disconnected(scope)`
    ends what the scope holds. A scope is also what holds a conversation's writer lease.
    """

    def superseded(self, conversation_id: str) -> None:
        """A newer scope writes to this conversation now. Never blocks, never raises."""
        ...


class Follower(Protocol):
    """Receives one response's events in order; compared by identity."""

    def post(self, response_id: str, events: Sequence[Event | TextDelta]) -> None:
        """Take the next events (`sequence_number`s contiguous). Never blocks, never raises."""
        ...

    def lost(self, response_id: str, error: ApiError) -> None:
        """Nothing more will come, though the response has not ended. Never blocks or raises."""
        ...


class Observer(Protocol):
    """Where latencies go (histograms); called on the loop, must be cheap."""

    def ttft(self, seconds: float) -> None:
        """Time from the acceptance of a response to its first output token."""
        ...

    def itl(self, gaps_s: Sequence[float], /) -> None:
        """What one step of the engine ended: for each of its responses the time between two
        batches of tokens, divided by the tokens."""
        ...

    def step(self, seconds: float) -> None:
        """Duration of one engine step."""
        ...


@dataclass(frozen=True, slots=True)
class Created:
    """A response exists and is stored. `replayed`: it did already (same `client_event_id`)."""

    response_id: str
    conversation_id: str
    replayed: bool


@dataclass(frozen=True, slots=True)
class Followed:
    """The answer to a resume; `next_sequence_number` is the number of the next event posted.

    kv: `tier`, `cached_tokens`, `wake_ms` as PROTOCOL.md's `hillstar.resumed` has them.
    """

    response_id: str
    conversation_id: str
    recovered: bool
    next_sequence_number: int
    kv: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubStats:
    """A snapshot of everything the Hub counts."""

    engine_state: EngineState = "starting"
    loading: tuple[int, int] = (0, 0)  # bytes of weights loaded, of how many
    ready: Ready | None = None  # the running engine's own words
    engine: EngineStats = field(default_factory=EngineStats)  # totals of all engines
    engine_error: str | None = None  # why the last engine ended
    num_engine_restarts: int = 0
    num_sessions: Mapping[str, int] = field(default_factory=dict)  # awake, parked, hibernated
    num_responses: Mapping[str, int] = field(default_factory=dict)  # queued, running, parked
    num_actor_restarts: int = 0
    num_journal_commits: int = 0
    num_journal_tokens: int = 0
    storage_available: bool = True
    draining: bool = False
