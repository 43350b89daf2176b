"""What one tenant, one socket and the whole server may take. Every limit refuses with a type."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from hillstar.server.errors import ApiError, rate_limit_exceeded

THREAD_PARSE_BYTES = 64 << 10
"""Bodies and frames above this are parsed off the event loop (1 MiB of JSON takes ~2 ms)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketLimits:
    """The bounds of one WebSocket. The defaults are the protocol's; tests use smaller ones."""

    max_lanes: int = 32  # distinct stream ids used over the connection's life
    max_in_flight: int = 16  # responses running at once
    max_queued: int = 64  # creates waiting on their lanes
    merge_bytes: int = 256 << 10  # an outbox above this merges deltas even while the peer reads
    max_outbox_bytes: int = 16 << 20  # unsent events of a peer that does not read
    stall_timeout_s: float = 20.0  # how long a full transport may make no progress
    heartbeat_s: float = 20.0  # between pings; a peer silent for half as long again is dropped
    close_timeout_s: float = 3.0  # for the closing handshake
    body_timeout_s: float = 60.0  # for a request's body to arrive


class ConnectionLimit:
    """Counts what stays open: a context around each socket, stream and waiting create.

    Requests that are answered at once are bounded by their bodies: in size, and in time.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self.num_open = 0

    def __enter__(self) -> Self:
        """Raises ApiError 503 `websocket_connection_limit_reached`."""
        if self.num_open >= self._maximum:
            raise ApiError(
                503,
                "websocket_connection_limit_reached",
                f"This server holds {self._maximum} connections at once.",
                retryable=True,
                retry_after_s=1.0,
            )
        self.num_open += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.num_open -= 1


class CreateRate:
    """A token bucket a tenant: `per_minute` creates, refilled evenly, all of them as a burst."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`per_minute=None` limits nothing."""
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # tenant -> (creates left, as of)

    def take(self, tenant: str) -> None:
        """Count one create. Raises ApiError 429 with the seconds until the next is free."""
        if self._per_minute is None:
            return
        now = self._clock()
        left, as_of = self._buckets.get(tenant, (float(self._per_minute), now))
        per_second = self._per_minute / 60
        left = min(float(self._per_minute), left + (now - as_of) * per_second)
        if left < 1:
            self._buckets[tenant] = (left, now)
            raise rate_limit_exceeded(
                f"{self._per_minute} responses a minute are allowed.", (1 - left) / per_second
            )
        self._buckets[tenant] = (left - 1, now)
