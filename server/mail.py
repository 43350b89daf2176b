"""What a session actor is told. `answer` futures are set by the actor and awaited by the Hub."""

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from hillstar.engine.messages import Output
from hillstar.server.errors import ApiError
from hillstar.server.history import Prepared
from hillstar.server.live import LiveTurn
from hillstar.server.ports import Created, Followed, Follower, Scope
from hillstar.server.request import CreateResponse
from hillstar.server.sequence import Sequence
from hillstar.server.text import ParentContext


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """What a fork begins from. `context` None: in the journal."""

    parent_id: str
    context: ParentContext | None
    is_stored: bool  # the journal has the parent
    is_private: bool  # the context holds what must not be stored


@dataclass(frozen=True, slots=True, eq=False)
class MustFork:
    """The answer to an Open whose parent is not the idle end of its conversation."""

    base: Base


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Open:
    """A new turn. `parent_id`: only if that is the idle end, else the answer is MustFork."""

    request: CreateResponse
    scope: Scope | None
    follower: Follower | None
    client_key: str | None
    answer: "asyncio.Future[Created | MustFork]"
    parent_id: str | None = None
    base: Base | None = None  # the first turn of a fork


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FollowIt:
    """`answer` None: this response is not live here."""

    response_id: str
    starting_after: int | None
    follower: Follower
    scope: Scope | None
    answer: "asyncio.Future[Followed | None]"


@dataclass(frozen=True, slots=True, eq=False)
class Unfollow:
    response_id: str
    follower: Follower


@dataclass(frozen=True, slots=True, eq=False)
class Show:
    """The response object as it stands; None: not live here."""

    response_id: str
    answer: "asyncio.Future[dict[str, Any] | None]"


@dataclass(frozen=True, slots=True, eq=False)
class AwaitEnd:
    """The response object at its end; None: not live here. `cancel`: and end it."""

    response_id: str
    cancel: bool
    answer: "asyncio.Future[dict[str, Any] | None]"


@dataclass(frozen=True, slots=True, eq=False)
class ShowInput:
    """The request of a live response; None: not live here."""

    response_id: str
    answer: "asyncio.Future[CreateResponse | None]"


@dataclass(frozen=True, slots=True, eq=False)
class Disconnected:
    scope: Scope


@dataclass(frozen=True, slots=True, eq=False)
class Forget:
    """Drop an ended response that is kept in memory only. True: it was here."""

    response_id: str
    answer: "asyncio.Future[bool]"


@dataclass(frozen=True, slots=True, eq=False)
class Erased:
    """The journal has erased a response; `last_id` is the end of its conversation now."""

    response_id: str
    last_id: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Close:
    """The conversation is being deleted: take no more, cancel what lives; answer when it has."""

    answer: "asyncio.Future[None]"


class Arrived(msgspec.Struct, frozen=True, eq=False):
    """Tokens of a sequence are stored. A struct, because there is one for every token."""

    sequence: Sequence
    output: Output


@dataclass(frozen=True, slots=True, eq=False)
class Lost:
    """Tokens of a sequence could not be stored."""

    sequence: Sequence
    error: Exception


@dataclass(frozen=True, slots=True, eq=False)
class PromptBuilt:
    turn: LiveTurn
    result: Prepared | ApiError


@dataclass(frozen=True, slots=True, eq=False)
class TurnStored:
    turn: LiveTurn
    error: Exception | None


@dataclass(frozen=True, slots=True, eq=False)
class EndStored:
    turn: LiveTurn
    error: Exception | None


@dataclass(frozen=True, slots=True, eq=False)
class Failed:
    """Work that an actor had started failed unexpectedly."""

    error: BaseException


Mail = (
    Open
    | FollowIt
    | Unfollow
    | Show
    | ShowInput
    | AwaitEnd
    | Disconnected
    | Forget
    | Erased
    | Close
    | Arrived
    | Lost
    | PromptBuilt
    | TurnStored
    | EndStored
    | Failed
)
