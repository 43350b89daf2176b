"""Whatever dies, the stream that a client sees is the one it would have seen."""

import asyncio
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hillstar.engine.messages import Submit, unpack_ids
from hillstar.server.events import Event, TextDelta
from hillstar.server.request import CreateResponse
from hillstar.server.sequences import MAX_STRIKES
from support.fake_engine import FakeEngine, next_token
from support.fake_text import Letters
from support.hub_world import (
    ALICE,
    TERMINAL,
    Listener,
    Socket,
    World,
    ask,
    kind,
    world,
)
from support.wait import until

RELAXED = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {"max_output_tokens": 20, "h_ignore_eos": True},
    "stopped": {"max_output_tokens": 200, "h_ignore_eos": True, "h_stop": ("ab", "q", "ze")},
    "to its end": {"max_output_tokens": 300},
    "logprobs": {"max_output_tokens": 8, "include": ("message.output_text.logprobs",)},
}


def request(name: str) -> CreateResponse:
    return ask("tell me", **REQUESTS[name])


def comparable(events: Sequence[Event | TextDelta]) -> list[object]:
    """Events without what differs from one run to the next: ids and times."""
    return [_scrub(event) for event in events]


def _scrub(event: Event | TextDelta) -> object:
    if isinstance(event, TextDelta):
        return (event.sequence_number, event.delta, event.first_token, event.num_tokens)
    body = dict(event.body)
    if "response" in body:
        response = body["response"]
        body = {name: response[name] for name in ("status", "usage", "error")}
        body["texts"] = [part["text"] for item in response["output"] for part in item["content"]]
    for name in ("item", "item_id"):
        body.pop(name, None)
    return (event.type, event.sequence_number, str(body))


async def uncut(tmp_path: Path, name: str) -> list[object]:
    """The events of a run that nothing disturbed."""
    async with world(tmp_path / f"uncut-{name}") as made:
        _, listener = await made.create(request(name))
        return comparable(await listener.wait_done())


async def finish(made: World, listener: Listener) -> None:
    made.engine.auto = True
    made.engine.resume_reading()
    await listener.wait_done()


async def advance(made: World, steps: int) -> None:
    """Some steps of the engine, each with a chance for the server to handle it."""
    for _ in range(steps):
        made.engine.step()
        await asyncio.sleep(0)


@pytest.mark.parametrize("name", REQUESTS)
@RELAXED
@given(seed=st.integers(0, 1 << 32))
async def test_a_stream_cut_and_resumed_anywhere_is_the_uncut_one(
    tmp_path: Path, name: str, seed: int
) -> None:
    """A client that remembers its last number sees the same events, whole, whatever was cut."""
    random = Random(seed)
    expected = await uncut(tmp_path, name)
    async with world(tmp_path / "cut", engine=FakeEngine(auto=False)) as made:
        socket = Socket()
        opened, listener = await made.create(request(name), scope=socket)
        await made.engine.until(lambda: bool(made.engine.submits))
        seen: list[Event | TextDelta] = []
        while not seen or kind(seen[-1]) not in TERMINAL:
            await advance(made, random.randrange(12))
            made.hub.disconnected(socket)
            await asyncio.sleep(0)
            # The client may not have read everything that was posted.
            seen += listener.events[: random.randrange(len(listener.events) + 1)]
            socket, listener = Socket(), Listener()
            after = seen[-1].sequence_number if seen else None
            await made.hub.follow(
                ALICE, opened.response_id, starting_after=after, follower=listener, scope=socket
            )
        assert comparable(seen) == expected


@pytest.mark.parametrize("name", REQUESTS)
@RELAXED
@given(seed=st.integers(0, 1 << 32))
async def test_the_server_may_die_anywhere(tmp_path: Path, name: str, seed: int) -> None:
    """After a death of the server the response goes on at its next token, by itself."""
    random = Random(seed)
    expected = await uncut(tmp_path, name)
    data_dir = tmp_path / f"{seed}"
    made = World(data_dir, FakeEngine(auto=False), None)
    await made.hub.start()
    opened, listener = await made.create(request(name))
    seen: list[Event | TextDelta] = []
    while True:
        if random.random() < 0.5:  # let this life get as far as the engine
            await running_or_done(made, listener)
        for _ in range(random.randrange(24)):
            await asyncio.sleep(0)
            made.engine.step()
        seen += listener.events
        if listener.is_done:
            break
        made = await reborn(made)
        listener = Listener()
        after = seen[-1].sequence_number if seen else None
        await made.hub.follow(
            ALICE, opened.response_id, starting_after=after, follower=listener, scope=None
        )
    await kill(made)
    assert comparable(seen) == expected


async def running_or_done(made: World, listener: Listener) -> None:
    """Return once the engine was given the response, or it had ended before."""
    await until(lambda: bool(made.engine.submits) or listener.is_done)


async def reborn(made: World) -> World:
    """A server on the files as they are this instant: what a kill -9 leaves behind."""
    image = made.data_dir.with_name(f"{made.data_dir.name}+")
    shutil.copytree(made.data_dir, image, ignore=shutil.ignore_patterns("reserved"))
    await kill(made)
    shutil.rmtree(made.data_dir)
    again = World(image, FakeEngine(auto=False), None)
    await again.hub.start()
    return again


async def kill(made: World) -> None:
    """Close what this process holds of it, so that no thread outlives the test."""
    await made.engine.close()
    await made.hub.close()


@pytest.mark.parametrize("name", REQUESTS)
@RELAXED
@given(steps=st.lists(st.integers(0, 6), min_size=1, max_size=4))
async def test_the_engine_may_die_anywhere(tmp_path: Path, name: str, steps: list[int]) -> None:
    """After a death of the engine followers see a pause and nothing else."""
    expected = await uncut(tmp_path, name)
    async with world(tmp_path / f"e{steps}", engine=FakeEngine(auto=False)) as made:
        _, listener = await made.create(request(name))
        await made.engine.until(lambda: bool(made.engine.submits))
        for num in steps:
            await advance(made, num + 1)
            made.engine.die()
        await finish(made, listener)
        assert comparable(listener.events) == expected


async def test_tokens_on_their_way_to_the_journal_are_not_generated_twice(tmp_path: Path) -> None:
    """A new engine is given every token that was received, stored or not yet."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        _, listener = await made.create(ask("a", max_output_tokens=9, h_ignore_eos=True))
        await made.engine.until(lambda: bool(made.engine.submits))
        for _ in range(4):
            made.engine.step()
        made.engine.die()  # before the loop has run at all
        assert len(unpack_ids(made.engine.submits[1].output_ids)) == 4
        await finish(made, listener)
        deltas = [event for event in listener.events if isinstance(event, TextDelta)]
        assert [delta.first_token for delta in deltas] == list(range(9))


@pytest.mark.parametrize("policy", ["continue", "pause", "cancel"])
async def test_unfinished_responses_after_a_restart(tmp_path: Path, policy: str) -> None:
    """At the start each unfinished response goes by its `on_disconnect`."""
    made = World(tmp_path, FakeEngine(auto=False), None)
    await made.hub.start()
    fields = {"max_output_tokens": 6, "h_ignore_eos": True, "h_on_disconnect": policy}
    opened, listener = await made.create(ask("a", **fields))
    await made.engine.until(lambda: bool(made.engine.submits))
    await advance(made, 2)
    await listener.wait_for(6)
    await kill(made)
    async with world(tmp_path) as made:
        if policy == "pause":
            assert (await made.hub.get(ALICE, opened.response_id))["status"] == "in_progress"
            assert made.hub.stats().num_responses == {"parked": 1}
            assert made.engine.submits == []
        else:
            response = await made.hub.wait_done(ALICE, opened.response_id)
            assert response["status"] == ("cancelled" if policy == "cancel" else "incomplete")
            assert response["usage"]["output_tokens"] == (2 if policy == "cancel" else 6)
        back = Listener()
        await made.hub.follow(
            ALICE, opened.response_id, starting_after=5, follower=back, scope=None
        )
        await back.wait_done()
        assert back.events[0].sequence_number == 6
        if policy != "cancel":
            assert back.response["usage"]["output_tokens"] == 6


async def test_queued_turns_survive_a_restart_in_order(tmp_path: Path) -> None:
    """What waited in a conversation runs after the restart, each turn upon the one before."""
    made = World(tmp_path, FakeEngine(auto=False), None)
    await made.hub.start()
    conversation = (await made.hub.create_conversation(ALICE, {}))["id"]
    ids = []
    for text in "abc":
        created, _ = await made.create(ask(text, conversation=conversation, max_output_tokens=2))
        ids.append(created.response_id)
    await kill(made)
    async with world(tmp_path) as made:
        for response_id in ids:
            await made.hub.wait_done(ALICE, response_id)
        prompts = ["".join(map(chr, unpack_ids(s.prompt_ids))) for s in made.engine.submits]
        assert [prompt[-3:] for prompt in prompts] == ["[a]", "[b]", "[c]"]
        assert prompts[2].startswith(prompts[1])


async def test_a_seed_is_drawn_once(tmp_path: Path) -> None:
    """A response without a seed gets one that is stored: a restart repeats it."""
    made = World(tmp_path, FakeEngine(auto=False), None)
    await made.hub.start()
    _, _ = await made.create(ask("a", h_seed=None))
    await made.engine.until(lambda: bool(made.engine.submits))
    seed = made.engine.submits[0].params.seed
    await kill(made)
    async with world(tmp_path) as made:
        await made.engine.until(lambda: bool(made.engine.submits))
        assert made.engine.submits[0].params.seed == seed != 0


async def test_a_poisonous_response_fails_alone(tmp_path: Path) -> None:
    """A sequence that kills every engine is given up; the others never notice more than a pause."""
    engine = FakeEngine(auto=False)
    engine.poison = lambda submit: "".join(map(chr, unpack_ids(submit.prompt_ids))) == "<>[bad]"
    async with world(tmp_path, engine=engine) as made:
        good = [
            (await made.create(ask(text, max_output_tokens=5, h_ignore_eos=True)))[1]
            for text in "abc"
        ]
        _, bad = await made.create(ask("bad"))
        await engine.until(lambda: len(engine.submits) >= 4)
        engine.auto = True
        engine.resume_reading()
        for listener in (*good, bad):
            await listener.wait_done()
        assert bad.response["status"] == "failed"
        assert bad.response["error"]["code"] == "server_error"
        assert [listener.response["usage"]["output_tokens"] for listener in good] == [5, 5, 5]
        assert engine.num_starts <= 2 + MAX_STRIKES
        assert made.hub.stats().num_engine_restarts == engine.num_starts - 1


async def test_many_deaths_of_innocent_engines_fail_nobody(tmp_path: Path) -> None:
    """A response that makes progress between deaths is never given up."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        _, listener = await made.create(ask("a", max_output_tokens=30, h_ignore_eos=True))
        await made.engine.until(lambda: bool(made.engine.submits))
        for _ in range(12):
            await advance(made, 2)
            made.engine.die()
        await finish(made, listener)
        assert listener.response["usage"]["output_tokens"] == 30


class Breakable(Letters):
    """A decoder that fails when told to."""

    def __init__(self, failures: list[str]) -> None:
        self._failures = failures

    def push(self, token_id: int) -> str:
        if self._failures and self._failures[0] == chr(token_id):
            self._failures.pop(0)
            raise RuntimeError("this decoder is broken")
        return super().push(token_id)


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def said(text: str, num: int) -> str:
    """The first tokens of the answer to `text`."""
    history = [ord(c) for c in f"<>[{text}]"]
    for _ in range(num):
        token = next_token(history, 7)
        history.append(token or ord("a"))
    return "".join(map(chr, history[-num:]))


async def test_a_failing_session_is_rebuilt_from_the_journal(tmp_path: Path, quiet: None) -> None:
    """A handler that raises costs its conversation a moment; the stream stays the same."""
    expected = await uncut(tmp_path, "plain")
    async with world(tmp_path / "broken", engine=FakeEngine(auto=False)) as made:
        failures = [said("tell me", 20)[4]]
        made.text.decoder = lambda: Breakable(failures)  # type: ignore[method-assign]
        _, listener = await made.create(request("plain"))
        _, other = await made.create(ask("other"))
        await finish(made, listener)
        await other.wait_done()
        assert comparable(listener.events) == expected
        assert failures == []
        assert made.hub.stats().num_actor_restarts == 1
        assert other.response["status"] in ("completed", "incomplete")


async def test_a_response_that_keeps_failing_its_session_ends_failed(
    tmp_path: Path, quiet: None
) -> None:
    """After some restarts the response ends as failed with usage, and can be read back."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        culprit = said("a", 9)[8]
        failures = [culprit] * 99
        made.text.decoder = lambda: Breakable(failures)  # type: ignore[method-assign]
        opened, listener = await made.create(ask("a", max_output_tokens=20, h_ignore_eos=True))
        _, other = await made.create(ask("0", max_output_tokens=3))
        await finish(made, listener)
        await other.wait_done()
        assert kind(listener.events[-1]) == "response.failed"
        assert listener.response["usage"]["output_tokens"] == said("a", 9).index(culprit)
        failures.clear()
        assert await made.hub.get(ALICE, opened.response_id) == listener.response
        replay = Listener()
        await made.hub.follow(
            ALICE, opened.response_id, starting_after=None, follower=replay, scope=None
        )
        assert replay.events == listener.events
        # The conversation goes on without the failed turn.
        made.text.decoder = Letters  # type: ignore[method-assign]
        await made.say("b", conversation=opened.conversation_id)


async def test_responses_kept_in_memory_survive_an_engine(tmp_path: Path) -> None:
    """`store: false` outlives the engine's death and leaves no trace in the journal."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        socket = Socket()
        _, listener = await made.create(
            ask("secret", store=False, max_output_tokens=6, h_ignore_eos=True), scope=socket
        )
        await made.engine.until(lambda: bool(made.engine.submits))
        await advance(made, 3)
        made.engine.die()
        await finish(made, listener)
        assert listener.response["usage"]["output_tokens"] == 6
        assert made.query("SELECT count(*) FROM responses") == [(0,)]
        assert made.query("SELECT count(*) FROM tokens") == [(0,)]


async def test_submits_after_a_restart_carry_the_output_so_far(tmp_path: Path) -> None:
    """The next server submits prompt and output as they were: the exact next token follows."""
    made = World(tmp_path, FakeEngine(auto=False), None)
    await made.hub.start()
    await made.create(ask("a", max_output_tokens=9, h_ignore_eos=True))
    await made.engine.until(lambda: bool(made.engine.submits))
    await advance(made, 3)
    first: Submit = made.engine.submits[0]
    await kill(made)
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        await made.engine.until(lambda: bool(made.engine.submits))
        again = made.engine.submits[0]
        assert (again.prompt_ids, again.params) == (first.prompt_ids, first.params)
        assert len(unpack_ids(again.output_ids)) == 3
        assert again.sequence_id != first.sequence_id
