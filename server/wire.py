"""A client's socket frame in, one validated value out: the types of the wire.

Frames are JSON text, or msgpack in binary frames under `hillstar.v1.msgpack`. Whatever arrives,
the answer is a `ClientEvent` or a `FrameError`; the latter carries the frame's `stream_id` where
it could be read, so that the error reaches the lane that caused it.
"""

import enum
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from hillstar.server.defaults import NO_DEFAULTS, ModelDefaults
from hillstar.server.errors import ApiError, invalid, unsupported_parameter
from hillstar.server.items import Message, parse_input
from hillstar.server.request import INCLUDE_SESSION, CreateResponse, Surface, parse_create
from hillstar.server.validate import (
    convert,
    decode_json,
    decode_msgpack,
    kind_of,
    missing,
    shown,
    wrong_type,
)

_Id = Annotated[str, Meta(min_length=1, max_length=256)]
_Number = Annotated[int, Meta(ge=-1, le=(1 << 53) - 1)]


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


class CancelEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`response.cancel` (Hillstar)."""

    response_id: _Id
    stream_id: str | None = None  # where an error goes


class ResumeEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`hillstar.resume`: follow a response from after `starting_after` (None: from 0)."""

    response_id: _Id
    starting_after: _Number | None = None
    stream_id: str | None = None
    include: Annotated[tuple[str, ...], Meta(max_length=16)] = ()  # "hillstar.session" subscribes


class AckEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`hillstar.ack`: this follower has everything up to `sequence_number`."""

    response_id: _Id
    sequence_number: _Number


class HintEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`hillstar.hint`: exactly one of `conversation` and `previous_response_id` is set."""

    hint: Literal["typing", "idle", "leaving"]
    conversation: _Id | None = None
    previous_response_id: _Id | None = None


class HibernateEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`hillstar.hibernate`."""

    conversation: _Id


class WakeEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`hillstar.wake`."""

    conversation: _Id


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


_LANE = re.compile(r"[A-Za-z0-9_.-]{1,256}")


def parse_client_frame(
    data: str | bytes, protocol: Protocol, defaults: ModelDefaults = NO_DEFAULTS
) -> ClientEvent:
    """Decode and validate one frame. Raises FrameError and nothing else."""
    stream_id = None
    try:
        frame = _decode(data, protocol)
        stream_id = _stream_id(frame)
        return _parse(frame, stream_id, protocol, defaults)
    except ApiError as error:
        raise FrameError(error, stream_id) from None


def _decode(data: str | bytes, protocol: Protocol) -> dict[Any, Any]:
    if protocol is Protocol.MSGPACK:
        if isinstance(data, str):
            raise invalid("This socket takes binary msgpack frames.", code="invalid_msgpack")
        frame = decode_msgpack(data)
    else:
        frame = decode_json(data)
    if not isinstance(frame, dict):
        raise invalid(f"A frame must be an object, not {kind_of(frame)}.", code="invalid_type")
    return frame


def _stream_id(frame: dict[Any, Any]) -> str | None:
    """The frame's lane, taken out of it."""
    stream_id = frame.pop("stream_id", None)
    if stream_id is None:
        return None
    if not isinstance(stream_id, str) or _LANE.fullmatch(stream_id) is None:
        raise invalid(
            f"'stream_id' is {shown(stream_id)!r}; 1 to 256 of A-Z a-z 0-9 _ . - are allowed.",
            "stream_id",
            "invalid_stream_id",
        )
    return stream_id


def _parse(
    frame: dict[Any, Any], stream_id: str | None, protocol: Protocol, defaults: ModelDefaults
) -> ClientEvent:
    kind = frame.pop("type", None)
    if kind is None:
        raise missing("type")
    if not isinstance(kind, str):
        raise wrong_type("type", kind, "a string")
    if kind == "response.create":
        surface: Surface = "hillstar" if protocol.is_hillstar else "socket"
        return CreateEvent(stream_id, parse_create(frame, surface=surface, defaults=defaults))
    if kind == "response.steer":
        return _steer(frame)
    parse = _HILLSTAR_EVENTS.get(kind) if protocol.is_hillstar else None
    if parse is None:
        raise invalid(f"Unknown event type: '{shown(kind)}'.", "type", "unknown_event")
    fields = {name: value for name, value in frame.items() if value is not None}
    return parse(fields, stream_id)


def _steer(frame: dict[Any, Any]) -> SteerEvent:
    for name in ("previous_response_id", "input"):
        if frame.get(name) is None:
            raise missing(name)
    messages = parse_input(frame.pop("input"))
    if not messages:
        raise invalid("'input' must not be empty.", "input")
    for i, message in enumerate(messages):
        if message.role != "user":
            raise invalid("Only user messages can steer.", f"input[{i}].role")
    target = convert(frame, _SteerFields)
    return SteerEvent(target.previous_response_id, messages)


class _SteerFields(msgspec.Struct, forbid_unknown_fields=True):
    previous_response_id: _Id


def _cancel(fields: dict[Any, Any], stream_id: str | None) -> CancelEvent:
    return _with_lane(convert(fields, CancelEvent), stream_id)


def _resume(fields: dict[Any, Any], stream_id: str | None) -> ResumeEvent:
    event = _with_lane(convert(fields, ResumeEvent), stream_id)
    for name in event.include:
        if name != INCLUDE_SESSION:
            raise unsupported_parameter("include", f"only '{INCLUDE_SESSION}' is, on a resume")
    return event


def _ack(fields: dict[Any, Any], stream_id: str | None) -> AckEvent:
    return convert(fields, AckEvent)


def _hint(fields: dict[Any, Any], stream_id: str | None) -> HintEvent:
    event = convert(fields, HintEvent)
    if (event.conversation is None) == (event.previous_response_id is None):
        raise invalid(
            "A hint names exactly one of 'conversation' and 'previous_response_id'.",
            "conversation",
        )
    return event


def _hibernate(fields: dict[Any, Any], stream_id: str | None) -> HibernateEvent:
    return convert(fields, HibernateEvent)


def _wake(fields: dict[Any, Any], stream_id: str | None) -> WakeEvent:
    return convert(fields, WakeEvent)


_Lane = TypeVar("_Lane", CancelEvent, ResumeEvent)


def _with_lane(event: _Lane, stream_id: str | None) -> _Lane:
    return event if stream_id is None else msgspec.structs.replace(event, stream_id=stream_id)


_HILLSTAR_EVENTS: dict[str, Callable[[dict[Any, Any], str | None], ClientEvent]] = {
    "response.cancel": _cancel,
    "hillstar.resume": _resume,
    "hillstar.ack": _ack,
    "hillstar.hint": _hint,
    "hillstar.hibernate": _hibernate,
    "hillstar.wake": _wake,
}
