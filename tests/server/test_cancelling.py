"""Cancelling: in every state a response has one end."""

import asyncio
from pathlib import Path

import pytest

from hillstar.engine.messages import Cancel, unpack_ids
from support.fake_engine import EOS, FakeEngine
from support.hub_world import ALICE, ask, kind, prompt_text, until_submitted, world


@pytest.mark.parametrize("num_steps", [0, 1, 3])
async def test_cancelling_a_running_response(tmp_path: Path, num_steps: int) -> None:
    """Cancel ends it within a step, keeps what was said, and is idempotent."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        opened, listener = await made.create(ask("a", h_ignore_eos=True))
        await until_submitted(made, 1)
        for _ in range(num_steps):
            made.engine.step()
        cancelling = asyncio.create_task(made.hub.cancel(ALICE, opened.response_id))
        again = asyncio.create_task(made.hub.cancel(ALICE, opened.response_id))
        await made.engine.until(lambda: any(isinstance(m, Cancel) for m in made.engine.sent))
        made.engine.step()
        response = await cancelling
        assert response == await again == await made.hub.cancel(ALICE, opened.response_id)
        assert kind(listener.events[-1]) == "response.incomplete"
        assert response["status"] == "cancelled" and response == listener.response
        assert response["usage"]["output_tokens"] == num_steps
        assert made.engine.running == []


async def test_cancelling_a_queued_response(tmp_path: Path) -> None:
    """A turn that has not begun ends at once; the others keep their places."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        conversation = (await made.hub.create_conversation(ALICE, {}))["id"]
        _, first = await made.create(ask("a", conversation=conversation, max_output_tokens=1))
        queued, listener = await made.create(ask("b", conversation=conversation))
        _, third = await made.create(ask("c", conversation=conversation, max_output_tokens=1))
        response = await made.hub.cancel(ALICE, queued.response_id)
        assert response["status"] == "cancelled" and listener.is_done and not first.is_done
        made.engine.auto = True
        made.engine.resume_reading()
        await third.wait_done()
        assert "[b]" not in prompt_text(made.engine.submits[-1])


async def test_cancelling_before_the_engine_is_up(tmp_path: Path) -> None:
    """Without an engine a cancelled response ends right away."""
    engine = FakeEngine(auto=False)
    async with world(tmp_path, engine=engine) as made:
        engine.restarts = False
        engine.die()
        opened, listener = await made.create(ask("a"))
        assert (await made.hub.cancel(ALICE, opened.response_id))["status"] == "cancelled"
        assert listener.response["usage"]["output_tokens"] == 0


async def test_a_finish_that_races_a_cancel_ends_once(tmp_path: Path) -> None:
    """When the engine had finished already, there is still exactly one terminal event."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        opened, listener = await made.create(ask("a", max_output_tokens=1, h_ignore_eos=True))
        await until_submitted(made, 1)
        made.engine.step()  # its finish is on the way
        response = await made.hub.cancel(ALICE, opened.response_id)
        made.engine.step()
        assert listener.is_done and response["usage"]["output_tokens"] == 1
        terminal = [e for e in listener.events if kind(e).endswith(("completed", "incomplete"))]
        assert len(terminal) == 1


async def test_a_cancelled_turn_stays_out_of_its_conversation(tmp_path: Path) -> None:
    """The conversation goes on without it; naming it as the parent includes what it said."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        engine = made.engine
        conversation = (await made.hub.create_conversation(ALICE, {}))["id"]
        cut, listener = await made.create(ask("a", conversation=conversation, h_ignore_eos=True))
        await until_submitted(made, 1)
        engine.step()
        await listener.wait_for(5)
        engine.auto = True
        await made.hub.cancel(ALICE, cut.response_id)
        await made.say("b", conversation=conversation)
        assert prompt_text(engine.submits[-1]) == "<>[b]"
        fork = await made.say("c", previous_response_id=cut.response_id)
        assert fork.response["conversation"]["id"] != conversation
        assert prompt_text(engine.submits[-1]) == f"<>[a]{listener.text}[c]"
        assert EOS not in unpack_ids(engine.submits[-1].prompt_ids)
