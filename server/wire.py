"""A client's socket frame in, one validated value out: the types of the wire.

Frames are JSON text, or msgpack in binary frames under `hillstar.v1.msgpack`. Whatever arrives,
the answer is a `ClientEvent` or a `FrameError`; the latter carries the frame's `stream_id` where
it could be read, so that the error reaches the lane that caused it.
"""

import enum
from typing import Literal

import msgspec

from hillstar.server.errors import ApiError
from hillstar.server.request import CreateResponse, Message


class Protocol(enum.Enum):
    """A WebSocket subprotocol; the value is its name on the wire (None: none negotiated)."""

    OPENAI = None
    JSON = "hillstar.v1.json"
    MSGPACK = "hillstar.v1.msgpack"

    @property
    def is_hillstar(self) -> bool:
        return self is not Protocol.OPENAI


class FrameError(ApiError):
    """An ApiError of one frame. `stream_id`: its lane, None for the default or an unknown one."""

    def __init__(self, cause: ApiError, stream_id: str | None) -> None:
        super().__init__(
            cause.status,
            cause.code,
            cause.message,
            param=cause.param,
            type=cause.type,
            retryable=cause.retryable,
            retry_after_s=cause.retry_after_s,
        )
        self.stream_id = stream_id


class CreateEvent(msgspec.Struct, frozen=True):
    """`response.create`."""

    stream_id: str | None
    request: CreateResponse


class CancelEvent(msgspec.Struct, frozen=True):
    """`response.cancel` (Hillstar)."""

    response_id: str
    stream_id: str | None = None  # where an error goes


class ResumeEvent(msgspec.Struct, frozen=True):
    """`hillstar.resume`: follow a response from after `starting_after` (None: from 0)."""

    response_id: str
    starting_after: int | None = None
    stream_id: str | None = None
    include: tuple[str, ...] = ()  # "hillstar.session" subscribes


class AckEvent(msgspec.Struct, frozen=True):
    """`hillstar.ack`: this follower has everything up to `sequence_number`."""

    response_id: str
    sequence_number: int


class HintEvent(msgspec.Struct, frozen=True):
    """`hillstar.hint`: exactly one of `conversation` and `previous_response_id` is set."""

    hint: Literal["typing", "idle", "leaving"]
    conversation: str | None = None
    previous_response_id: str | None = None


class HibernateEvent(msgspec.Struct, frozen=True):
    """`hillstar.hibernate`."""

    conversation: str


class WakeEvent(msgspec.Struct, frozen=True):
    """`hillstar.wake`."""

    conversation: str


class SteerEvent(msgspec.Struct, frozen=True):
    """`response.steer`: user messages for a running response."""

    previous_response_id: str
    input: tuple[Message, ...]


ClientEvent = (
    CreateEvent
    | CancelEvent
    | ResumeEvent
    | AckEvent
    | HintEvent
    | HibernateEvent
    | WakeEvent
    | SteerEvent
)


def parse_client_frame(data: str | bytes, protocol: Protocol) -> ClientEvent:
    """Decode and validate one frame. Raises FrameError and nothing else."""
    raise NotImplementedError
