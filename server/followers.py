"""What a socket hands to the Hub to be told of a response: one follower for each."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hillstar.server.events import Event, Notice, TextDelta
from hillstar.server.socket import SocketFrame

AnyEvent = Event | TextDelta

TERMINAL_TYPES = frozenset({"response.completed", "response.incomplete", "response.failed"})


def is_terminal(event: AnyEvent) -> bool:
    """Whether it is the one event that ends its response."""
    return type(event) is Event and event.type in TERMINAL_TYPES


def has_ended(response: Mapping[str, Any]) -> bool:
    """Whether a response object is final."""
    return response["status"] not in ("queued", "in_progress")


class Target(Protocol):
    """The connection, as its followers see it."""

    def send_event(self, follower: "LaneFollower", event: Event | Notice) -> None: ...
    def send_delta(self, follower: "LaneFollower", delta: TextDelta) -> None: ...
    def encode_delta(self, follower: "LaneFollower", delta: TextDelta) -> SocketFrame: ...
    def began(self, follower: "LaneFollower", response_id: str) -> None: ...
    def ended(self, follower: "LaneFollower") -> None: ...


class LaneFollower:
    """Carries one response's events onto its lane, in order, and frees the lane at the end."""

    __slots__ = ("_has_ended", "_held", "_target", "number", "response_id", "stream_id")

    def __init__(self, target: Target, stream_id: str | None, number: int) -> None:
        self._target = target
        self.stream_id = stream_id
        self.number = number  # the response's number on this socket
        self.response_id: str | None = None  # known from the first event on
        self._held: list[AnyEvent] | None = None
        self._has_ended = False

    def post(self, response_id: str, events: Sequence[AnyEvent]) -> None:
        """Of `ports.Follower`."""
        if self._has_ended or not events:
            return
        if self.response_id is None:
            self.response_id = response_id
            self._target.began(self, response_id)
        if self._held is not None:
            self._held.extend(events)
            return
        for event in events:
            if isinstance(event, TextDelta):
                self._target.send_delta(self, event)
            else:
                self._target.send_event(self, event)
        if is_terminal(events[-1]):
            self.abandon()

    def hold(self) -> None:
        """Keep what is posted until `release` (the answer to a resume comes first)."""
        self._held = []

    def release(self) -> None:
        """Send what was held, and whatever comes, from now on."""
        held, self._held = self._held, None
        if held and self.response_id is not None:
            self.post(self.response_id, held)

    def abandon(self) -> None:
        """Nothing more will come: the response ended, or never began."""
        if not self._has_ended:
            self._has_ended = True
            self._target.ended(self)

    def encode_delta(self, delta: TextDelta) -> SocketFrame:
        """The frame of a delta of this response."""
        return self._target.encode_delta(self, delta)


class LastEvent:
    """Carries nothing but the terminal event: the answer to a cancel of what is not followed."""

    def __init__(self, target: Target, follower: LaneFollower) -> None:
        self._target = target
        self._follower = follower

    def post(self, response_id: str, events: Sequence[AnyEvent]) -> None:
        """Of `ports.Follower`."""
        for event in events:
            if isinstance(event, Event) and is_terminal(event):
                self._target.send_event(self._follower, event)
