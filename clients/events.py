"""What a stream yields: the response's events, and what happens to the connection meanwhile."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})
"""The types of the event that ends a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one response."""

    input_tokens: int = 0
    cached_tokens: int = 0  # of the input: their KV was found instead of computed
    output_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One response as the server describes it; `raw` is its whole object."""

    id: str
    conversation_id: str | None
    status: str  # queued, in_progress, completed, incomplete, failed, cancelled
    text: str
    usage: Usage
    error_code: str | None = None
    error_message: str | None = None
    incomplete_reason: str | None = None
    raw: Mapping[str, Any] = field(repr=False)

    @classmethod
    def from_wire(cls, raw: Mapping[str, Any]) -> "Response":
        """Read a response object of the protocol."""
        usage = raw.get("usage") or {}
        error = raw.get("error") or {}
        return cls(
            id=raw["id"],
            conversation_id=(raw.get("conversation") or {}).get("id"),
            status=raw["status"],
            text="".join(
                part.get("text", "")
                for item in raw.get("output") or ()
                if item.get("type") == "message"
                for part in item.get("content") or ()
                if part.get("type") == "output_text"
            ),
            usage=Usage(
                input_tokens=usage.get("input_tokens", 0),
                cached_tokens=(usage.get("input_tokens_details") or {}).get("cached_tokens", 0),
                output_tokens=usage.get("output_tokens", 0),
            ),
            error_code=error.get("code"),
            error_message=error.get("message"),
            incomplete_reason=(raw.get("incomplete_details") or {}).get("reason"),
            raw=raw,
        )


@dataclass(frozen=True, slots=True)
class Created:
    """The response exists; always the first event of the server's."""

    response: Response
    sequence_number: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of text. Where the reader lags, adjacent pieces come as one."""

    text: str
    sequence_number: int  # of the last part
    output_index: int
    content_index: int
    first_token: int  # index of the first output token that the text covers
    num_tokens: int
    logprobs: tuple[Mapping[str, Any], ...] = ()  # of the tokens covered, where asked for


@dataclass(frozen=True, slots=True)
class OtherEvent:
    """Any other event of the protocol, as it came."""

    type: str
    sequence_number: int
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finished:
    """The terminal event; nothing follows it. `response.status` says how it ended."""

    response: Response
    sequence_number: int


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The connection is gone; it is being made again. The text so far stays valid."""

    reason: str
    attempt: int  # 1 = the first attempt to come back
    retry_in_s: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """The connection is back and the stream goes on behind the last event seen."""

    next_sequence_number: int
    kv: Mapping[str, Any]  # `tier`, `cached_tokens`, `wake_ms` where the server says


StreamEvent = Created | TextDelta | OtherEvent | Finished | ConnectionLost | Resumed
