"""The Hub: ownership, idempotency, limits, activation, drain."""

import asyncio
import resource
from pathlib import Path

import pytest

from hillstar.engine.messages import Park, Unpark
from hillstar.server.hub import HubLimits
from hillstar.server.leases import WriterLeases
from support.fake_engine import FakeEngine
from support.hub_world import (
    ALICE,
    BOB,
    Listener,
    Socket,
    ask,
    last_prompt,
    refused,
    world,
)
from support.wait import until


async def test_somebody_elses_id_is_an_unknown_id(tmp_path: Path) -> None:
    """On every operation, another tenant's id answers exactly as one that never was."""
    async with world(tmp_path) as made:
        response = (await made.say("a")).response
        hub, known = made.hub, response["id"]
        conversation = response["conversation"]["id"]

        async def answers(name: str, conv: str) -> list[tuple[int, str, str]]:
            errors = [
                await refused(hub.get(BOB, name)),
                await refused(hub.cancel(BOB, name)),
                await refused(hub.wait_done(BOB, name)),
                await refused(hub.delete(BOB, name)),
                await refused(hub.input_items(BOB, name)),
                await refused(
                    hub.follow(BOB, name, starting_after=None, follower=Listener(), scope=Socket())
                ),
                await refused(made.create(ask(previous_response_id=name), who=BOB)),
                await refused(made.create(ask(conversation=conv), who=BOB)),
                await refused(hub.get_conversation(BOB, conv)),
                await refused(hub.delete_conversation(BOB, conv)),
            ]
            return [
                (e.status, e.code, e.message.replace(name, "ID").replace(conv, "ID"))
                for e in errors
            ]

        await hub.hint(BOB, "typing", conversation_id=conversation)
        assert await answers(known, conversation) == await answers("resp_x", "conv_x")
        assert (await hub.get(ALICE, known)) == response


async def test_a_client_event_id_makes_one_response(tmp_path: Path) -> None:
    """The same key under the same parent replays; another tenant or parent makes its own."""
    async with world(tmp_path) as made:
        request = ask("a", h_client_event_id="once")
        (one, first), (two, second) = await asyncio.gather(
            made.create(request), made.create(request)
        )
        assert one.response_id == two.response_id
        assert sorted((one.replayed, two.replayed)) == [False, True]
        assert await first.wait_done() == await second.wait_done()
        other, _ = await made.create(request, who=BOB)
        assert not other.replayed
        child = ask("a", h_client_event_id="once", previous_response_id=one.response_id)
        assert not (await made.create(child))[0].replayed
    async with world(tmp_path) as made:
        again, replay = await made.create(request)
        assert again.replayed and again.response_id == one.response_id
        assert replay.events == first.events


async def test_a_failed_create_leaves_its_key_free(tmp_path: Path) -> None:
    """A key is taken by a response, not by an attempt."""
    async with world(tmp_path) as made:
        bad = ask("a", h_client_event_id="k", model="other")
        assert (await refused(made.create(bad))).code == "model_not_found"
        created, _ = await made.create(ask("a", h_client_event_id="k"))
        assert not created.replayed


@pytest.mark.parametrize(
    ("limits", "refusal"),
    [
        (HubLimits(max_responses=2), "The server has 2"),
        (HubLimits(max_responses_per_tenant=2), "You have 2"),
    ],
)
async def test_unfinished_responses_are_limited(
    tmp_path: Path, limits: HubLimits, refusal: str
) -> None:
    """Above the limit a create is refused as overload; ended responses count no longer."""
    async with world(tmp_path, engine=FakeEngine(auto=False), limits=limits) as made:
        opened = [await made.create(ask("a")) for _ in range(2)]
        error = await refused(made.create(ask("a")))
        assert (error.status, error.code) == (503, "server_overloaded")
        assert error.retryable and error.message.startswith(refusal)
        made.engine.auto = True
        await made.hub.cancel(ALICE, opened[0][0].response_id)
        await made.create(ask("a"))


async def test_idle_sessions_make_room_and_come_back(tmp_path: Path) -> None:
    """Above the cap idle actors leave memory; their conversations go on as if they had not."""
    limits = HubLimits(max_active_sessions=2)
    async with world(tmp_path, limits=limits) as made:
        chats = [(await made.say(f"{i}")).response for i in range(6)]
        sessions = made.hub.stats().num_sessions
        assert sessions["awake"] <= 2 and sessions["awake"] + sessions["hibernated"] == 6
        for i, chat in enumerate(chats):
            again = await made.say("more", previous_response_id=chat["id"])
            assert again.response["conversation"] == chat["conversation"]
            assert last_prompt(made).startswith(f"<>[{i}]")


async def test_whatever_activates_a_session_makes_room_for_it(tmp_path: Path) -> None:
    """Hints and follows keep to the cap on actors in memory like creates do."""
    limits = HubLimits(max_active_sessions=2)
    async with world(tmp_path, limits=limits) as made:
        chats = [(await made.say(f"{i}")).response for i in range(5)]
        for chat in chats:
            await made.hub.hint(ALICE, "typing", previous_response_id=chat["id"])
            await until(lambda: all(actor.is_idle for actor in made.hub._actors))  # loaded
            assert made.hub.stats().num_sessions["awake"] <= 2


async def test_a_new_conversation_never_makes_room_for_itself(tmp_path: Path) -> None:
    """Where everything in memory is busy, a create is served above the cap."""
    limits = HubLimits(max_active_sessions=1)
    async with world(tmp_path, engine=FakeEngine(auto=False), limits=limits) as made:
        await made.create(ask("a"))
        await asyncio.wait_for(made.create(ask("b")), 20)


async def test_a_writer_is_told_after_its_session_has_left_memory(tmp_path: Path) -> None:
    """The lease outlives the actor: an idle conversation's next writer supersedes the last."""
    older, newer, gone = Socket(), Socket(), Socket()
    async with world(tmp_path, limits=HubLimits(max_active_sessions=1)) as made:
        ids = [(await made.hub.create_conversation(ALICE, {}))["id"] for _ in range(2)]
        await made.say("a", conversation=ids[0], scope=older)
        await made.say("b", conversation=ids[1], scope=gone)  # the first leaves memory
        made.hub.disconnected(gone)
        await made.say("c", conversation=ids[0], scope=newer)
        assert older.lost == [ids[0]]
        await made.say("d", conversation=ids[1], scope=newer)
        assert gone.lost == [] and newer.lost == []


def test_leases_are_bounded() -> None:
    """Beyond the maximum, the lease taken longest ago is forgotten, and its writer not told."""
    leases, older, newer = WriterLeases(2), Socket(), Socket()
    for conversation_id in ("a", "b", "a", "c"):
        leases.take(conversation_id, older)
    assert len(leases) == 2
    leases.take("b", newer)
    leases.take("c", newer)
    assert older.lost == ["c"]
    leases.leave(older)
    leases.leave(newer)
    assert len(leases) == 0


async def test_a_hint_activates_the_conversation(tmp_path: Path) -> None:
    """`typing` loads the session before the message comes; no hint is ever an error."""
    async with world(tmp_path) as made:
        chat = (await made.say("a")).response
    async with world(tmp_path) as made:
        assert made.hub.stats().num_sessions["awake"] == 0
        await made.hub.hint(ALICE, "typing", previous_response_id=chat["id"])
        assert made.hub.stats().num_sessions == {"awake": 1, "hibernated": 0}
        await made.hub.hint(ALICE, "typing", conversation_id="conv_x")
        await made.hub.hint(ALICE, "leaving", conversation_id=chat["conversation"]["id"])
        await made.say("b", previous_response_id=chat["id"])


async def test_draining_finishes_what_runs_and_refuses_the_rest(tmp_path: Path) -> None:
    """Creates are refused while the running responses end."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        _, listener = await made.create(ask("a"))
        draining = asyncio.create_task(made.hub.drain(60))
        await asyncio.sleep(0)
        assert (await refused(made.create(ask("b")))).code == "server_draining"
        assert made.hub.stats().draining and not draining.done()
        made.engine.auto = True
        made.engine.resume_reading()
        await draining
        assert listener.is_done


async def test_what_a_drain_stops_goes_on_in_the_next_server(tmp_path: Path) -> None:
    """At the deadline a response stops at a token; the next server continues with the next one."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        opened, listener = await made.create(ask("a", max_output_tokens=9, h_ignore_eos=True))
        await made.engine.until(lambda: bool(made.engine.submits))
        made.engine.step()
        made.engine.step()
        await listener.wait_for(6)
        await made.hub.drain(0)
        made.engine.step()
        seen = len(listener.events)
    async with world(tmp_path) as made:
        rest = Listener()
        await made.hub.follow(
            ALICE, opened.response_id, starting_after=seen - 1, follower=rest, scope=None
        )
        await rest.wait_done()
        assert (listener.text + rest.text) == (
            await made.say("a", max_output_tokens=9, h_ignore_eos=True)
        ).text


async def test_a_full_disk_parks_what_runs(tmp_path: Path) -> None:
    """Running responses park, creates get 503, unstored ones go on; then all is as before."""
    engine = FakeEngine(auto=False)
    async with world(tmp_path, engine=engine) as made:
        _, listener = await made.create(ask("a", max_output_tokens=9, h_ignore_eos=True))
        await engine.until(lambda: bool(engine.submits))
        engine.step()
        await listener.wait_for(5)
        seen = len(listener.events)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        size = (tmp_path / "journal.sqlite3-wal").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            engine.step()
            await engine.until(lambda: isinstance(engine.sent[-1], Park))
            assert not made.hub.stats().storage_available
            error = await refused(made.create(ask("b")))
            assert (error.status, error.code) == (503, "storage_unavailable")
            assert len(listener.events) == seen  # nothing unstored was sent
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        await engine.until(lambda: isinstance(engine.sent[-1], Unpark))
        engine.auto = True
        engine.resume_reading()
        await listener.wait_done()
        assert listener.response["usage"]["output_tokens"] == 9
        assert made.hub.stats().storage_available


async def test_a_scope_that_leaves_during_its_create_still_leaves(tmp_path: Path) -> None:
    """A disconnect that overtakes the create is applied once the response exists."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        socket = Socket()
        creating = asyncio.create_task(
            made.create(ask("a", h_on_disconnect="cancel"), scope=socket)
        )
        await asyncio.sleep(0)
        made.hub.disconnected(socket)
        opened, _ = await creating
        made.engine.auto = True
        made.engine.resume_reading()
        response = await made.hub.wait_done(ALICE, opened.response_id)
        assert response["status"] == "cancelled"


async def test_many_streams_of_many_tenants_at_once(tmp_path: Path) -> None:
    """Interleaved streams do not disturb each other, and their ends leave nothing behind."""
    async with world(tmp_path) as made:
        alone = {text: (await made.say(text)).text for text in "abcdefgh"}
        made_at_once = await asyncio.gather(
            *(made.say(text, who=who) for text in alone for who in (ALICE, BOB))
        )
        assert [listener.text for listener in made_at_once] == [
            text for text in alone.values() for _ in range(2)
        ]
        assert made.hub.stats().num_responses == {}
        salts = {submit.salt for submit in made.engine.submits}
        assert len(salts) == 2
