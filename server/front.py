"""What every handler shares: the Hub, the limits, the peers that are connected."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from hillstar.server.auth import KeyRing, OriginPolicy
from hillstar.server.config import ServerConfig
from hillstar.server.defaults import NO_DEFAULTS, ModelDefaults
from hillstar.server.hub import Hub
from hillstar.server.limits import (
    THREAD_PARSE_BYTES,
    ConnectionLimit,
    CreateRate,
    SocketLimits,
)
from hillstar.server.metrics import Metrics
from hillstar.server.runqueue import RunQueue

T = TypeVar("T")
D = TypeVar("D", bound=str | bytes)


class Peer(Protocol):
    """Somebody connected who is looked after while nothing happens."""

    def beat(self, now: float) -> None:
        """Called several times in each heartbeat interval, with the loop's time. Never raises."""
        ...

    def announce_drain(self, deadline_s: float) -> None:
        """The server leaves in at most `deadline_s`."""
        ...

    def leave(self) -> None:
        """The server leaves now: say so and end."""
        ...


class Front:
    """Owner of the set of connected peers. Lives on the event loop."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        model_name: str,
        hub: Hub,
        keys: KeyRing,
        metrics: Metrics,
        limits: SocketLimits,
        started_at: int,
        defaults: ModelDefaults = NO_DEFAULTS,
    ) -> None:
        self.config = config
        self.model_name = model_name
        self.hub = hub
        self.keys = keys
        self.metrics = metrics
        self.limits = limits
        self.started_at = started_at  # Unix seconds
        self.defaults = defaults  # of the model, where a create states nothing else
        self.origins = OriginPolicy(config.allow_origins, loopback_only=not keys.required)
        self.connections = ConnectionLimit(config.max_connections)
        self.rate = CreateRate(config.max_creates_per_minute)
        self.peers: set[Peer] = set()
        self.departures = RunQueue(asyncio.get_running_loop())  # outboxes with something to send
        self.is_draining = False
        self._parsers = ThreadPoolExecutor(2, thread_name_prefix="hillstar-parse")

    async def parse(self, data: D, parse: Callable[[D], T]) -> T:
        """`parse(data)`, off the event loop where the data is large."""
        if len(data) <= THREAD_PARSE_BYTES:
            return parse(data)
        return await asyncio.get_running_loop().run_in_executor(self._parsers, parse, data)

    async def beat_forever(self) -> None:
        """One timer for all peers: an idle connection costs no timer and no task of its own."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.limits.heartbeat_s / 4)
            now = loop.time()
            for peer in tuple(self.peers):
                peer.beat(now)

    def announce_drain(self, deadline_s: float) -> None:
        """Refuse new sockets from now on and tell the open ones."""
        self.is_draining = True
        for peer in tuple(self.peers):
            peer.announce_drain(deadline_s)

    def leave(self) -> None:
        """Close every peer as a restart (1012)."""
        self.is_draining = True
        for peer in tuple(self.peers):
            peer.leave()

    def close(self) -> None:
        """Free the parser threads."""
        self._parsers.shutdown(wait=False)


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end even when the caller is cancelled, which is then cancelled."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # retrieved: the caller is gone
        raise


def forgive_cancellation() -> None:
    """A lost connection cancels its handler; what it has begun is finished all the same."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
