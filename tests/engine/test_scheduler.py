"""What a sequence may count on, in plans: shares, limits, ends."""

import numpy as np
import pytest

from hillstar.engine.messages import (
    Output,
    SamplingParams,
    Submit,
    pack_ids,
)
from hillstar.engine.plan import StepResult
from support.engine_bench import EngineBench, assert_outputs_are_the_oracles, prompt, submit
from support.fake_runner import EOS_ID, FakeModel, fake_generate


class TestSteps:
    def test_a_prompt_longer_than_the_budget_is_fed_in_chunks(self) -> None:
        """No step feeds more than `max_batched_tokens`, and only the last chunk samples."""
        bench = EngineBench(max_batched_tokens=16)
        bench.tell(submit("a", prompt(1, 40), max_tokens=3))
        bench.run()
        counts = [(plan.num_tokens, plan.rows[0].sample) for plan in bench.plans]
        assert counts == [(16, False), (16, False), (8, True), (1, True), (1, True)]
        assert_outputs_are_the_oracles(bench)

    def test_running_sequences_come_before_a_new_prompt(self) -> None:
        """Each running sequence gets its token in every step, beside a prompt's chunks."""
        bench = EngineBench(max_batched_tokens=16)
        bench.tell(submit("a", prompt(1, 4), max_tokens=20))
        bench.tell(submit("b", prompt(2, 4), max_tokens=20))
        bench.step()
        bench.tell(submit("long", prompt(3, 60), max_tokens=4))
        for _ in range(4):
            plan = bench.step()
            assert plan is not None
            assert sorted(row.num_tokens for row in plan.rows) == [1, 1, 14]
        bench.run()
        assert_outputs_are_the_oracles(bench)

    def test_tokens_in_flight_are_not_in_the_plan(self) -> None:
        """A row that goes on from a token still on the device says so with None."""
        bench = EngineBench()
        bench.tell(submit("a", prompt(1, 5), max_tokens=4))
        bench.run()
        assert [row.token_ids is None for plan in bench.plans for row in plan.rows] == [
            False,
            True,
            True,
            True,
        ]

    def test_the_last_token_ends_the_feeding_by_count(self) -> None:
        """A sequence whose last token is in flight is in no further plan."""
        bench = EngineBench()
        bench.tell(submit("a", prompt(1, 5), max_tokens=3))
        assert [bench.step() is None for _ in range(5)] == [False, False, False, True, True]

    def test_eos_is_seen_late_and_the_extra_row_is_ignored(self) -> None:
        """After EOS one row may be in flight already; its token appears nowhere."""
        model = FakeModel(eos_probability=1.0)
        bench = EngineBench(model=model)
        bench.tell(submit("a", prompt(1, 5), max_tokens=9))
        bench.run()
        assert bench.tokens["a"] == [EOS_ID]
        assert bench.finishes["a"].reason == "stop"
        assert len(bench.plans) == 2

    def test_a_row_is_reused_only_after_its_last_plan(self) -> None:
        """While a finished sequence's row is in flight, another sequence does not get it."""
        bench = EngineBench(model=FakeModel(eos_probability=1.0), max_num_seqs=1)
        bench.tell(submit("a", prompt(1, 5)))
        bench.tell(submit("b", prompt(2, 5)))
        bench.step()
        bench.step()  # EOS of "a" comes back here, its second row is in flight
        assert "a" in bench.finishes
        assert bench.step() is None  # now it has resolved
        plan = bench.step()
        assert plan is not None and plan.inits[0].row == 0
        bench.run()
        assert bench.tokens["b"] == [EOS_ID]

    def test_prefill_only_computes_and_says_nothing(self) -> None:
        """max_tokens = 0 leaves the prompt's KV behind and ends as `prefilled`."""
        bench = EngineBench(max_batched_tokens=16)
        bench.tell(submit("a", prompt(1, 40), max_tokens=0))
        bench.run()
        assert bench.finishes["a"].reason == "prefilled"
        assert bench.tokens["a"] == []
        bench.tell(submit("b", [*prompt(1, 40), 5], max_tokens=2))
        bench.run()
        assert bench.finishes["b"].usage.num_cached_tokens == 40

    def test_logprobs_are_cut_to_what_each_sequence_asked_for(self) -> None:
        """The device answers for the greediest row; every sequence gets its own share."""
        bench = EngineBench()
        for name, num_top in (("none", None), ("zero", 0), ("two", 2)):
            params = SamplingParams(max_tokens=1, top_logprobs=num_top)
            bench.scheduler.handle(
                Submit(sequence_id=name, prompt_ids=pack_ids([1, 2]), params=params)
            )
        plan = bench.scheduler.schedule()
        assert plan is not None
        result = StepResult(
            np.array([4, 5, 6]),
            np.array([-1.0, -2.0, -3.0]),
            np.array([[4, 1, 2]] * 3),
            np.array([[-0.5, -1.5, -2.5]] * 3),
        )
        outputs = {
            output.sequence_id: output for output in bench.scheduler.update(plan, result, 0.01)
        }
        assert outputs["none"].logprobs is None
        assert outputs["zero"].logprobs is not None and outputs["zero"].logprobs[0].top == []
        assert outputs["two"].logprobs is not None
        assert outputs["two"].logprobs[0].top == [(4, -0.5), (1, -1.5)]


class TestLimits:
    @pytest.mark.parametrize(
        ("length", "max_tokens", "explicit", "code"),
        [
            (100, 29, True, "context_length_exceeded"),
            (100, 28, True, None),
            (100, 1000, False, None),
            (128, 1, False, "context_length_exceeded"),
            (127, 1000, False, None),
            (128, 0, True, None),
            (129, 0, True, "context_length_exceeded"),
        ],
    )
    def test_what_the_context_cannot_hold_is_refused_at_once(
        self, length: int, max_tokens: int, explicit: bool, code: str | None
    ) -> None:
        """An explicit max_tokens counts; without one a single token must have a place."""
        bench = EngineBench(max_model_len=128)
        bench.tell(submit("a", prompt(1, length), max_tokens=max_tokens, explicit=explicit))
        assert (bench.finishes["a"].code if code else None) == code
        bench.run()
        if code is None:
            assert len(bench.tokens["a"]) == min(max_tokens, 128 - length)

    @pytest.mark.parametrize(
        ("length", "max_tokens", "explicit", "code"),
        [
            (30, 4, True, "kv_capacity_exceeded"),
            (30, 3, True, None),
            (32, 9, False, None),
            (33, 9, False, "kv_capacity_exceeded"),
            (20, 99, False, None),
        ],
    )
    def test_what_the_pool_cannot_hold_is_refused_at_once(
        self, length: int, max_tokens: int, explicit: bool, code: str | None
    ) -> None:
        """The last token needs no KV; without an explicit limit the pool's end is `length`."""
        bench = EngineBench(num_blocks=4)
        bench.tell(submit("a", prompt(1, length), max_tokens=max_tokens, explicit=explicit))
        assert (bench.finishes["a"].code if code else None) == code
        bench.run()
        if code is None:
            assert len(bench.tokens["a"]) == min(max_tokens, 33 - length)
            assert bench.finishes["a"].reason == "length"

    def test_a_full_queue_refuses(self) -> None:
        """The waiting queue is bounded: what comes beyond is refused as `server_overloaded`."""
        bench = EngineBench(max_waiting=3, max_num_seqs=2)
        for number in range(6):
            bench.tell(submit(f"s{number}", prompt(number + 1, 5)))
        assert [name for name in bench.finishes if bench.finishes[name].code] == ["s5"]
        assert bench.finishes["s5"].code == "server_overloaded"
        bench.step()
        bench.tell(submit("later", prompt(8, 5)))
        assert bench.finishes["later"].code == "server_overloaded"
        bench.run()
        assert len(bench.finishes) == 7

    def test_all_that_ran_and_waited_is_taken_back_after_a_restart(self) -> None:
        """A queue that was full beside a full batch fits into a new engine, submitted at once."""
        old = EngineBench(max_waiting=3, max_num_seqs=2)
        for number in range(2):
            old.tell(submit(f"s{number}", prompt(number + 1, 5), max_tokens=20))
        for _ in range(4):
            old.step()
        for number in range(2, 5):
            old.tell(submit(f"s{number}", prompt(number + 1, 5), max_tokens=20))
        assert not old.finishes
        new = EngineBench(max_waiting=3, max_num_seqs=2)
        for number in range(5):
            said = old.tokens.get(f"s{number}")
            new.tell(submit(f"s{number}", prompt(number + 1, 5), output=said, max_tokens=20))
        new.run()
        assert_outputs_are_the_oracles(new)

    def test_an_id_that_runs_is_refused_and_the_first_goes_on(self) -> None:
        """The second submit of a live id is answered as refused; the first is undisturbed."""
        bench = EngineBench()
        bench.tell(submit("a", prompt(1, 5)))
        (output,) = bench.scheduler.handle(submit("a", prompt(2, 5)))
        assert output.finish is not None and output.finish.code == "duplicate_sequence"
        bench.run()
        assert bench.tokens["a"] == bench.expected("a")

    @pytest.mark.parametrize(
        "message",
        [
            Submit(sequence_id="x", prompt_ids=b"", params=SamplingParams(max_tokens=1)),
            Submit(sequence_id="x", prompt_ids=b"abc", params=SamplingParams(max_tokens=1)),
            Submit(sequence_id="x", prompt_ids=b"\xff" * 4, params=SamplingParams(max_tokens=1)),
            Submit(sequence_id="x", prompt_ids=b"\0" * 4, params=SamplingParams(max_tokens=-1)),
        ],
    )
    def test_nonsense_is_refused(self, message: Submit) -> None:
        """No tokens, bytes that are no tokens, tokens that do not exist, negative limits."""
        bench = EngineBench()
        bench.tell(message)
        assert bench.finishes["x"].code == "invalid_value"
        assert bench.step() is None


class TestResuming:
    def test_goes_on_after_the_output_it_is_given(self) -> None:
        """A restarted engine says the tokens that would have come next, and numbers them so."""
        bench = EngineBench()
        params = SamplingParams(max_tokens=12)
        whole = fake_generate(prompt(1, 9), params, bench.model, 12)
        bench.tell(submit("a", prompt(1, 9), output=whole[:5], max_tokens=12))
        bench.run()
        assert bench.tokens["a"] == whole
        assert bench.finishes["a"].usage.num_prompt_tokens == 9

    def test_what_was_complete_already_ends_at_once(self) -> None:
        """Given all its output, or one that ends in EOS, a sequence only finishes."""
        bench = EngineBench()
        bench.tell(submit("all", prompt(1, 9), output=[5, 6], max_tokens=2))
        bench.tell(submit("eos", prompt(1, 9), output=[5, EOS_ID], max_tokens=9))
        assert bench.finishes["all"].reason == "length"
        assert bench.finishes["eos"].reason == "stop"
        assert bench.step() is None


def test_an_output_says_where_it_begins() -> None:
    """Outputs are numbered without gaps, and the last one carries the finish."""
    bench = EngineBench()
    outputs: list[Output] = list(bench.scheduler.handle(submit("a", prompt(1, 5), max_tokens=3)))
    while len(outputs) < 3:
        plan = bench.scheduler.schedule()
        assert plan is not None
        pending = bench.runner.run(bench.builder.build(plan))
        outputs += bench.scheduler.update(plan, pending.result(), 0.01)
    assert [output.first_token for output in outputs] == [0, 1, 2]
    assert [output.finish is None for output in outputs] == [True, True, False]
