"""Drafts in the scheduler, with a fake model whose tokens can be guessed."""

import numpy as np
import pytest

from hillstar.engine.messages import Cancel, SamplingParams, Submit, pack_ids
from hillstar.engine.spec.speculation import Speculation, accepted
from support.engine_bench import EngineBench, assert_outputs_are_the_oracles, prompt, submit
from support.fake_runner import FakeModel


def bench(**options: object) -> EngineBench:
    model = FakeModel(refrain=2)
    return EngineBench(model=model, speculation=Speculation(), **options)  # type: ignore[arg-type]


def test_a_draft_is_right_as_far_as_it_is_what_was_chosen() -> None:
    """Up to the first token that differs; the choice behind the last one is a bonus."""
    drafted = np.array([4, 5, 6])
    assert accepted(drafted, np.array([4, 5, 6, 7])) == 3
    assert accepted(drafted, np.array([4, 9, 6, 7])) == 1
    assert accepted(drafted, np.array([9, 5, 6, 7])) == 0


@pytest.mark.parametrize("eager", [False, True])
def test_drafts_save_steps_and_change_no_token(eager: bool) -> None:
    """Several sequences, guessed rightly and wrongly, end as the oracle says, in fewer steps."""
    engine = bench(eager=eager, num_blocks=200)
    for first in range(1, 6):
        engine.tell(submit(f"s{first}", prompt(first, 20), max_tokens=100, seed=first))
    engine.run()
    assert_outputs_are_the_oracles(engine)
    stats = engine.scheduler.stats()
    assert 0 < stats.num_accepted_tokens_total < stats.num_drafted_tokens_total
    assert stats.num_generated_tokens_total == 500
    assert stats.num_steps_total < 90


def test_a_draft_never_leads_past_the_end() -> None:
    """No row is fed more tokens than the output may have."""
    engine = bench()
    engine.tell(submit("s", [1, 2] * 10, max_tokens=7, ignore_eos=True))
    engine.run()
    assert len(engine.tokens["s"]) == 7
    assert max(row.start + row.num_tokens for plan in engine.plans for row in plan.rows) <= 26


def test_a_stop_token_inside_a_draft_ends_the_output() -> None:
    """What was accepted behind it is forgotten."""
    engine = bench()
    params = SamplingParams(
        max_tokens=60, max_tokens_is_explicit=True, temperature=0, stop_token_ids=(7,)
    )
    engine.tell(Submit(sequence_id="s", prompt_ids=pack_ids([5, 7, 5, 7, 5]), params=params))
    engine.run()
    assert engine.tokens["s"] == engine.expected("s")
    assert engine.finishes["s"].reason == "stop"
    assert engine.tokens["s"].count(7) == 1


def test_penalties_are_not_guessed() -> None:
    """Counts would have to know the draft tokens before each one."""
    engine = bench()
    params = SamplingParams(max_tokens=20, max_tokens_is_explicit=True, frequency_penalty=0.5)
    engine.tell(Submit(sequence_id="s", prompt_ids=pack_ids([1, 2] * 10), params=params))
    engine.run()
    assert engine.scheduler.stats().num_drafted_tokens_total == 0


def test_a_cancelled_draft_leaves_nothing_behind() -> None:
    """Cancelled with a draft in flight, a sequence gives all its blocks back."""
    engine = bench()
    engine.tell(submit("s", [1, 2] * 10, max_tokens=50, ignore_eos=True))
    engine.step()
    while not engine.plans[-1].rows[0].num_drafts:
        engine.step()
    assert not engine.is_idle
    engine.tell(Cancel("s"))
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.blocks_leased == 0
    assert stats.blocks_free + stats.blocks_cached == 64


def test_prompts_come_before_drafts() -> None:
    """A step that a prompt fills drafts nothing; decoders get their token all the same."""
    engine = bench(num_blocks=200, max_batched_tokens=32)
    engine.tell(submit("decoder", [1, 2] * 10, max_tokens=80, ignore_eos=True))
    for _ in range(6):
        engine.step()
    engine.tell(submit("reader", prompt(9, 200), max_tokens=1))
    first = len(engine.plans)
    engine.run()
    beside = [plan for plan in engine.plans[first:] if len(plan.rows) == 2]
    assert beside
    full = [plan for plan in beside if plan.num_tokens == 32]
    assert full
    assert all(row.num_drafts == 0 for plan in full[1:] for row in plan.rows)
    assert_outputs_are_the_oracles(engine)
