"""The lanes of one socket as a pure state machine: who may start, who waits, who is refused.

A lane is FIFO and never overlaps; lanes run side by side. As in OpenAI's service the limit counts
the distinct names a connection has ever used: clients reuse their `stream_id`s.
"""

from collections import deque
from typing import Generic, TypeVar

from hillstar.server.errors import ApiError, conflict, rate_limit_exceeded
from hillstar.server.limits import SocketLimits

Item = TypeVar("Item")


class Lanes(Generic[Item]):
    """Owned by the connection's task. `None` names the default lane."""

    def __init__(self, limits: SocketLimits) -> None:
        self._limits = limits
        self._names: set[str] = set()
        self._busy: set[str | None] = set()
        self._waiting: dict[str | None, deque[Item]] = {}
        self._free: deque[str | None] = deque()  # lanes with something waiting and nothing running
        self.num_waiting = 0

    @property
    def num_busy(self) -> int:
        return len(self._busy)

    def submit(self, lane: str | None, item: Item) -> None:
        """Put an item at the end of its lane.

        Raises ApiError `websocket_stream_limit_reached` (a lane too many) or
        `rate_limit_exceeded` (too much is waiting already).
        """
        self._admit(lane)
        if self.num_waiting >= self._limits.max_queued and not self._could_start(lane):
            raise rate_limit_exceeded(
                f"{self.num_waiting} responses are waiting on this connection already.", 1.0
            )
        waiting = self._waiting.setdefault(lane, deque())
        waiting.append(item)
        self.num_waiting += 1
        if lane not in self._busy and len(waiting) == 1:
            self._free.append(lane)

    def start_next(self) -> tuple[str | None, Item] | None:
        """The next item whose lane is free, marked running; None while nothing may start."""
        if not self._free or len(self._busy) >= self._limits.max_in_flight:
            return None
        lane = self._free.popleft()
        waiting = self._waiting[lane]
        item = waiting.popleft()
        self.num_waiting -= 1
        if not waiting:
            del self._waiting[lane]
        self._busy.add(lane)
        return lane, item

    def occupy(self, lane: str | None) -> None:
        """Mark a lane running without waiting (a resume). Raises ApiError 409 where it has work."""
        if lane in self._busy or lane in self._waiting:
            raise conflict("stream_busy", f"Stream {lane or 'default'!r} is busy.", "stream_id")
        self._admit(lane)
        self._busy.add(lane)

    def release(self, lane: str | None) -> None:
        """What ran on the lane has ended. Does nothing on an idle lane."""
        if lane not in self._busy:
            return
        self._busy.remove(lane)
        if lane in self._waiting:
            self._free.append(lane)

    def _could_start(self, lane: str | None) -> bool:
        return (
            lane not in self._busy
            and lane not in self._waiting
            and not self._free
            and len(self._busy) < self._limits.max_in_flight
        )

    def _admit(self, lane: str | None) -> None:
        if lane is None or lane in self._names:
            return
        if len(self._names) >= self._limits.max_lanes:
            raise ApiError(
                400,
                "websocket_stream_limit_reached",
                f"A connection has up to {self._limits.max_lanes} named streams.",
                param="stream_id",
            )
        self._names.add(lane)
