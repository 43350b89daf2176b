"""An actor whose session cannot be rebuilt."""

import asyncio
import logging
import sqlite3
from pathlib import Path

import pytest

from hillstar.server import reads
from hillstar.server.errors import ApiError
from hillstar.server.hub import HubLimits
from support.fake_engine import FakeEngine
from support.fake_text import Letters
from support.hub_world import ALICE, ask, world


class Broken(Letters):
    """A decoder that takes no token."""

    def push(self, token_id: int) -> str:
        raise RuntimeError("this decoder is broken")


async def test_nobody_waits_for_a_session_that_cannot_be_rebuilt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the journal cannot be read, who waits or follows gets an error, and room is made."""
    caplog.set_level(logging.CRITICAL)

    def unreadable(db: sqlite3.Connection, conversation_id: str) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    engine = FakeEngine(auto=False)
    async with world(tmp_path, engine=engine, limits=HubLimits(max_responses=1)) as made:
        made.text.decoder = Broken  # type: ignore[method-assign]
        opened, listener = await made.create(ask("a"))
        await engine.until(lambda: bool(engine.submits))
        waiting = asyncio.create_task(made.hub.wait_done(ALICE, opened.response_id))
        await asyncio.sleep(0)  # it has asked
        monkeypatch.setattr(reads, "load_conversation", unreadable)
        engine.step()
        with pytest.raises(ApiError) as fault:
            await asyncio.wait_for(waiting, 20)
        assert fault.value.code == "internal_error"
        assert listener.error is fault.value
        made.text.decoder = Letters  # type: ignore[method-assign]
        engine.auto = True
        await made.say("b")
