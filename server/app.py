"""The server process from start to end: what is opened when, and who is told that it leaves.

Start: the data directory is locked and the journal opened; the engine begins to load in its own
process; the port is opened (so that `/health/live` answers while weights load); once the engine
is ready, so is `/health/ready`, and one line with the link is printed. Creates that come earlier
wait for the engine. An engine that dies while it loads is started again a few times; one that
says that it cannot start (a tensor is missing) ends the server at once.

End: SIGTERM or SIGINT drains; a second one ends at once. SIGHUP reads the API keys again.
"""

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Callable

import uvloop

from hillstar.engine.config import ConfigError, EngineConfig
from hillstar.server.auth import KeyRing
from hillstar.server.bridge import Bridge
from hillstar.server.config import ServerConfig
from hillstar.server.defaults import read_defaults
from hillstar.server.front import Front
from hillstar.server.hub import Hub
from hillstar.server.journal import Journal
from hillstar.server.limits import SocketLimits
from hillstar.server.listener import Server
from hillstar.server.metrics import Metrics
from hillstar.server.text import Tokenizer

logger = logging.getLogger(__name__)

POLL_S = 0.05  # between two looks at an engine that loads
MAX_YOUNG_OBJECTS = 20_000  # a step of 4096 responses makes four for each, gone at its end

OnLoading = Callable[[int, int], None]


class EngineFailed(RuntimeError):
    """The engine could not start; the message says why."""


class JournalFailed(RuntimeError):
    """Nothing can be stored any more: the server ends, and the next one resumes what ran."""


def run_server(engine: EngineConfig, server: ServerConfig, *, on_loading: OnLoading) -> None:
    """Serve until SIGTERM or SIGINT. `on_loading(done, total)` hears of bytes of weights.

    Raises ConfigError (the data directory is in use, a key file is malformed), OSError (the
    address is taken), EngineFailed, JournalFailed.
    """
    uvloop.run(serve(engine, server, on_loading=on_loading))


async def serve(engine: EngineConfig, server: ServerConfig, *, on_loading: OnLoading) -> None:
    """The same inside a running event loop."""
    keys = KeyRing(server.api_keys)
    metrics = Metrics()
    defaults = read_defaults(engine.model_dir)
    text = await asyncio.to_thread(Tokenizer, engine.model_dir)
    journal = Journal(server.data_dir, durability=server.durability)
    hub = Hub(
        journal=journal,
        engine=Bridge(engine),
        text=text,
        observer=metrics,
        model_name=engine.model_name,
        max_model_len=engine.max_model_len,
    )
    front = Front(
        config=server,
        model_name=engine.model_name,
        hub=hub,
        keys=keys,
        metrics=metrics,
        limits=SocketLimits(),
        started_at=int(time.time()),
        defaults=defaults,
    )
    listener = Server(front)
    signals = Signals(keys)
    try:
        await hub.start()
        await listener.start()
        spare_collections()
        await until_told(hub, listener, signals, journal.failed, on_loading)
    finally:
        await listener.close()
        await hub.close()
        signals.close()


def spare_collections() -> None:
    """Keep the collector of cycles away from what start-up has made, and from what lives for a
    step: it ran in the middle of each one, and every minute or so for 50 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(MAX_YOUNG_OBJECTS)


async def until_told(
    hub: Hub,
    listener: Server,
    signals: "Signals",
    journal_failed: asyncio.Event,
    on_loading: OnLoading,
) -> None:
    """Say when the server is ready; drain at the first signal, return at the second.

    Raises EngineFailed, JournalFailed.
    """
    broken = asyncio.create_task(journal_failed.wait())
    ready = asyncio.create_task(wait_ready(hub, on_loading))
    leaving = asyncio.create_task(signals.leave.wait())
    await asyncio.wait({ready, leaving, broken}, return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        ready.result()
        print(f"hillstar: ready at {listener.url}", flush=True)
    await asyncio.wait({leaving, broken}, return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    if broken.done():
        leaving.cancel()
        await asyncio.gather(ready, leaving, return_exceptions=True)
        raise JournalFailed("the journal failed; the log says why")
    logger.info("draining")
    draining = asyncio.create_task(listener.drain())
    now = asyncio.create_task(signals.now.wait())
    await asyncio.wait({draining, now}, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, now, broken):
        task.cancel()
    await asyncio.gather(ready, draining, now, broken, return_exceptions=True)


async def wait_ready(hub: Hub, on_loading: OnLoading) -> None:
    """Return once the engine takes work. Raises EngineFailed where it cannot start."""
    seen = (0, 0)
    while (stats := hub.stats()).engine_state != "ready":
        if stats.engine_state == "failed":
            raise EngineFailed(f"the engine could not start: {stats.engine_error}")
        if stats.loading != seen:
            seen = stats.loading
            on_loading(*seen)
        await asyncio.sleep(POLL_S)


class Signals:
    """The process's signals as events of the loop."""

    def __init__(self, keys: KeyRing) -> None:
        """Installs the handlers."""
        self._keys = keys
        self.leave = asyncio.Event()
        self.now = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._end)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)

    def close(self) -> None:
        """Remove the handlers."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.remove_signal_handler(number)

    def _end(self) -> None:
        if self.leave.is_set():
            self.now.set()
        self.leave.set()

    def _reload(self) -> None:
        try:
            self._keys.reload()
        except ConfigError as error:
            logger.error("the old API keys stay: %s", error)
        else:
            logger.info("API keys were read again")
