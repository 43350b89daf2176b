"""A real server on a random loopback port, inside the test's own event loop."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

from hillstar.server.auth import KeyRing
from hillstar.server.config import ServerConfig
from hillstar.server.front import Front
from hillstar.server.hub import Hub
from hillstar.server.journal import Journal
from hillstar.server.limits import SocketLimits
from hillstar.server.listener import Server
from hillstar.server.metrics import Metrics
from support.fake_engine import FakeEngine
from support.fake_hub import FakeHub
from support.fake_text import FakeText

HubT = TypeVar("HubT")


@dataclass
class Running(Generic[HubT]):
    """A server under test."""

    server: Server
    front: Front
    hub: HubT

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def socket_url(self) -> str:
        return self.url.replace("http", "ws", 1) + "/v1/responses"


@asynccontextmanager
async def fake_hub_server(
    limits: SocketLimits | None = None, **settings: object
) -> AsyncIterator[Running[FakeHub]]:
    """The network front before a `FakeHub`; `settings` are those of `ServerConfig`."""
    config = ServerConfig(data_dir=Path("unused"), port=0).replace(**settings)
    hub = FakeHub()
    async with _listening(config, cast(Hub, hub), Metrics(), limits) as (server, front):
        try:
            yield Running(server, front, hub)
        finally:
            await hub.close()


@asynccontextmanager
async def fake_engine_server(
    data_dir: Path,
    engine: FakeEngine | None = None,
    limits: SocketLimits | None = None,
    **settings: object,
) -> AsyncIterator[Running[Hub]]:
    """Everything but the engine and the tokenizer is real; `data_dir` outlives the server."""
    config = ServerConfig(data_dir=data_dir, port=0).replace(**settings)
    metrics = Metrics()
    hub = Hub(
        journal=Journal(data_dir),
        engine=engine or FakeEngine(),
        text=FakeText(),
        observer=metrics,
        model_name="fake",
        max_model_len=4096,
    )
    await hub.start()
    try:
        async with _listening(config, hub, metrics, limits) as (server, front):
            yield Running(server, front, hub)
    finally:
        await hub.close()


@asynccontextmanager
async def _listening(
    config: ServerConfig, hub: Hub, metrics: Metrics, limits: SocketLimits | None
) -> AsyncIterator[tuple[Server, Front]]:
    front = Front(
        config=config,
        model_name="fake",
        hub=hub,
        keys=KeyRing(config.api_keys),
        metrics=metrics,
        limits=limits or SocketLimits(close_timeout_s=1.0),
        started_at=1,
    )
    server = Server(front)
    await server.start()
    try:
        yield server, front
    finally:
        await server.close()
