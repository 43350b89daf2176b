"""The response as a pure state machine: tokens in, events out.

Determinism rule: the events and their sequence numbers are a function of the turn, its token ids
and logprobs in order, and its end; never of how the tokens were batched into `push`. That is what
lets the journal keep tokens only, and a client resume at the exact token.

`response.created`, `response.in_progress`; then, before the first text (or at the end of a turn
that was completed or ran out of tokens without any), `response.output_item.added` and
`response.content_part.added`; one `response.output_text.delta` for each token that yields text;
`…output_text.done`, `…content_part.done`, `…output_item.done` if the item was opened; and exactly
one of `response.completed`, `response.incomplete`, `response.failed`.

Token cover: a delta's `first_token` and `num_tokens` count from 0 without gaps or overlap. A token
that yields no text (a part of a character, a special token, text held back because it may become
a stop string) is covered by the next delta. Tokens after the last delta (the end-of-turn token)
are covered by none; text released at the end by no new token comes in a delta with `num_tokens`
0. `usage` counts every token up to the one that completed a stop string.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from hillstar.engine.messages import FinishReason, TokenLogprobs
from hillstar.server.request import CreateResponse


class TextDecoder(Protocol):
    """Token ids to text, one at a time (`server.detokenize`)."""

    def push(self, token_id: int) -> str:
        """The characters that this token completes; "" for a special token."""
        ...

    def flush(self) -> str:
        """What an incomplete last character amounts to (U+FFFD), else "". Ends the decoder."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, special ones included (for logprobs)."""
        ...


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a response before its first token."""

    response_id: str
    conversation_id: str | None
    created_at: int  # Unix seconds
    model: str  # the name to show
    request: CreateResponse


class TurnEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a response ended. The number of output tokens is what was pushed, up to a stop string.

    reason: stop, prefilled -> completed; length -> incomplete; cancelled -> incomplete with the
    status cancelled; refused, error -> failed with `code` and `message`.
    """

    reason: FinishReason
    completed_at: int  # Unix seconds
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    code: str | None = None
    message: str | None = None


class Event(msgspec.Struct, frozen=True):
    """Any event but the hot one: `body` holds its fields besides type and sequence_number."""

    type: str
    sequence_number: int
    body: dict[str, Any]


class TextDelta(msgspec.Struct, frozen=True):
    """`response.output_text.delta`."""

    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    first_token: int
    num_tokens: int
    logprobs: list[dict[str, Any]]  # OpenAI's, of the tokens covered; [] unless asked for


class Notice(msgspec.Struct, frozen=True):
    """A `hillstar.*` message: of a session or socket, not of a response's log."""

    type: str
    body: dict[str, Any]


class ResponseStream:
    """One response's log as it grows. Owned by one task at a time; no I/O, no clock."""

    def __init__(self, turn: Turn, decoder: TextDecoder) -> None:
        raise NotImplementedError

    @property
    def num_tokens(self) -> int:
        """Output tokens taken, the one that completed a stop string included."""
        raise NotImplementedError

    @property
    def stopped_at(self) -> int | None:
        """The number of output tokens at which a stop string was complete; later ones are lost."""
        raise NotImplementedError

    @property
    def next_sequence_number(self) -> int:
        raise NotImplementedError

    @property
    def text(self) -> str:
        """The text of all deltas so far."""
        raise NotImplementedError

    def open(self) -> list[Event | TextDelta]:
        """The events before any token; called once, first."""
        raise NotImplementedError

    def push(
        self,
        first_token: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> list[Event | TextDelta]:
        """Take output tokens `first_token …`. Ones taken before are skipped; a gap is a bug."""
        raise NotImplementedError

    def finish(self, end: TurnEnd) -> list[Event | TextDelta]:
        """End the response: the last event is terminal. Called once, last."""
        raise NotImplementedError

    def response_object(self) -> dict[str, Any]:
        """OpenAI's response object as of now (in progress, or ended)."""
        raise NotImplementedError
