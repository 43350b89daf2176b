"""The opening handshake of a socket: who gets in, and what is refused before the upgrade."""

from pathlib import Path

import aiohttp
import pytest

from hillstar.server.ports import HubStats
from support.server import fake_hub_server
from support.socket_client import connect, text_of
from support.wait import until

KEY = {"Authorization": "Bearer k"}
JSON = "hillstar.v1.json"


async def test_compression_is_not_negotiated() -> None:
    """A client that offers deflate gets none: no frame can grow after it was measured."""
    async with fake_hub_server() as running, connect(running.socket_url, compress=15) as client:
        assert not client.socket.compress
        assert text_of(await client.response(input="plain")) == "plain"


@pytest.mark.parametrize(
    ("headers", "protocols", "status", "code"),
    [
        ({}, (), 401, "invalid_api_key"),
        ({"Authorization": "Bearer nope"}, (), 401, "invalid_api_key"),
        (KEY, ("soap",), 400, "unsupported_subprotocol"),
        ({}, ("hillstar-key.k",), 400, "unsupported_subprotocol"),
        (KEY | {"Origin": "http://evil"}, (), 403, "origin_not_allowed"),
        (KEY | {"Sec-WebSocket-Version": "8"}, (), 426, "unsupported_websocket_version"),
        (KEY | {"Sec-WebSocket-Version": ""}, (), 426, "unsupported_websocket_version"),
        (KEY | {"Sec-WebSocket-Key": "AAAA"}, (), 400, "invalid_http"),
        (KEY | {"Sec-WebSocket-Key": "?"}, (), 400, "invalid_http"),
        (KEY | {"Upgrade": "h2c"}, (), 426, "upgrade_required"),
    ],
)
async def test_refusals_come_before_the_upgrade(
    tmp_path: Path, headers: dict[str, str], protocols: tuple[str, ...], status: int, code: str
) -> None:
    """A bad key, page or protocol is answered as HTTP with a typed body."""
    keys = tmp_path / "keys"
    keys.write_text("acme k\n")
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    if protocols:
        upgrade["Sec-WebSocket-Protocol"] = ", ".join(protocols)
    async with (
        fake_hub_server(api_keys=keys) as running,
        aiohttp.ClientSession() as session,
        session.get(f"{running.url}/v1/responses", headers=upgrade | headers) as answer,
    ):
        assert answer.status == status
        assert (await answer.json())["error"]["code"] == code
        if status == 426:
            assert answer.headers["Sec-WebSocket-Version"] == "13"


async def test_browsers_authenticate_by_subprotocol(tmp_path: Path) -> None:
    """A key among the subprotocols opens the socket, and only the other one is selected."""
    keys = tmp_path / "keys"
    keys.write_text("acme k\n")
    async with (
        fake_hub_server(api_keys=keys) as running,
        aiohttp.ClientSession() as session,
        session.ws_connect(running.socket_url, protocols=("hillstar-key.k", JSON)) as socket,
    ):
        assert socket.protocol == JSON


async def test_connections_are_limited() -> None:
    """The connection too many is refused with 503 and a type; one that ends makes room."""
    async with fake_hub_server(max_connections=1) as running:
        async with connect(running.socket_url) as first:
            with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
                async with connect(running.socket_url):
                    pass
            assert refusal.value.status == 503
            assert text_of(await first.response(input="x")) == "x"
        await until(lambda: running.front.connections.num_open == 0)
        async with connect(running.socket_url) as second:
            assert text_of(await second.response(input="x")) == "x"
    assert running.hub.stats() == HubStats(engine_state="ready")
