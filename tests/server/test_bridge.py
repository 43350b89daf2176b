"""The bridge: an engine's life, death and succession, seen from the server."""

import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from hillstar.engine.config import EngineConfig
from hillstar.engine.framing import HEARTBEAT, encode_message
from hillstar.engine.messages import Frame, Ready, SamplingParams, Submit, ToEngine, pack_ids
from hillstar.server import bridge as under_test
from hillstar.server.bridge import Bridge
from hillstar.server.engineport import EngineEnd
from support.wait import until

STUB = Path(__file__).parent.parent / "support" / "stub_engine.py"
SUBMIT = Submit(sequence_id="s1", prompt_ids=pack_ids([1]), params=SamplingParams(max_tokens=1))


class Heard:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.loading: list[tuple[int, int]] = []
        self.ups: list[Ready] = []
        self.frames: list[Frame] = []
        self.downs: list[tuple[str, EngineEnd]] = []

    def engine_loading(self, done: int, total: int) -> None:
        self.loading.append((done, total))

    def engine_up(self, ready: Ready) -> None:
        self.ups.append(ready)

    def engine_frame(self, frame: Frame) -> None:
        self.frames.append(frame)

    def engine_down(self, reason: str, end: EngineEnd) -> None:
        self.downs.append((reason, end))


@asynccontextmanager
async def bridged(
    mode: str, *, python: str = sys.executable
) -> AsyncIterator[tuple[Bridge, Heard]]:
    config = EngineConfig(model_dir=Path("model"), model_name="stub", num_blocks=2)
    bridge = Bridge(config, (python, "-P", str(STUB), mode))
    heard = Heard()
    await bridge.start(heard)
    try:
        yield bridge, heard
    finally:
        await bridge.close()


async def test_messages_pass_both_ways_and_stderr_goes_to_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The engine gets its configuration and messages; its words and its stderr come back."""
    caplog.set_level(logging.INFO)
    async with bridged("talk") as (bridge, heard):
        bridge.send(SUBMIT)  # nobody is up yet: dropped
        await until(lambda: bool(heard.ups), 30)
        assert heard.loading == [(1, 2)] and heard.ups[0].model == "stub"
        bridge.send(SUBMIT)
        await until(lambda: bool(heard.frames), 30)
        assert heard.frames[0].outputs[0].token_ids == [7]
        await until(lambda: "engine: asked for s1" in caplog.messages, 30)
        assert caplog.messages.count("engine: asked for s1") == 1
    assert heard.downs == []


async def test_a_killed_engine_is_reported_and_replaced() -> None:
    """kill -9 is an event: the reason is told, the next engine gets ready and takes work."""
    async with bridged("talk") as (bridge, heard):
        await until(lambda: bool(heard.ups), 30)
        first = bridge.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: len(heard.ups) == 2, 30)
        assert heard.downs == [("killed by signal 9", "died")]
        assert heard.ups[0].engine_id != heard.ups[1].engine_id and bridge.pid != first
        bridge.send(SUBMIT)
        await until(lambda: bool(heard.frames), 30)


async def test_what_an_engine_leaves_behind_does_not_hold_up_its_successor(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A process that outlives the engine and holds its stderr open is nobody's concern."""
    caplog.set_level(logging.INFO)

    def children() -> list[int]:
        said = [message.split() for message in caplog.messages]
        return [int(words[2]) for words in said if words[:2] == ["engine:", "child"]]

    try:
        async with bridged("parent") as (bridge, heard):
            await until(lambda: bool(heard.ups) and bool(children()), 30)
            assert bridge.pid is not None
            os.kill(bridge.pid, signal.SIGKILL)
            await until(lambda: len(heard.ups) == 2 and len(children()) == 2, 30)
    finally:
        for child in children():
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("mode", "reason", "end"),
    [
        ("fail", "no such tensor", "refused"),
        ("silent", "exit status 3", "died_loading"),
    ],
)
async def test_an_engine_that_cannot_start_says_why(mode: str, reason: str, end: EngineEnd) -> None:
    """The listener hears the engine's own words, or how it ended; it is tried again."""
    async with bridged(mode) as (_, heard):
        await until(lambda: len(heard.downs) >= 2, 30)
        assert heard.downs[:2] == [(reason, end)] * 2 and heard.ups == []


async def test_a_process_that_cannot_be_made_is_tried_again(tmp_path: Path) -> None:
    """No process to be had (no memory, no descriptors) is told as a down; later there may be."""
    program = tmp_path / "python"
    async with bridged("talk", python=str(program)) as (_, heard):
        await until(lambda: len(heard.downs) >= 2, 30)
        assert all("cannot be started" in reason for reason, _ in heard.downs)
        assert {end for _, end in heard.downs} == {"died_loading"}
        program.touch(0o755)
        program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        await until(lambda: bool(heard.ups), 30)


async def test_an_engine_that_talks_nonsense_is_ended() -> None:
    """What is no message is a dead engine, not a dead server."""
    async with bridged("garbage") as (_, heard):
        await until(lambda: bool(heard.downs), 30)
        reason, end = heard.downs[0]
        assert "no message" in reason and end == "died"


async def test_an_engine_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lives, and answers no heartbeat for too long, is ended and replaced."""
    monkeypatch.setattr(under_test, "BEAT_S", 0.05)
    monkeypatch.setattr(under_test, "MAX_SILENCE_S", {"cpu": 2.0})
    monkeypatch.setattr(under_test, "CLOSE_TIMEOUT_S", 0.1)
    async with bridged("hang") as (bridge, heard):
        await until(lambda: bool(heard.ups), 30)
        bridge.send(SUBMIT)
        await until(lambda: bool(heard.downs), 30)
        assert heard.downs == [("it hangs: no sign of life for 2 s", "died")]
        await until(lambda: len(heard.ups) == 2, 30)


async def test_an_idle_engine_answers_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with nothing to say is asked again and again, each time only once it has answered."""
    written: list[bytes] = []
    write = under_test._Link.write

    def spy(link: under_test._Link, data: bytes) -> None:
        written.append(data)
        write(link, data)

    monkeypatch.setattr(under_test._Link, "write", spy)
    monkeypatch.setattr(under_test, "BEAT_S", 0.001)
    async with bridged("talk") as (_, heard):
        await until(lambda: written.count(HEARTBEAT) == 3, 30)
        assert heard.downs == []


async def test_messages_to_an_engine_that_does_not_read_are_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Above a bound messages wait unencoded, and reach the engine in order once it reads."""
    encoded: list[ToEngine] = []

    def encode(message: ToEngine) -> bytes:
        encoded.append(message)
        return encode_message(message)

    monkeypatch.setattr(under_test, "MAX_UNSENT_BYTES", 1 << 16)
    monkeypatch.setattr(under_test, "encode_message", encode)
    ids = pack_ids([1] * (1 << 14))
    submits = [
        msgspec.structs.replace(SUBMIT, sequence_id=f"s{i}", prompt_ids=ids) for i in range(64)
    ]
    async with bridged("talk") as (bridge, heard):
        await until(lambda: bool(heard.ups), 30)
        assert bridge.pid is not None
        os.kill(bridge.pid, signal.SIGSTOP)
        for submit in submits:
            bridge.send(submit)
        assert len(encoded) < 32
        os.kill(bridge.pid, signal.SIGCONT)
        await until(lambda: len(heard.frames) == len(submits), 30)
        said = [frame.outputs[0].sequence_id for frame in heard.frames]
        assert said == [submit.sequence_id for submit in submits]


async def test_frames_wait_while_reading_is_paused(caplog: pytest.LogCaptureFixture) -> None:
    """Paused, nothing is handed over; resumed, nothing is lost."""
    caplog.set_level(logging.INFO)
    async with bridged("talk") as (bridge, heard):
        await until(lambda: bool(heard.ups), 30)
        bridge.pause_reading()
        for _ in range(3):
            bridge.send(SUBMIT)
        await until(lambda: caplog.messages.count("engine: asked for s1") == 3, 30)
        assert heard.frames == []
        bridge.resume_reading()
        bridge.resume_reading()
        await until(lambda: len(heard.frames) == 3, 30)


async def test_closing_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine leaves when asked, and is killed when it does not; no successor is started."""
    monkeypatch.setattr(under_test, "CLOSE_TIMEOUT_S", 0.2)
    for mode in ("talk", "deaf"):
        async with bridged(mode) as (bridge, heard):
            await until(lambda heard=heard: bool(heard.ups), 30)
            pid = bridge.pid
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert heard.downs == [] and bridge.pid is None
