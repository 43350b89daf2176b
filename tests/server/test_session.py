"""One conversation: its turns, their order, its forks."""

import asyncio
from pathlib import Path

import pytest

from hillstar.engine.messages import Cancel, unpack_ids
from hillstar.server.admission import MAX_QUEUED_TURNS
from hillstar.server.errors import ApiError
from support.fake_engine import FakeEngine, continuation
from support.fake_text import REFUSED
from support.hub_world import (
    ALICE,
    Listener,
    Socket,
    ask,
    kind,
    prompt_text,
    until_submitted,
    world,
)


async def test_a_turn_runs_from_created_to_completed(tmp_path: Path) -> None:
    """The events are contiguous from 0, end in one terminal event, and carry the usage."""
    async with world(tmp_path) as made:
        done = await made.say("hi", h_ignore_eos=True, max_output_tokens=5)
        assert [event.sequence_number for event in done.events] == list(range(len(done.events)))
        assert kind(done.events[0]) == "response.created"
        assert kind(done.events[-1]) == "response.incomplete"
        expected = continuation([ord(c) for c in "<>[hi]"], 5, seed=7)
        assert done.text == "".join(map(chr, expected))
        assert done.response["usage"]["input_tokens"] == 6
        assert done.response["usage"]["output_tokens"] == 5
        assert len(made.latencies.ttfts) == 1 and len(made.latencies.itls) == 4


async def test_a_chain_continues_its_conversation_on_the_parents_ids(tmp_path: Path) -> None:
    """The next turn's prompt is the parent's prompt, its output, and the new message."""
    async with world(tmp_path) as made:
        first = await made.say("a", max_output_tokens=3)
        second = await made.say("b", previous_response_id=first.response["id"])
        assert second.response["conversation"] == first.response["conversation"]
        one, two = made.engine.submits
        said = first.text + ("\0" if first.response["status"] == "completed" else "")
        assert prompt_text(two) == f"{prompt_text(one)}{said}[b]"
        assert two.lease_id == one.lease_id == first.response["conversation"]["id"]
        # The journal stores only what is new.
        rows = made.query("SELECT base_tokens, prompt_ids FROM responses ORDER BY key")
        assert "".join(map(chr, unpack_ids(rows[1][1]))) == "[b]"


async def test_naming_an_earlier_turn_forks(tmp_path: Path) -> None:
    """Any number of forks may share a parent; the first conversation is not disturbed."""
    async with world(tmp_path) as made:
        first = await made.say("a")
        await made.say("b", previous_response_id=first.response["id"])
        forks = [await made.say("c", previous_response_id=first.response["id"]) for _ in range(2)]
        ids = {fork.response["conversation"]["id"] for fork in forks}
        assert len(ids) == 2 and first.response["conversation"]["id"] not in ids
        assert forks[0].text == forks[1].text
        further = await made.say("d", previous_response_id=forks[0].response["id"])
        assert further.response["conversation"] == forks[0].response["conversation"]


async def test_naming_a_parent_that_is_being_continued_forks(tmp_path: Path) -> None:
    """While a conversation is busy, another turn from its end goes to a conversation of its own."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        opened, first = await made.create(ask("a"))
        await until_submitted(made, 1)
        while not first.is_done:
            made.engine.step()
            await asyncio.sleep(0)
        parent = opened.response_id
        second, _ = await made.create(ask("b", previous_response_id=parent))
        third, _ = await made.create(ask("c", previous_response_id=parent))
        assert second.conversation_id == opened.conversation_id
        assert third.conversation_id != opened.conversation_id


async def test_a_running_response_is_no_parent(tmp_path: Path) -> None:
    """`previous_response_id` of an unfinished response is refused as a conflict."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        opened, _ = await made.create(ask("a"))
        with pytest.raises(ApiError) as refusal:
            await made.create(ask("b", previous_response_id=opened.response_id))
        assert (refusal.value.status, refusal.value.code) == (409, "previous_response_in_progress")


async def test_turns_of_a_conversation_are_fifo(tmp_path: Path) -> None:
    """With `conversation`, turns wait for each other; each builds on the one before."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        conversation = (await made.hub.create_conversation(ALICE, {}))["id"]
        listeners = [
            (await made.create(ask(f"{i}", conversation=conversation, max_output_tokens=2)))[1]
            for i in range(3)
        ]
        await until_submitted(made, 1)
        assert [len(listener.events) for listener in listeners] == [2, 2, 2]
        for i, listener in enumerate(listeners):
            await until_submitted(made, i + 1)
            assert len(made.engine.submits) == i + 1
            while not listener.is_done:
                made.engine.step()
                await asyncio.sleep(0)
        last = prompt_text(made.engine.submits[2])
        assert "[0]" in last and last.index("[0]") < last.index("[1]") < last.index("[2]")


async def test_a_conversations_queue_is_bounded(tmp_path: Path) -> None:
    """More waiting turns than the bound are refused with a retryable error."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        conversation = (await made.hub.create_conversation(ALICE, {}))["id"]
        for _ in range(MAX_QUEUED_TURNS):
            await made.create(ask("x", conversation=conversation))
        with pytest.raises(ApiError) as refusal:
            await made.create(ask("x", conversation=conversation))
        assert refusal.value.code == "server_overloaded" and refusal.value.retryable


async def test_a_conversations_items_open_its_first_turn(tmp_path: Path) -> None:
    """What a conversation was created with comes before its first turn's input, once."""
    async with world(tmp_path) as made:
        items = ask("system words").input
        conversation = (await made.hub.create_conversation(ALICE, {"k": "v"}, items))["id"]
        first = await made.say("a", conversation=conversation, max_output_tokens=1)
        await made.say("b", conversation=conversation)
        one, two = made.engine.submits
        assert prompt_text(one) == "<>[system words][a]"
        assert prompt_text(two).count("[system words]") == 1
        listed = await made.hub.input_items(ALICE, first.response["id"])
        assert [item["content"][0]["text"] for item in listed] == ["system words", "a"]
        assert (await made.hub.get_conversation(ALICE, conversation))["metadata"] == {"k": "v"}


async def test_a_newer_writer_supersedes_the_older(tmp_path: Path) -> None:
    """The older writer is told once and its running response goes on."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        older, newer = Socket(), Socket()
        conversation = (await made.hub.create_conversation(ALICE, {}))["id"]
        _, first = await made.create(ask("a", conversation=conversation), scope=older)
        await made.create(ask("b", conversation=conversation), scope=older)
        assert older.lost == []
        await made.create(ask("c", conversation=conversation), scope=newer)
        assert (older.lost, newer.lost) == ([conversation], [])
        await until_submitted(made, 1)
        while not first.is_done:
            made.engine.step()
            await asyncio.sleep(0)
        assert first.response["status"] in ("completed", "incomplete")


async def test_new_instructions_are_not_inherited(tmp_path: Path) -> None:
    """Other instructions change the past: the prompt is built afresh and stored as far as new."""
    async with world(tmp_path) as made:
        first = await made.say("a", instructions="one")
        await made.say("b", previous_response_id=first.response["id"], instructions="two")
        assert prompt_text(made.engine.submits[1]).startswith("<two>[a]")
        [_, second] = made.query("SELECT base_tokens, prompt_ids FROM responses ORDER BY key")
        assert second[0] == 1  # "<"


async def test_a_stop_string_ends_the_turn_at_its_token(tmp_path: Path) -> None:
    """Tokens beyond the stop string are in no event, usage, journal or later prompt."""
    prompt = [ord(c) for c in "<>[hi]"]
    expected = "".join(map(chr, continuation(prompt, 30, seed=7)))
    stop = expected[8:10]
    async with world(tmp_path, engine=FakeEngine(tokens_per_step=4)) as made:
        done = await made.say("hi", h_ignore_eos=True, max_output_tokens=2000, h_stop=(stop,))
        assert done.text == expected[: expected.index(stop)]
        num_tokens = expected.index(stop) + 2
        assert done.response["status"] == "completed"
        assert done.response["usage"]["output_tokens"] == num_tokens
        cancels = [m for m in made.engine.sent if isinstance(m, Cancel)]
        assert cancels == [Cancel(made.engine.submits[0].sequence_id, num_tokens)]
        [[stored]] = made.query("SELECT output_ids FROM responses")
        assert "".join(map(chr, unpack_ids(stored))) == expected[:num_tokens]
        await made.say("more", previous_response_id=done.response["id"])
        assert prompt_text(made.engine.submits[1]) == f"<>[hi]{expected[:num_tokens]}[more]"


async def test_prefilling_keeps_a_parent_that_said_nothing(tmp_path: Path) -> None:
    """`generate: false` completes without output and can be continued."""
    async with world(tmp_path) as made:
        first = await made.say("context", generate=False)
        assert first.response["status"] == "completed"
        assert first.response["output"] == [] and first.text == ""
        assert made.engine.submits[0].params.max_tokens == 0
        second = await made.say("b", previous_response_id=first.response["id"])
        assert second.response["conversation"] == first.response["conversation"]
        assert prompt_text(made.engine.submits[1]) == "<>[context][b]"


async def test_what_the_template_refuses_never_was(tmp_path: Path) -> None:
    """A prompt that cannot be built is a typed error; nothing is stored, the session goes on."""
    async with world(tmp_path) as made:
        first = await made.say("a")
        with pytest.raises(ApiError) as refusal:
            await made.create(ask(REFUSED, previous_response_id=first.response["id"]))
        assert refusal.value.status == 400
        assert made.query("SELECT count(*) FROM responses") == [(1,)]
        assert made.hub.stats().num_responses == {}
        again = await made.say("b", previous_response_id=first.response["id"])
        assert again.response["conversation"] == first.response["conversation"]


async def test_a_queued_turn_whose_prompt_is_refused_fails_in_its_place(tmp_path: Path) -> None:
    """A stored turn ends `failed`; the turns behind it go on without it."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        conversation = (await made.hub.create_conversation(ALICE, {}))["id"]
        await made.create(ask("a", conversation=conversation, max_output_tokens=1))
        _, bad = await made.create(ask(REFUSED, conversation=conversation))
        _, good = await made.create(ask("c", conversation=conversation, max_output_tokens=1))
        made.engine.auto = True
        made.engine.resume_reading()
        await good.wait_done()
        assert bad.response["status"] == "failed"
        assert bad.response["usage"]["output_tokens"] == 0
        assert REFUSED not in prompt_text(made.engine.submits[-1])


async def test_what_the_engine_refuses_fails_with_its_code(tmp_path: Path) -> None:
    """A sequence that can never fit ends as `failed` with the engine's code and usage."""
    engine = FakeEngine()
    engine.refuse = lambda submit: "kv_capacity_exceeded"
    async with world(tmp_path, engine=engine) as made:
        done = await made.say("a")
        assert kind(done.events[-1]) == "response.failed"
        assert done.response["error"]["code"] == "kv_capacity_exceeded"
        assert done.response["usage"]["input_tokens"] == 5


async def test_logprobs_come_back_from_the_journal(tmp_path: Path) -> None:
    """Logprobs are stored with the tokens: a replay carries the same."""
    async with world(tmp_path) as made:
        whole = await made.say(
            "a", include=("message.output_text.logprobs",), top_logprobs=1, h_ignore_eos=True
        )
        assert whole.response["output"][0]["content"][0]["logprobs"]
        replay = Listener()
        await made.hub.follow(
            ALICE, whole.response["id"], starting_after=None, follower=replay, scope=None
        )
        assert replay.events == whole.events


async def test_logprobs_bound_an_answer_that_has_no_bound_of_its_own(tmp_path: Path) -> None:
    """A response carries so many logprobs and no more: it ends there as out of tokens."""
    logprobs = ("message.output_text.logprobs",)
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        await made.create(ask("a", include=logprobs, top_logprobs=20, max_output_tokens=None))
        await made.create(ask("b", top_logprobs=20, max_output_tokens=None))
        bounded, free = await until_submitted(made, 2)
        assert (bounded.params.max_tokens, bounded.params.max_tokens_is_explicit) == (1560, False)
        assert free.params.max_tokens == 4096 - len("<>[b]")
