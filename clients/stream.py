"""One response being read: the pure part (`Progress`) and what the caller iterates (`Stream`)."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from hillstar.clients.codec import DELTA
from hillstar.clients.errors import ClientClosed, ClientError, EventsLost, ProtocolError
from hillstar.clients.events import (
    TERMINAL,
    Created,
    Finished,
    OtherEvent,
    Response,
    Resumed,
    StreamEvent,
    TextDelta,
)


class Progress:
    """What has been seen of a response, and so what is new. Pure: maps in, events out.

    This is what makes delivery exact: an event whose `sequence_number` was seen is dropped, and
    a text delta that does not begin where its part ended is an error instead of wrong text.
    """

    def __init__(self, response_id: str | None = None, starting_after: int = -1) -> None:
        self.response_id = response_id
        self.last_sequence_number = starting_after
        self.finished = False
        self._next_token: dict[tuple[int, int], int] = {}  # part -> first token of its next delta

    def take(self, message: Mapping[str, Any]) -> StreamEvent | None:
        """The event of a message, or None where it was seen before. Raises ProtocolError."""
        kind = message["type"]
        try:
            if kind == "hillstar.resumed":
                return self._take_resumed(message)
            number = message["sequence_number"]
            if number <= self.last_sequence_number:
                return None
            event = self._read(kind, number, message)
        except (KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(f"{kind} is malformed: {error!r}") from None
        self.last_sequence_number = number
        return event

    def _take_resumed(self, message: Mapping[str, Any]) -> Resumed:
        if not message["recovered"]:
            raise EventsLost(
                f"the server has no events of {self.response_id} after number"
                f" {self.last_sequence_number}"
            )
        expected = self.last_sequence_number + 1
        if message["next_sequence_number"] > expected:
            raise ProtocolError(
                f"resumed at number {message['next_sequence_number']} instead of {expected}"
            )
        return Resumed(message["next_sequence_number"], message.get("kv") or {})

    def _read(self, kind: str, number: int, message: Mapping[str, Any]) -> StreamEvent:
        if kind == DELTA:
            return self._read_delta(number, message)
        if kind == "response.created":
            created = Created(Response.from_wire(message["response"]), number)
            self.response_id = created.response.id
            return created
        if kind in TERMINAL:
            self.finished = True
            return Finished(Response.from_wire(message["response"]), number)
        return OtherEvent(kind, number, message)

    def _read_delta(self, number: int, message: Mapping[str, Any]) -> TextDelta:
        delta = TextDelta(
            text=message["delta"],
            sequence_number=number,
            output_index=message["output_index"],
            content_index=message["content_index"],
            first_token=message["first_token"],
            num_tokens=message["num_tokens"],
            logprobs=tuple(message.get("logprobs") or ()),
        )
        part = (delta.output_index, delta.content_index)
        expected = self._next_token.get(part, delta.first_token)
        if delta.first_token != expected:
            raise ProtocolError(
                f"delta {number} begins at token {delta.first_token} instead of {expected}"
            )
        self._next_token[part] = delta.first_token + delta.num_tokens
        return delta


class Carrier(Protocol):
    """What brings a stream its messages: the client's one socket."""

    async def start(self, stream: "Stream", lane: str | None) -> None:
        """Give the stream a lane and send what opens it."""
        ...

    async def cancel(self, stream: "Stream") -> None:
        """Ask the server to end the stream's response."""
        ...


class Stream(AsyncIterator[StreamEvent]):
    """The events of one response, each exactly once, across lost connections.

    Iterate it, or `await stream.result()`. Leaving early (`aclose`, or the end of an
    `async with` block) does not end the response; `cancel` does.

    Events wait here until they are read: at most one response's text, adjacent deltas merged
    when they are taken. Owner: the client that made it.
    """

    def __init__(
        self,
        opening: Mapping[str, Any] | None,
        progress: Progress,
        carrier: Carrier,
        wanted_lane: str | None = None,
    ) -> None:
        self._opening = opening  # the create; None for a stream that began with a resume
        self._progress = progress
        self._carrier = carrier
        self._wanted_lane = wanted_lane
        self._started = False
        self._waiting: deque[StreamEvent] = deque()
        self._arrived = asyncio.Event()
        self._error: ClientError | None = None
        self._ended = False
        self.lane = ""  # set by the carrier when it starts
        self.cancelling = False
        self.detached = False

    @property
    def response_id(self) -> str | None:
        """The response's id, once its `Created` event came."""
        return self._progress.response_id

    @property
    def done(self) -> bool:
        """Whether the terminal event or an error has arrived."""
        return self._progress.finished or self._error is not None

    async def __anext__(self) -> StreamEvent:
        if not self._started:
            self._started = True
            await self._carrier.start(self, self._wanted_lane)
        while not self._waiting:
            if self._ended:
                raise StopAsyncIteration
            if self._error:
                self._ended = True
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        event = self._waiting.popleft()
        if isinstance(event, TextDelta):
            return self._merged(event)
        if isinstance(event, Finished):
            self._ended = True
        return event

    async def result(self) -> Response:
        """Read to the end and return the response, whatever its status."""
        async for event in self:
            if isinstance(event, Finished):
                return event.response
        raise ClientClosed("the stream was read or closed before")

    async def cancel(self) -> None:
        """Ask for the end of the response; the terminal event still arrives on the stream."""
        self.cancelling = True
        if not self.done:
            await self._carrier.cancel(self)

    async def aclose(self) -> None:
        """Read no more. The response goes on by its `on_disconnect`."""
        self.detached = self._ended = True
        self._waiting.clear()
        self._arrived.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    # What follows is called by the carrier.

    def attach_message(self) -> dict[str, Any]:
        """What makes a fresh socket carry this stream: a create or a resume."""
        if self.response_id is None:
            assert self._opening is not None
            return {**self._opening, "type": "response.create", "stream_id": self.lane}
        message: dict[str, Any] = {
            "type": "hillstar.resume",
            "response_id": self.response_id,
            "stream_id": self.lane,
        }
        if self._progress.last_sequence_number >= 0:
            message["starting_after"] = self._progress.last_sequence_number
        return message

    def take(self, message: Mapping[str, Any]) -> StreamEvent | None:
        """Deliver a message of this stream's lane; the event if it was new.

        A message that breaks the protocol ends this stream alone. Its lane stays taken until
        the server's own end of the response, so that no other stream gets its events.
        """
        if self.done:
            return None
        try:
            event = self._progress.take(message)
        except ClientError as error:
            self.fail(error)
            return None
        if event is not None:
            self.post(event)
        return event

    def post(self, event: StreamEvent) -> None:
        """Put an event in the reader's way."""
        if not self.detached:
            self._waiting.append(event)
            self._arrived.set()

    def fail(self, error: ClientError) -> None:
        """End the stream: its reader gets what came before, then `error`."""
        if not self.done:
            self._error = error
            self._arrived.set()

    def _merged(self, first: TextDelta) -> TextDelta:
        """`first` with the deltas of the same part that wait right behind it."""
        part = (first.output_index, first.content_index)
        deltas = [first]
        while self._waiting:
            following = self._waiting[0]
            if not isinstance(following, TextDelta):
                break
            if (following.output_index, following.content_index) != part:
                break
            deltas.append(following)
            self._waiting.popleft()
        if len(deltas) == 1:
            return first
        return TextDelta(
            text="".join(delta.text for delta in deltas),
            sequence_number=deltas[-1].sequence_number,
            output_index=first.output_index,
            content_index=first.content_index,
            first_token=first.first_token,
            num_tokens=sum(delta.num_tokens for delta in deltas),
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        )
