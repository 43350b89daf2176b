"""Deletion: what is erased, and what is built on it afterwards."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hillstar.engine.messages import Release
from hillstar.server.errors import storage_unavailable
from hillstar.server.records import EraseTurns, Write
from support.fake_engine import FakeEngine
from support.hub_world import (
    ALICE,
    Listener,
    ask,
    last_prompt,
    refused,
    world,
)


async def test_a_deleted_response_is_forgotten_everywhere(tmp_path: Path) -> None:
    """Its id is unknown, its blocks are given back, later prompts are built without it."""
    async with world(tmp_path) as made:
        first = (await made.say("a")).response["id"]
        second = (await made.say("hush", previous_response_id=first)).response["id"]
        third = (await made.say("c", previous_response_id=second)).response
        await made.hub.delete(ALICE, second)
        assert (await refused(made.hub.get(ALICE, second))).code == "response_not_found"
        assert (await refused(made.hub.delete(ALICE, second))).code == "response_not_found"
        assert Release(third["conversation"]["id"], True) in made.engine.sent
        assert await made.hub.get(ALICE, third["id"]) == third
        after = await made.say("d", previous_response_id=third["id"])
        assert after.response["conversation"] == third["conversation"]
        assert "[hush]" not in last_prompt(made) and "[c]" in last_prompt(made)
    async with world(tmp_path) as made:
        await made.say("e", previous_response_id=after.response["id"])
        assert "[hush]" not in last_prompt(made) and "[d]" in last_prompt(made)


async def test_deleting_the_last_turn_takes_the_conversation_back(tmp_path: Path) -> None:
    """The conversation then ends at the turn before, and is continued from there."""
    async with world(tmp_path) as made:
        first = (await made.say("a")).response
        second = (await made.say("hush", previous_response_id=first["id"])).response["id"]
        await made.hub.delete(ALICE, second)
        again = await made.say("b", previous_response_id=first["id"])
        assert again.response["conversation"] == first["conversation"]
        assert "[hush]" not in last_prompt(made)


@pytest.mark.parametrize("parent", ["last", "fork of later", "deleted"])
async def test_a_turn_opened_while_its_past_is_deleted_stands_without_it(
    tmp_path: Path, parent: str
) -> None:
    """A turn built upon an erased one, and stored after the erasure, is found and continued."""
    async with world(tmp_path) as made:
        first = (await made.say("a")).response
        conversation = first["conversation"]["id"]
        gone = (await made.say("hush", previous_response_id=first["id"])).response["id"]
        later: list[Listener] = []
        context: dict[str, Any] = {"conversation": conversation}
        if parent == "fork of later":
            base = (await made.say("b", previous_response_id=gone)).response["id"]
            await made.say("c", previous_response_id=base)
            context = {"previous_response_id": base}
        stored = made.journal.stored

        async def stored_late(write: Write) -> None:
            await stored(write)
            if isinstance(write, EraseTurns):
                later.append(await made.say("between", **context))

        async def stored_early(write: Write) -> None:
            """Queue the erasure before a create whose prompt is being built."""
            if isinstance(write, EraseTurns):
                made.text.gate.clear()
                opening = asyncio.create_task(made.say("between", previous_response_id=gone))
                await asyncio.to_thread(made.text.entered.wait, 60)
                await stored(write)
                made.text.gate.set()
                later.append(await opening)
            else:
                await stored(write)

        made.journal.stored = (  # type: ignore[method-assign]
            stored_early if parent == "deleted" else stored_late
        )
        await made.hub.delete(ALICE, gone)
        made.journal.stored = stored  # type: ignore[method-assign]
        between = later[0].response["id"]
    async with world(tmp_path) as made:
        (prompt,) = made.query("SELECT prompt_ids FROM responses WHERE id = ?", between)
        assert prompt == (None,)
        after = await made.say("end", previous_response_id=between)
        assert after.response["status"] in ("completed", "incomplete")
        prompt_text = last_prompt(made)
        assert "[a]" in prompt_text and "[between]" in prompt_text
        assert "[hush]" not in prompt_text
        await made.hub.delete(ALICE, between)


async def test_a_fork_forgets_what_was_deleted_before_it(tmp_path: Path) -> None:
    """A conversation that has branched off after a deleted turn no longer knows it."""
    async with world(tmp_path) as made:
        gone = (await made.say("hush")).response["id"]
        later = (await made.say("b", previous_response_id=gone)).response["id"]
        await made.say("main", previous_response_id=later)
        fork = (await made.say("fork", previous_response_id=later)).response
        await made.hub.delete(ALICE, gone)
        assert Release(fork["conversation"]["id"], True) in made.engine.sent
        await made.say("on", previous_response_id=fork["id"])
        assert "[hush]" not in last_prompt(made) and "[fork]" in last_prompt(made)


async def test_deleting_a_running_response_cancels_it(tmp_path: Path) -> None:
    """Nothing of it is left, in the engine either."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        opened, listener = await made.create(ask("a"))
        await made.engine.until(lambda: bool(made.engine.submits))
        made.engine.auto = True
        await made.hub.delete(ALICE, opened.response_id)
        assert listener.response["status"] == "cancelled"
        assert made.engine.running == []
        assert made.query("SELECT count(*) FROM responses") == [(0,)]


async def test_deleting_a_conversation_ends_and_erases_its_turns(tmp_path: Path) -> None:
    """Running and waiting turns are cancelled first; a fork keeps working."""
    async with world(tmp_path) as made:
        first = (await made.say("a")).response
        await made.say("b", previous_response_id=first["id"])
        fork = (await made.say("c", previous_response_id=first["id"])).response
        made.engine.auto = False
        conversation = first["conversation"]["id"]
        opened, running = await made.create(ask("d", conversation=conversation))
        await made.engine.until(lambda: len(made.engine.submits) == 4)
        made.engine.auto = True
        await made.hub.delete_conversation(ALICE, conversation)
        assert running.response["status"] == "cancelled"
        for work in (
            made.hub.get(ALICE, opened.response_id),
            made.hub.get(ALICE, first["id"]),
            made.hub.get_conversation(ALICE, conversation),
            made.create(ask("e", conversation=conversation)),
        ):
            assert (await refused(work)).status == 404
        assert await made.hub.get(ALICE, fork["id"]) == fork
        await made.say("f", previous_response_id=fork["id"])


async def test_a_conversation_that_could_not_be_erased_goes_on(tmp_path: Path) -> None:
    """A deletion that storage refuses changes nothing for later turns."""
    async with world(tmp_path) as made:
        conversation = (await made.say("a")).response["conversation"]["id"]
        stored = made.journal.stored

        async def refuse(write: Write) -> None:
            raise storage_unavailable("The disk is full.")

        made.journal.stored = refuse  # type: ignore[method-assign]
        error = await refused(made.hub.delete_conversation(ALICE, conversation))
        assert error.code == "storage_unavailable"
        made.journal.stored = stored  # type: ignore[method-assign]
        listener = await made.say("b", conversation=conversation)
        assert listener.response["status"] in ("completed", "incomplete")


async def test_a_conversation_deleted_twice_at_once_is_counted_once(tmp_path: Path) -> None:
    """The number of stored conversations is right whoever deletes what when."""
    async with world(tmp_path) as made:
        ids = [(await made.hub.create_conversation(ALICE, {}))["id"] for _ in range(3)]
        await asyncio.gather(*(made.hub.delete_conversation(ALICE, ids[0]) for _ in range(2)))
        assert made.hub.stats().num_sessions["hibernated"] == 2
