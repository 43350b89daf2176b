"""What a socket says of its responses: a sender for all of it, a follower for each response."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from aiohttp import WSMsgType

from hillstar.server import wire
from hillstar.server.encode import encode, encode_delta, encode_error
from hillstar.server.errors import ApiError
from hillstar.server.events import Event, Notice, TextDelta
from hillstar.server.outbox import Outbox
from hillstar.server.socket import frame

AnyEvent = Event | TextDelta

TERMINAL_TYPES = frozenset({"response.completed", "response.incomplete", "response.failed"})


def is_terminal(event: AnyEvent) -> bool:
    """Whether it is the one event that ends its response."""
    return type(event) is Event and event.type in TERMINAL_TYPES


def has_ended(response: Mapping[str, Any]) -> bool:
    """Whether a response object is final."""
    return response["status"] not in ("queued", "in_progress")


class Sender:
    """Values in, frames of the socket's protocol into its outbox. Never blocks."""

    def __init__(self, outbox: Outbox, protocol: wire.Protocol) -> None:
        self.outbox = outbox  # deltas go there directly: there is one for every token
        self.protocol = protocol
        is_binary = protocol is wire.Protocol.MSGPACK
        self.opcode = int(WSMsgType.BINARY if is_binary else WSMsgType.TEXT)

    def send_event(self, follower: "LaneFollower", event: Event | Notice) -> None:
        """Queue anything about a response but a delta."""
        payload = encode(event, self.protocol, stream_id=follower.stream_id, r=follower.number)
        self.outbox.put(frame(self.opcode, payload), follower)

    def refuse(self, error: ApiError, stream_id: str | None) -> None:
        """Queue an error frame."""
        payload = encode_error(error, self.protocol, stream_id=stream_id)
        self.outbox.put(frame(self.opcode, payload))

    def notify(self, kind: str, body: dict[str, Any]) -> None:
        """Queue a message about the socket itself, where the protocol has such."""
        if self.protocol.is_hillstar:
            self.outbox.put(frame(self.opcode, encode(Notice(kind, body), self.protocol)))


class Board(Protocol):
    """Where followers say which responses run."""

    def began(self, follower: "LaneFollower", response_id: str) -> None:
        """The follower got its response's first event."""
        ...

    def ended(self, follower: "LaneFollower") -> None:
        """The follower's response is over, or never began: its lane is free."""
        ...


class LaneFollower:
    """Carries one response's events onto its lane, in order, and frees the lane at the end."""

    __slots__ = (
        "_board",
        "_error",
        "_has_ended",
        "_held",
        "_outbox",
        "_sender",
        "number",
        "response_id",
        "stream_id",
    )

    def __init__(self, sender: Sender, board: Board, stream_id: str | None, number: int) -> None:
        self._sender = sender
        self._outbox = sender.outbox
        self._board = board
        self.stream_id = stream_id
        self.number = number  # the response's number on this socket
        self.response_id: str | None = None  # known from the first event on
        self._held: list[AnyEvent] | None = None
        self._error: ApiError | None = None  # comes behind what is held
        self._has_ended = False

    def post(self, response_id: str, events: Sequence[AnyEvent]) -> None:
        """Of `ports.Follower`."""
        if self._has_ended or not events:
            return
        if self.response_id is None:
            self.response_id = response_id
            self._board.began(self, response_id)
        if self._held is not None:
            self._held.extend(events)
            return
        for event in events:
            if isinstance(event, TextDelta):
                self._outbox.put_delta(event, self)
            else:
                self._sender.send_event(self, event)
                if event.type in TERMINAL_TYPES:
                    self.abandon()

    def lost(self, response_id: str, error: ApiError) -> None:
        """Of `ports.Follower`."""
        if self._held is not None:
            self._error = error
        elif not self._has_ended:
            self._sender.refuse(error, self.stream_id)
            self.abandon()

    def hold(self) -> None:
        """Keep what is posted until `release` (the answer to a resume comes first)."""
        self._held = []

    def release(self) -> None:
        """Send what was held, and whatever comes, from now on."""
        held, self._held = self._held, None
        if held and self.response_id is not None:
            self.post(self.response_id, held)
        if self._error is not None and self.response_id is not None:
            self.lost(self.response_id, self._error)

    def abandon(self) -> None:
        """Nothing more will come: the response ended, or never began."""
        if not self._has_ended:
            self._has_ended = True
            self._board.ended(self)

    def frame(self, delta: TextDelta) -> bytes:
        """Of `outbox.Framer`."""
        sender = self._sender
        return frame(
            sender.opcode, encode_delta(delta, sender.protocol, self.stream_id, self.number)
        )


class LastEvent:
    """Carries nothing but the terminal event: the answer to a cancel of what is not followed."""

    def __init__(self, sender: Sender, follower: LaneFollower) -> None:
        self._sender = sender
        self._follower = follower

    def post(self, response_id: str, events: Sequence[AnyEvent]) -> None:
        """Of `ports.Follower`."""
        for event in events:
            if isinstance(event, Event) and is_terminal(event):
                self._sender.send_event(self._follower, event)

    def lost(self, response_id: str, error: ApiError) -> None:
        """Of `ports.Follower`."""
        self._sender.refuse(error, self._follower.stream_id)
