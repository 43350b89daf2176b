"""The server's configuration, its start and its signals."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from hillstar.engine.config import ConfigError, EngineConfig
from hillstar.server import bridge
from hillstar.server.app import EngineFailed, JournalFailed, Signals, until_told, wait_ready
from hillstar.server.auth import KeyRing
from hillstar.server.bridge import Bridge
from hillstar.server.config import ServerConfig
from hillstar.server.errors import ApiError
from hillstar.server.hub import Hub
from hillstar.server.journal import Journal
from hillstar.server.metrics import Metrics
from hillstar.server.monitor import MAX_FAILED_STARTS
from hillstar.server.ports import HubStats
from support.fake_engine import FakeEngine
from support.fake_hub import FakeHub
from support.fake_text import FakeText
from support.server import fake_engine_server, fake_hub_server
from support.socket_client import connect
from support.wait import until

STUB = Path(__file__).parent.parent / "support" / "stub_engine.py"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("host", ""),
        ("host", "0.0.0.0"),
        ("host", "example.org"),
        ("allow_origins", ("example.org",)),
        ("allow_origins", ("https://example.org/path",)),
        ("allow_origins", ("https://example.org:port",)),
        ("durability", "never"),
        ("max_connections", 0),
        ("max_frame_bytes", 10),
        ("max_creates_per_minute", 0),
        ("drain_timeout_s", -1.0),
    ],
)
def test_wrong_settings_are_named(field: str, value: Any) -> None:
    """A setting outside its range is one line that names the field and the value."""
    with pytest.raises(ConfigError) as refusal:
        ServerConfig(data_dir=Path("d")).replace(**{field: value})
    assert refusal.value.field == field
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_loopback_needs_no_keys(host: str) -> None:
    """Any loopback address may be bound without keys; with keys any address may."""
    assert ServerConfig(data_dir=Path("d"), host=host).host == host
    assert ServerConfig(data_dir=Path("d"), host="0.0.0.0", api_keys=Path("k")).host == "0.0.0.0"


async def test_readiness_is_waited_for_and_loading_is_told() -> None:
    """`wait_ready` reports each change of what is loaded, and returns once the engine runs."""
    hub = FakeHub()
    seen: list[tuple[int, int]] = []
    hub.state = HubStats(engine_state="starting", loading=(1, 4))
    waiting = asyncio.create_task(
        wait_ready(cast(Hub, hub), lambda done, total: seen.append((done, total)))
    )
    await until(lambda: len(seen) == 1)
    hub.state = HubStats(engine_state="starting", loading=(3, 4))
    await until(lambda: len(seen) == 2)
    hub.state = HubStats(engine_state="ready")
    await waiting
    assert seen == [(1, 4), (3, 4)]


@asynccontextmanager
async def loading(tmp_path: Path, mode: str) -> AsyncIterator[tuple[Hub, Path]]:
    """A server whose engine is a stub, and the file by which it may be made to die."""
    config = EngineConfig(model_dir=tmp_path, model_name="stub", num_blocks=2)
    hub = Hub(
        journal=Journal(tmp_path / "data"),
        engine=Bridge(config, (sys.executable, "-P", str(STUB), mode)),
        text=FakeText(),
        observer=Metrics(),
        model_name="stub",
        max_model_len=64,
    )
    await hub.start()
    try:
        yield hub, tmp_path / "killed"
    finally:
        await hub.close()


async def test_an_engine_killed_while_it_loads_is_started_again(tmp_path: Path) -> None:
    """Death in the very first load is a death like any other: the next engine gets ready."""
    (tmp_path / "killed").touch()
    async with loading(tmp_path, "killed") as (hub, wound):
        ready = asyncio.create_task(wait_ready(hub, lambda done, total: None))
        await until(lambda: hub.stats().engine_state == "down", 30)
        wound.unlink()
        await asyncio.wait_for(ready, 30)
        assert hub.stats().engine_error is None


async def test_an_engine_that_only_dies_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a few engines that died while they loaded the server gives up, and says of what."""
    monkeypatch.setattr(bridge, "FIRST_DELAY_S", 0.001)
    wound = tmp_path / "killed"
    wound.touch()
    async with loading(tmp_path, "killed") as (hub, _):
        with pytest.raises(EngineFailed, match="the engine could not start: killed by signal 9"):
            await asyncio.wait_for(wait_ready(hub, lambda done, total: None), 60)
    assert wound.read_text().count("\n") >= MAX_FAILED_STARTS


async def test_an_engine_that_says_it_cannot_start_ends_the_server(tmp_path: Path) -> None:
    """A missing tensor is missing the next time too: its own words end the server at once."""
    async with loading(tmp_path, "fail") as (hub, _):
        with pytest.raises(EngineFailed, match="the engine could not start: no such tensor"):
            await asyncio.wait_for(wait_ready(hub, lambda done, total: None), 30)


async def test_signals_drain_then_hurry_and_reload_keys(tmp_path: Path) -> None:
    """SIGHUP reads the keys again; the first SIGTERM asks to leave, the second to leave now."""
    path = tmp_path / "keys"
    path.write_text("a old\n")
    keys = KeyRing(path)
    signals = Signals(keys)
    try:
        path.write_text("b new\n")
        os.kill(os.getpid(), signal.SIGHUP)
        bearer = {"Authorization": "Bearer new"}
        await until(lambda: _knows(keys, bearer))
        path.write_text("nonsense\n")
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(signals.leave.wait(), 10)
        assert _knows(keys, bearer)
        assert not signals.now.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(signals.now.wait(), 10)
    finally:
        signals.close()


async def test_a_journal_that_fails_ends_the_server(tmp_path: Path) -> None:
    """A server that cannot store anything any more does not stay up."""
    failed = asyncio.Event()
    async with fake_hub_server() as running:
        hub, signals = cast(Hub, running.hub), Signals(KeyRing(None))
        try:
            serving = asyncio.create_task(
                until_told(hub, running.server, signals, failed, lambda done, total: None)
            )
            failed.set()
            with pytest.raises(JournalFailed):
                await asyncio.wait_for(serving, 20)
        finally:
            signals.close()


def _knows(keys: KeyRing, headers: dict[str, str]) -> bool:
    try:
        keys.authenticate(headers)
    except ApiError:
        return False
    return True


async def test_a_taken_port_is_an_error() -> None:
    """Two servers cannot listen on one port: the second one's start raises OSError."""
    async with fake_hub_server() as running:
        port = int(running.url.rsplit(":", 1)[1])
        with pytest.raises(OSError, match="in use"):
            async with fake_hub_server(port=port):
                pass


async def test_a_response_goes_on_over_a_restart_of_the_server(tmp_path: Path) -> None:
    """Drained in the middle of a stream, the next server on the directory resumes it exactly."""
    body = {"input": "x", "max_output_tokens": 40, "hillstar": {"ignore_eos": True}}
    async with (
        fake_engine_server(tmp_path) as running,
        connect(running.socket_url, "hillstar.v1.json") as client,
    ):
        whole = await client.response(**body)
    engine = FakeEngine(auto=False)
    async with (
        fake_engine_server(tmp_path, engine, drain_timeout_s=0.0) as running,
        connect(running.socket_url, "hillstar.v1.json") as client,
    ):
        await client.send("response.create", **body)
        await until(lambda: bool(engine.sent))
        for _ in range(10):
            engine.step()
        head = await client.until("response.output_text.delta")
        response_id = head[0]["response"]["id"]
        await running.server.drain()
        assert await client.close_code() == 1012
    async with (
        fake_engine_server(tmp_path) as running,
        connect(running.socket_url, "hillstar.v1.json") as client,
    ):
        last = head[-1]["sequence_number"]
        await client.send("hillstar.resume", response_id=response_id, starting_after=last)
        resumed, *tail = await client.until("response.completed", "response.incomplete")
        assert resumed["next_sequence_number"] == last + 1
    numbers = [frame["sequence_number"] for frame in head + tail]
    assert numbers == list(range(len(whole)))
