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
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import msgspec

from hillstar.engine.messages import TokenLogprobs
from hillstar.server.ids import output_item_id
from hillstar.server.resource import (
    Turn,
    TurnEnd,
    logprob,
    output_item,
    output_text,
    response_object,
    status_of,
)
from hillstar.server.stops import StopMatcher

__all__ = ["Event", "Notice", "ResponseStream", "TextDecoder", "TextDelta", "Turn", "TurnEnd"]

_OUTPUT_INDEX = 0  # the one output item,
_CONTENT_INDEX = 0  # and its one part


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


class Event(msgspec.Struct, frozen=True):
    """Any event but the hot one: `body` holds its fields besides type and sequence_number."""

    type: str
    sequence_number: int
    body: dict[str, Any]


@dataclass(frozen=True)
class Part:
    """The part of an item that deltas belong to: one value for all of them."""

    item_id: str
    output_index: int
    content_index: int

    @cached_property
    def json_fields(self) -> bytes:
        """`,"item_id":…,"output_index":…,"content_index":…`: each delta repeats it."""
        return b',"item_id":%b,"output_index":%d,"content_index":%d' % (
            msgspec.json.encode(self.item_id),
            self.output_index,
            self.content_index,
        )


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """`response.output_text.delta`."""

    sequence_number: int
    part: Part
    delta: str
    first_token: int
    num_tokens: int
    logprobs: Sequence[dict[str, Any]] = ()  # OpenAI's, of the tokens covered; if asked for


class Notice(msgspec.Struct, frozen=True):
    """A `hillstar.*` message: of a session or socket, not of a response's log."""

    type: str
    body: dict[str, Any]


class ResponseStream:
    """One response's log as it grows. Owned by one task at a time; no I/O, no clock.

    log: every event so far; an event's `sequence_number` is its place there. num_tokens: output
    tokens taken, the one that completed a stop string included. stopped_at: the number of output
    tokens at which a stop string was complete; later ones are lost.
    """

    def __init__(self, turn: Turn, decoder: TextDecoder) -> None:
        self.log: list[Event | TextDelta] = []
        self.num_tokens = 0
        self.stopped_at: int | None = None
        self._turn = turn
        self._decoder = decoder
        self._decode = decoder.push
        options = turn.request.hillstar
        self._stops = StopMatcher(options.stop) if options.stop else None
        self._first_stop_token = options.min_tokens  # as with EOS, none may stop it before
        self._wants_logprobs = turn.request.wants_logprobs
        self._part = Part(
            output_item_id(turn.response_id, _OUTPUT_INDEX), _OUTPUT_INDEX, _CONTENT_INDEX
        )
        self._item_is_open = False
        self._end: TurnEnd | None = None
        self._num_covered = 0  # tokens covered by deltas
        self._logprobs: list[dict[str, Any]] = []  # of the tokens covered
        self._uncovered_logprobs: list[dict[str, Any]] = []

    @property
    def text(self) -> str:
        """The text of all deltas so far."""
        return "".join(event.delta for event in self.log if isinstance(event, TextDelta))

    def open(self) -> list[Event | TextDelta]:
        """The events before any token; called once, first."""
        assert not self.log, "a stream is opened once"
        created = self.response_object()
        self._add("response.created", {"response": created})
        self._add("response.in_progress", {"response": created})
        return self.log[:]

    def push(
        self,
        first_token: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> list[Event | TextDelta]:
        """Take output tokens `first_token …`; the new events. Tokens taken before are skipped; a
        gap is a bug."""
        log, num_tokens = self.log, self.num_tokens
        start = len(log)
        assert start, "a stream is opened before its tokens"
        assert self._end is None, "a stream that ended takes no tokens"
        if self.stopped_at is not None:
            return []
        if first_token != num_tokens:
            assert first_token < num_tokens, f"tokens {num_tokens} to {first_token} are missing"
            token_ids = token_ids[num_tokens - first_token :]
        for token_id in token_ids:
            text = self._decode(token_id)
            if logprobs is not None and self._wants_logprobs:
                its = logprobs[num_tokens - first_token]
                self._uncovered_logprobs.append(self._logprob(token_id, its))
            num_tokens += 1
            if self._stops is not None:
                text = self._until_stop(text, num_tokens)
            if text:
                self._add_delta(text, num_tokens)
            if self.stopped_at is not None:
                break
        self.num_tokens = num_tokens
        return log[start:]

    def finish(self, end: TurnEnd) -> list[Event | TextDelta]:
        """End the response; the last events, of which the last is terminal. Called once, last."""
        assert self.log, "a stream is opened before it ends"
        assert self._end is None, "a stream ends once"
        start = len(self.log)
        tail = self._tail()
        if tail:
            self._add_delta(tail, self.num_tokens)
        status = status_of(end)
        if end.reason in ("stop", "length") and not self._item_is_open:
            self._open_item()
        self._end = end
        if self._item_is_open:
            self._close_item()
        kind = "incomplete" if status == "cancelled" else status
        self._add(f"response.{kind}", {"response": self.response_object()})
        return self.log[start:]

    def response_object(self) -> dict[str, Any]:
        """OpenAI's response object as of now (in progress, or ended)."""
        output = [self._item()] if self._item_is_open else []
        return response_object(self._turn, self._end, output, self.num_tokens)

    def _until_stop(self, text: str, num_tokens: int) -> str:
        """What is certain to be output, now that the last of `num_tokens` tokens gave `text`."""
        assert self._stops is not None, "this is for responses with stop strings"
        if num_tokens > self._first_stop_token:
            text = self._stops.push(text)
            if self._stops.stopped:
                self.stopped_at = num_tokens
        return text

    def _tail(self) -> str:
        """The text that the decoder and the stop matcher still hold."""
        tail = self._decoder.flush()
        if self._stops is None:
            return tail
        if self.num_tokens > self._first_stop_token:
            tail = self._stops.push(tail)
        return tail + self._stops.flush()

    def _add(self, kind: str, body: dict[str, Any]) -> None:
        self.log.append(Event(kind, len(self.log), body))

    def _add_delta(self, text: str, num_tokens: int) -> None:
        """Add the delta that covers every token up to now."""
        if not self._item_is_open:
            self._open_item()
        logprobs: Sequence[dict[str, Any]] = ()
        if self._uncovered_logprobs:
            logprobs, self._uncovered_logprobs = self._uncovered_logprobs, []
            self._logprobs += logprobs
        log, first_token = self.log, self._num_covered
        self._num_covered = num_tokens
        log.append(
            TextDelta(len(log), self._part, text, first_token, num_tokens - first_token, logprobs)
        )

    def _open_item(self) -> None:
        item = output_item(self._part.item_id, "in_progress", [])
        self._add("response.output_item.added", {"output_index": _OUTPUT_INDEX, "item": item})
        self._add("response.content_part.added", {**self._where(), "part": output_text("", [])})
        self._item_is_open = True

    def _close_item(self) -> None:
        item = self._item()
        part = item["content"][0]
        text = {"text": part["text"], "logprobs": part["logprobs"]}
        self._add("response.output_text.done", {**self._where(), **text})
        self._add("response.content_part.done", {**self._where(), "part": part})
        self._add("response.output_item.done", {"output_index": _OUTPUT_INDEX, "item": item})

    def _item(self) -> dict[str, Any]:
        status = status_of(self._end)
        if status not in ("in_progress", "completed"):
            status = "incomplete"
        return output_item(
            self._part.item_id, status, [output_text(self.text, list(self._logprobs))]
        )

    def _where(self) -> dict[str, Any]:
        part = self._part
        return {
            "item_id": part.item_id,
            "output_index": part.output_index,
            "content_index": part.content_index,
        }

    def _logprob(self, token_id: int, its: TokenLogprobs) -> dict[str, Any]:
        as_bytes = self._decoder.token_bytes
        top = its.top[: self._turn.request.top_logprobs]
        return logprob(as_bytes(token_id), its.logprob, [(as_bytes(i), value) for i, value in top])
