"""Events as clients see them: checked against the public packages, and read back from a log."""

import json
from collections.abc import Iterable
from typing import Any

import openresponses_types
import pydantic
from openai.types.responses import ResponsesServerEvent

from hillstar.server.encode import encode, encode_delta
from hillstar.server.events import Event, Notice, TextDelta
from hillstar.server.wire import Protocol

TERMINAL = ("response.completed", "response.incomplete", "response.failed")
_MODELS = {
    "response.created": openresponses_types.ResponseCreatedStreamingEvent,
    "response.queued": openresponses_types.ResponseQueuedStreamingEvent,
    "response.in_progress": openresponses_types.ResponseInProgressStreamingEvent,
    "response.output_item.added": openresponses_types.ResponseOutputItemAddedStreamingEvent,
    "response.output_item.done": openresponses_types.ResponseOutputItemDoneStreamingEvent,
    "response.content_part.added": openresponses_types.ResponseContentPartAddedStreamingEvent,
    "response.content_part.done": openresponses_types.ResponseContentPartDoneStreamingEvent,
    "response.output_text.delta": openresponses_types.ResponseOutputTextDeltaStreamingEvent,
    "response.output_text.done": openresponses_types.ResponseOutputTextDoneStreamingEvent,
    "response.completed": openresponses_types.ResponseCompletedStreamingEvent,
    "response.incomplete": openresponses_types.ResponseIncompleteStreamingEvent,
    "response.failed": openresponses_types.ResponseFailedStreamingEvent,
}
_OPENAI: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponsesServerEvent)


def validate(event: dict[str, Any]) -> None:
    """Raise unless the event is one of openresponses-types' and one of the openai package's."""
    _MODELS[event["type"]].model_validate(event)
    _OPENAI.validate_python(event)


def validate_response(response: dict[str, Any]) -> None:
    """Raise unless it is a response resource of openresponses-types."""
    openresponses_types.ResponseResource.model_validate(response)


def as_maps(
    events: Iterable[Event | TextDelta], protocol: Protocol = Protocol.JSON
) -> list[dict[str, Any]]:
    """The JSON frames of events, decoded."""
    return [json.loads(payload(event, protocol)) for event in events]


def payload(
    event: Event | TextDelta | Notice,
    protocol: Protocol = Protocol.JSON,
    *,
    stream_id: str | None = None,
    r: int = 1,
) -> bytes:
    """What the frame of any event carries."""
    if isinstance(event, TextDelta):
        return encode_delta(event, protocol, stream_id, r)
    return encode(event, protocol, stream_id=stream_id, r=r)


def deltas(events: Iterable[Event | TextDelta]) -> list[TextDelta]:
    return [event for event in events if isinstance(event, TextDelta)]


def text_of(events: Iterable[Event | TextDelta]) -> str:
    """What a client that concatenates deltas reads."""
    return "".join(delta.delta for delta in deltas(events))
