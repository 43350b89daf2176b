"""A real server on a random loopback port, inside the test's own event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from hillstar.server.auth import KeyRing
from hillstar.server.config import ServerConfig
from hillstar.server.front import Front
from hillstar.server.limits import SocketLimits
from hillstar.server.listener import Server
from hillstar.server.metrics import Metrics
from hillstar.server.registry import Hub
from support.fake_hub import FakeHub


@dataclass
class Running:
    """A server under test."""

    server: Server
    front: Front
    hub: FakeHub

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def socket_url(self) -> str:
        return self.url.replace("http", "ws", 1) + "/v1/responses"


@asynccontextmanager
async def fake_hub_server(
    limits: SocketLimits | None = None, **settings: object
) -> AsyncIterator[Running]:
    """The network front before a `FakeHub`; `settings` are those of `ServerConfig`."""
    config = ServerConfig(data_dir=Path("unused"), port=0).replace(**settings)
    hub = FakeHub()
    front = Front(
        config=config,
        model_name="fake",
        hub=cast(Hub, hub),
        keys=KeyRing(config.api_keys),
        metrics=Metrics(),
        limits=limits or SocketLimits(close_timeout_s=1.0),
        started_at=1,
    )
    server = Server(front)
    await server.start()
    try:
        yield Running(server, front, hub)
    finally:
        await server.close()
        await hub.close()
        await asyncio.sleep(0)
