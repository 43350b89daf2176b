"""`store: false`: what is kept in memory only, and for whom."""

import asyncio
from pathlib import Path

import pytest

from hillstar.engine.messages import Cancel, Park, pack_ids
from hillstar.server import hub, kept, session
from hillstar.server.hub import HubLimits
from support.fake_engine import FakeEngine
from support.hub_world import (
    ALICE,
    Listener,
    Socket,
    World,
    ask,
    holds,
    last_prompt,
    refused,
    world,
)
from support.wait import until


async def test_memory_only_responses(tmp_path: Path) -> None:
    """`store: false` is a parent on its own connection only, and gone with it."""
    async with world(tmp_path) as made:
        mine, other = Socket(), Socket()
        first = await made.say("secret", store=False, scope=mine)
        parent = first.response["id"]
        assert await made.hub.get(ALICE, parent) == first.response
        replay = Listener()
        await made.hub.follow(ALICE, parent, starting_after=None, follower=replay, scope=mine)
        assert replay.events == first.events
        second = await made.say("b", store=False, scope=mine, previous_response_id=parent)
        assert second.response["conversation"] == first.response["conversation"]
        assert "[secret]" in last_prompt(made)
        for scope in (other, None):
            error = await refused(
                made.create(ask("c", store=False, previous_response_id=parent), scope=scope)
            )
            assert error.code == "previous_response_not_found"
        fork = await made.say("d", store=False, scope=mine, previous_response_id=parent)
        assert fork.response["conversation"] != first.response["conversation"]
        assert made.query("SELECT count(*) FROM responses") == [(0,)]
        made.hub.disconnected(mine)
        await asyncio.sleep(0)
        made.hub.stats()
        error = await refused(made.create(ask(previous_response_id=parent), scope=mine))
        assert error.code == "previous_response_not_found"


async def test_a_stored_turn_upon_a_memory_only_one_keeps_only_itself(tmp_path: Path) -> None:
    """The stored child's own items are kept; the unstored parent's tokens are in no file."""
    async with world(tmp_path) as made:
        socket = Socket()
        first = await made.say("unspoken", store=False, scope=socket)
        child = await made.say("b", scope=socket, previous_response_id=first.response["id"])
        assert "[unspoken]" in last_prompt(made)
        assert await made.hub.get(ALICE, child.response["id"]) == child.response
        further = await made.say("c", previous_response_id=child.response["id"])
        assert "[unspoken]" in last_prompt(made)
        assert further.response["conversation"] == child.response["conversation"]
    assert not holds(tmp_path, b"unspoken")
    assert not holds(tmp_path, pack_ids([ord(c) for c in "unspoken"]))
    async with world(tmp_path) as made:
        error = await refused(made.create(ask(previous_response_id=further.response["id"])))
        assert error.code == "previous_response_not_found"


async def test_a_stored_turn_upon_a_memory_only_one_is_continued_while_its_connection_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be forked like any other there, with all of its past; afterwards it is not found."""
    monkeypatch.setattr(hub, "SWEEP_S", 0.001)
    async with world(tmp_path, limits=HubLimits(idle_timeout_s=0)) as made:
        socket = Socket()
        first = await made.say("unspoken", store=False, scope=socket)
        upon = {"scope": socket, "previous_response_id": first.response["id"]}
        child = (await made.say("b", **upon)).response
        ends = []
        for text in "cde":
            _, end = await made.create(ask(text, previous_response_id=child["id"]), scope=socket)
            await end.wait_done()
            assert "[unspoken]" in last_prompt(made) and f"[{text}]" in last_prompt(made)
            ends.append(end.response)
        assert len({end["conversation"]["id"] for end in (child, *ends)}) == 3  # two forks
        further = await made.say("f", scope=socket, previous_response_id=ends[2]["id"])
        assert "[unspoken]" in last_prompt(made) and "[e]" in last_prompt(made)
        made.hub.disconnected(socket)
        await until(lambda: made.hub.stats().num_sessions["awake"] == 0)
        for response in (child, *ends, further.response):
            error = await refused(made.create(ask(previous_response_id=response["id"])))
            assert error.code == "previous_response_not_found"
            assert response["id"] in error.message and "not stored" in error.message
            assert await made.hub.get(ALICE, response["id"]) == response
    assert not holds(tmp_path, pack_ids([ord(c) for c in "unspoken"]))


async def test_a_memory_only_past_is_in_no_file_when_instructions_change(tmp_path: Path) -> None:
    """New instructions render the past afresh, what is not stored included: nothing is kept."""
    async with world(tmp_path) as made:
        socket = Socket()
        first = await made.say("unspoken", store=False, scope=socket)
        child = await made.say("b", scope=socket, previous_response_id=first.response["id"])
        for _ in ("continued", "forked"):
            await made.say(
                "c", scope=socket, instructions="new", previous_response_id=child.response["id"]
            )
            assert "[unspoken]" in last_prompt(made)
    assert not holds(tmp_path, pack_ids([ord(c) for c in "unspoken"]))


async def test_a_memory_only_past_that_a_restart_has_lost_is_said(tmp_path: Path) -> None:
    """An unfinished turn built on it ends as failed; it never goes on as if nothing came before."""
    made = World(tmp_path, FakeEngine(auto=False), None)
    await made.hub.start()
    socket = Socket()
    created, first = await made.create(ask("unspoken", store=False), scope=socket)
    await made.engine.until(lambda: bool(made.engine.submits))
    while not first.is_done:
        made.engine.step()
        await asyncio.sleep(0)
    child, _ = await made.create(ask("b", previous_response_id=created.response_id), scope=socket)
    await made.engine.until(lambda: len(made.engine.submits) == 2)
    await made.hub.drain(0)
    await made.hub.close()
    async with world(tmp_path) as made:
        response = await made.hub.wait_done(ALICE, child.response_id)
        assert response["status"] == "failed"
        assert response["error"]["code"] == "previous_response_not_found"
        assert made.engine.submits == []


async def test_erasing_forgets_the_contexts_that_hold_what_is_erased(tmp_path: Path) -> None:
    """What is deleted is in no later prompt, also where memory alone knew the past."""
    async with world(tmp_path) as made:
        socket = Socket()
        first = await made.say("unspoken", store=False, scope=socket)
        child = await made.say("hush", scope=socket, previous_response_id=first.response["id"])
        further = await made.say("c", scope=socket, previous_response_id=child.response["id"])
        await made.hub.delete(ALICE, child.response["id"])
        last = ask("d", previous_response_id=further.response["id"])
        assert (
            await refused(made.create(last, scope=socket))
        ).code == "previous_response_not_found"


async def test_memory_only_work_ends_with_its_connection(tmp_path: Path) -> None:
    """By default an unstored response is cancelled when nobody follows it any more."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        socket = Socket()
        _, listener = await made.create(ask("a", store=False), scope=socket)
        await made.engine.until(lambda: bool(made.engine.submits))
        made.hub.disconnected(socket)
        made.engine.auto = True
        made.engine.resume_reading()
        await made.engine.until(lambda: made.engine.running == [])
        assert not listener.is_done  # it had left


async def test_store_false_does_not_enter_a_conversation(tmp_path: Path) -> None:
    """A stored conversation takes stored turns only; the refusal names the field."""
    async with world(tmp_path) as made:
        conversation = (await made.hub.create_conversation(ALICE, {}))["id"]
        error = await refused(made.create(ask(conversation=conversation, store=False)))
        assert (error.status, error.param) == (400, "store")
        both = ask(conversation=conversation, previous_response_id="resp_x")
        assert (await refused(made.create(both))).status == 400


async def test_an_unstored_child_of_a_stored_response_forks(tmp_path: Path) -> None:
    """Nothing unstored ever becomes part of a stored conversation."""
    async with world(tmp_path) as made:
        first = await made.say("a")
        side = await made.say("b", store=False, previous_response_id=first.response["id"])
        assert side.response["conversation"] != first.response["conversation"]
        main = await made.say("c", previous_response_id=first.response["id"])
        assert main.response["conversation"] == first.response["conversation"]
        assert "[b]" not in last_prompt(made)


async def test_the_least_used_memory_only_conversations_make_room(tmp_path: Path) -> None:
    """They are kept for their connection as long as there is room, and only so long."""
    async with world(tmp_path, limits=HubLimits(max_active_sessions=2)) as made:
        socket = Socket()
        ids = [(await made.say(c, store=False, scope=socket)).response["id"] for c in "abc"]
        error = await refused(
            made.create(ask(store=False, previous_response_id=ids[0]), scope=socket)
        )
        assert error.code == "previous_response_not_found"
        await made.say("d", store=False, scope=socket, previous_response_id=ids[2])
        assert "[c]" in last_prompt(made)


async def test_a_memory_only_chain_keeps_its_last_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a chain is, memory holds so many of its turns; older ones are not found."""
    monkeypatch.setattr(kept, "MAX_KEPT", 2)
    async with world(tmp_path) as made:
        for store in (False, True):
            socket = Socket()
            ids = [(await made.say("a", store=False, scope=socket)).response["id"]]
            for text in "bcd":
                turn = await made.say(text, store=store, scope=socket, previous_response_id=ids[-1])
                ids.append(turn.response["id"])
            for parent in ids[2:]:
                await made.say(
                    "e",
                    store=store,
                    scope=Socket() if store else socket,
                    previous_response_id=parent,
                )
                assert "[a]" in last_prompt(made)
            error = await refused(made.create(ask(previous_response_id=ids[1]), scope=socket))
            assert error.code == "previous_response_not_found"


async def test_a_memory_only_response_is_paused_for_so_long_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may ever resume it: it is cancelled then, and its blocks are given back."""
    monkeypatch.setattr(hub, "SWEEP_S", 0.001)
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        socket = Socket()
        for store in (True, False):
            request = ask("a", store=store, h_on_disconnect="pause")
            await made.create(request, scope=socket)
        await made.engine.until(lambda: len(made.engine.submits) == 2)
        made.hub.disconnected(socket)
        await made.engine.until(lambda: sum(isinstance(m, Park) for m in made.engine.sent) == 2)
        made.engine.step()
        assert not any(isinstance(message, Cancel) for message in made.engine.sent)
        monkeypatch.setattr(session, "MAX_PAUSE_S", 0.0)
        await made.engine.until(lambda: isinstance(made.engine.sent[-1], Cancel))
        made.engine.step()
        await until(lambda: made.hub.stats().num_responses == {"parked": 1})
        assert len(made.engine.running) == 1
