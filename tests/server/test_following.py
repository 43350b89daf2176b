"""Who follows a response, what they are given, and what becomes of it when they leave."""

import asyncio
from pathlib import Path

import pytest

from hillstar.engine.messages import Park
from support.fake_engine import FakeEngine
from support.hub_world import (
    ALICE,
    Listener,
    Socket,
    ask,
    prompt_text,
    until_submitted,
    world,
)


async def test_following_replays_and_attaches_in_one_step(tmp_path: Path) -> None:
    """At every point, a new follower gets each event exactly once."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        opened, whole = await made.create(ask("a", h_ignore_eos=True, max_output_tokens=6))
        await until_submitted(made, 1)
        followers: list[tuple[int, Listener]] = []
        while not whole.is_done:
            for after in (None, len(whole.events) // 2, len(whole.events) - 1):
                listener = Listener()
                followed = await made.hub.follow(
                    ALICE, opened.response_id, starting_after=after, follower=listener, scope=None
                )
                start = 0 if after is None else after + 1
                assert followed.next_sequence_number == start and followed.recovered
                followers.append((start, listener))
            made.engine.step()
            await asyncio.sleep(0)
        for start, listener in followers:
            await listener.wait_done()
            assert listener.events == whole.events[start:]


async def test_a_finished_response_is_replayed_from_its_tokens(tmp_path: Path) -> None:
    """After the end the same events come from the journal, from any number on."""
    async with world(tmp_path) as made:
        whole = await made.say("a")
        response_id = whole.response["id"]
        for start in range(len(whole.events) + 1):
            listener = Listener()
            followed = await made.hub.follow(
                ALICE, response_id, starting_after=start - 1, follower=listener, scope=None
            )
            assert followed.next_sequence_number == start
            assert listener.events == whole.events[start:]


async def test_unfollowing_stops_the_events_and_nothing_else(tmp_path: Path) -> None:
    """The response goes on for the others."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        opened, one = await made.create(ask("a", max_output_tokens=3, h_ignore_eos=True))
        two = Listener()
        await made.hub.follow(
            ALICE, opened.response_id, starting_after=None, follower=two, scope=None
        )
        made.hub.unfollow(opened.response_id, one)
        made.engine.auto = True
        made.engine.resume_reading()
        await two.wait_done()
        assert len(one.events) == 2 and two.is_done


@pytest.mark.parametrize("policy", ["continue", "cancel", "pause"])
async def test_on_disconnect(tmp_path: Path, policy: str) -> None:
    """What nobody follows any more goes on, is cancelled, or parks until it is resumed."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        socket = Socket()
        opened, gone = await made.create(
            ask("a", h_on_disconnect=policy, max_output_tokens=4, h_ignore_eos=True), scope=socket
        )
        await until_submitted(made, 1)
        made.engine.step()
        await gone.wait_for(5)
        made.hub.disconnected(socket)
        for _ in range(5):
            await asyncio.sleep(0)
        seen = len(gone.events)
        made.engine.auto = True
        made.engine.resume_reading()
        if policy == "pause":
            assert isinstance(made.engine.sent[-1], Park)
            assert made.hub.stats().num_responses == {"parked": 1}
            assert made.hub.stats().num_sessions["parked"] == 1
        else:
            response = await made.hub.wait_done(ALICE, opened.response_id)
            assert response["status"] == ("cancelled" if policy == "cancel" else "incomplete")
        back = Listener()
        await made.hub.follow(
            ALICE, opened.response_id, starting_after=seen - 1, follower=back, scope=None
        )
        await back.wait_done()
        assert len(gone.events) == seen
        assert back.events[0].sequence_number == seen
        if policy != "cancel":
            assert back.response["usage"]["output_tokens"] == 4


@pytest.mark.parametrize("order", ["paused, then asked", "asked, then paused"])
async def test_a_paused_turn_goes_on_when_a_later_one_waits_for_it(
    tmp_path: Path, order: str
) -> None:
    """A turn behind it needs its end: a pause lasts until somebody wants to go on."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        socket = Socket()
        pausing = {"h_on_disconnect": "pause", "max_output_tokens": 4, "h_ignore_eos": True}
        conversation = (await made.hub.create_conversation(ALICE, {}))["id"]
        paused, _ = await made.create(ask("a", conversation=conversation, **pausing), scope=socket)
        await made.create(ask("b", conversation=conversation, **pausing), scope=socket)
        await until_submitted(made, 1)
        later = ask("c", conversation=conversation)
        if order == "asked, then paused":
            _, listener = await made.create(later, scope=Socket())
            made.hub.disconnected(socket)
        else:
            made.hub.disconnected(socket)
            await made.engine.until(lambda: isinstance(made.engine.sent[-1], Park))
            assert made.hub.stats().num_responses == {"parked": 2}
            _, listener = await made.create(later, scope=Socket())
        made.engine.auto = True
        made.engine.resume_reading()
        await listener.wait_done()
        assert (await made.hub.get(ALICE, paused.response_id))["usage"]["output_tokens"] == 4
        assert [prompt_text(submit)[-3:] for submit in made.engine.submits] == ["[a]", "[b]", "[c]"]


async def test_another_follower_keeps_a_response_going(tmp_path: Path) -> None:
    """`on_disconnect` applies only when the last follower has gone."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        first, second = Socket(), Socket()
        opened, _ = await made.create(ask("a", h_on_disconnect="cancel"), scope=first)
        follower = Listener()
        await made.hub.follow(
            ALICE, opened.response_id, starting_after=None, follower=follower, scope=second
        )
        made.hub.disconnected(first)
        await until_submitted(made, 1)
        made.engine.step()
        await follower.wait_for(5)
        assert (await made.hub.get(ALICE, opened.response_id))["status"] == "in_progress"
        made.hub.disconnected(second)
        made.engine.auto = True
        response = await made.hub.wait_done(ALICE, opened.response_id)
        assert response["status"] == "cancelled"
