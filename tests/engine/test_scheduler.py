"""What a sequence may count on, in plans: shares, order, limits, ends."""

import numpy as np
import pytest

from hillstar.engine.messages import (
    Cancel,
    Output,
    Park,
    Release,
    SamplingParams,
    Submit,
    Unpark,
    pack_ids,
)
from hillstar.engine.plan import StepResult
from support.engine_bench import EngineBench, submit
from support.fake_runner import EOS_ID, FakeModel, fake_generate


def prompt(first: int, length: int) -> list[int]:
    """Tokens that no prompt of another `first` begins with."""
    return [first] + [(first * 7 + index * 3) % 49 + 1 for index in range(length - 1)]


def assert_outputs_are_the_oracles(bench: EngineBench) -> None:
    for name in bench.submits:
        assert bench.tokens[name] == bench.expected(name), name


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
        outputs = {output.sequence_id: output for output in bench.scheduler.update(plan, result)}
        assert outputs["none"].logprobs is None
        assert outputs["zero"].logprobs is not None and outputs["zero"].logprobs[0].top == []
        assert outputs["two"].logprobs is not None
        assert outputs["two"].logprobs[0].top == [(4, -0.5), (1, -1.5)]


class TestSharing:
    def test_many_sessions_over_one_prefix_compute_it_once(self) -> None:
        """Sequences that wait for a block another one computes are held back until it is there."""
        bench = EngineBench(num_blocks=400, max_num_seqs=50, max_batched_tokens=64)
        shared = prompt(1, 160)
        for number in range(50):
            bench.tell(submit(f"s{number}", [*shared, number % 49 + 1, 7], max_tokens=3))
        bench.run()
        assert_outputs_are_the_oracles(bench)
        assert bench.scheduler.stats().num_prefill_tokens_total <= 160 + 50 * 2

    def test_samples_of_one_prompt_compute_it_once(self) -> None:
        """n samples of a prompt compute it once; each repeats its last token for the logits."""
        bench = EngineBench(num_blocks=100)
        for number in range(8):
            bench.tell(submit(f"s{number}", prompt(1, 45), max_tokens=6, seed=number))
        bench.run()
        assert_outputs_are_the_oracles(bench)
        assert len({tuple(tokens) for tokens in bench.tokens.values()}) == 8
        assert bench.scheduler.stats().num_prefill_tokens_total == 45 + 7

    def test_holding_back_does_not_hold_up_others(self) -> None:
        """Who waits for a prefix steps aside; the next in the queue enters meanwhile."""
        bench = EngineBench(max_batched_tokens=16)
        bench.tell(submit("owner", prompt(1, 24), max_tokens=2))
        bench.tell(submit("held", [*prompt(1, 24), 9], max_tokens=2))
        bench.step()
        bench.tell(submit("other", prompt(2, 4), max_tokens=2))
        plan = bench.step()
        assert plan is not None
        assert [row.num_tokens for row in plan.rows] == [8, 4]
        bench.run()
        assert_outputs_are_the_oracles(bench)

    def test_when_the_owner_goes_the_others_go_on(self) -> None:
        """A promise ends with its owner: who waited computes the prefix itself."""
        bench = EngineBench(max_batched_tokens=16)
        bench.tell(submit("owner", prompt(1, 60), max_tokens=2))
        bench.tell(submit("held", [*prompt(1, 60), 9], max_tokens=2))
        bench.step()
        bench.tell(Cancel("owner"))
        bench.run()
        assert bench.tokens["held"] == bench.expected("held")

    def test_a_next_turn_computes_only_what_is_new(self) -> None:
        """Turn after turn: the last sampled token of the turn before, and the new tokens."""
        bench = EngineBench()
        context = prompt(1, 13)
        for turn in range(6):
            fed = bench.runner.num_tokens_fed
            bench.tell(submit(f"t{turn}", context, max_tokens=5, lease_id="chat"))
            bench.run()
            if turn:
                num_new = 4
                assert bench.runner.num_tokens_fed - fed == 1 + num_new + 4
                usage = bench.finishes[f"t{turn}"].usage
                assert usage.num_cached_tokens == len(context) - num_new - 1
                assert not bench.plans[-1].copies and not bench.plans[-5].copies
            context = [*context, *bench.tokens[f"t{turn}"], 3, 1, 4, 2]
        assert_outputs_are_the_oracles(bench)

    def test_forks_at_any_point_share_what_is_before_them(self) -> None:
        """A fork computes only what follows it, wherever in a block it lies."""
        bench = EngineBench(num_blocks=200)
        bench.tell(submit("root", prompt(1, 21), max_tokens=20, lease_id="root"))
        bench.run()
        context = prompt(1, 21) + bench.tokens["root"]
        for at in range(1, 40):
            fork = [*context[:at], context[at] % 49 + 1]
            bench.tell(submit(f"f{at}", fork, max_tokens=1))
            bench.run()
            assert bench.finishes[f"f{at}"].usage.num_cached_tokens == at
        assert_outputs_are_the_oracles(bench)

    def test_tenants_share_nothing(self) -> None:
        """The same prompt of another tenant is computed anew."""
        bench = EngineBench()
        bench.tell(submit("a", prompt(1, 30), tenant="a"))
        bench.run()
        bench.tell(submit("b", prompt(1, 30), tenant="b"))
        bench.run()
        assert bench.finishes["b"].usage.num_cached_tokens == 0


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


class TestPressure:
    def test_giving_way_changes_no_output(self) -> None:
        """In a pool that is too small sequences give way and still say the same."""
        bench = EngineBench(num_blocks=12, max_num_seqs=8)
        bench.teach_short_outputs()
        for number in range(8):
            bench.tell(submit(f"s{number}", prompt(number + 1, 6), max_tokens=60, explicit=False))
        bench.run()
        assert bench.scheduler.stats().num_preemptions_total > 0
        assert_outputs_are_the_oracles(bench)

    def test_the_newest_of_the_lowest_priority_gives_way(self) -> None:
        """When a block is missing, the last in rank leaves the batch, and comes back."""
        bench = EngineBench(num_blocks=7, max_num_seqs=3)
        bench.teach_short_outputs()
        for first, (name, priority) in enumerate([("low", 0), ("first", 1), ("second", 1)], 5):
            bench.tell(submit(name, prompt(first, 4), max_tokens=28, priority=priority))
        bench.run()
        assert bench.scheduler.stats().num_preemptions_total == 2
        assert list(bench.finishes) == ["first", "second", "low"]
        assert_outputs_are_the_oracles(bench)

    def test_nobody_starves_behind_urgent_sequences(self) -> None:
        """A low priority is overtaken only for a bounded time, however many urgent ones come."""
        bench = EngineBench(num_blocks=8, max_num_seqs=2)
        bench.tell(submit("patient", prompt(1, 20), max_tokens=20, priority=-1))
        for number in range(4000):
            name = f"u{number}"
            bench.tell(submit(name, prompt(number % 48 + 2, 9), max_tokens=9, priority=1))
            for _ in range(6):
                bench.step()
            if "patient" in bench.finishes:
                break
        assert bench.tokens["patient"] == bench.expected("patient")
        assert bench.now_s < 60

    def test_nobody_starves_among_urgent_sequences_that_outgrow_him(self) -> None:
        """Who has to give way to those who grow goes on in between, and ends."""
        bench = EngineBench(num_blocks=8, max_num_seqs=2)
        bench.teach_short_outputs()
        bench.tell(submit("patient", prompt(1, 20), max_tokens=25, priority=-1, tenant="other"))
        number = 0
        while "patient" not in bench.finishes:
            assert number < 100, bench.scheduler.stats()
            if bench.scheduler.stats().waiting < 2:
                name = f"u{number}"
                bench.tell(submit(name, prompt(number % 48 + 2, 9), max_tokens=50, priority=1))
                number += 1
            bench.step()
            bench.now_s += 1.0
        assert bench.tokens["patient"] == bench.expected("patient")

    def test_a_prompt_makes_room_among_sequences_already_in_the_plan(self) -> None:
        """A senior prefill without a block takes the token back that a junior was just given."""
        bench = EngineBench(num_blocks=17, max_num_seqs=4, max_batched_tokens=8)
        bench.teach_short_outputs()
        for first, length in enumerate((7, 4, 4), 1):
            bench.tell(submit(f"s{first}", prompt(first, length), max_tokens=70))
        for _ in range(3):
            bench.step()
        bench.tell(submit("urgent", prompt(9, 68), max_tokens=2, priority=1))
        bench.run()
        assert bench.scheduler.stats().num_preemptions_total > 0
        assert next(iter(bench.finishes)) == "urgent"
        assert_outputs_are_the_oracles(bench)

    def test_nobody_starves_in_his_own_growth(self) -> None:
        """Each who gives way rises in rank, so all end although none fits beside another."""
        bench = EngineBench(num_blocks=5, max_num_seqs=4)
        bench.teach_short_outputs()
        for number in range(10):
            bench.tell(submit(f"s{number}", prompt(number + 1, 9), max_tokens=31, priority=number))
        bench.run(max_steps=2000)
        assert_outputs_are_the_oracles(bench)

    def test_tenants_take_turns(self) -> None:
        """A tenant with one request is not behind another tenant's hundred."""
        bench = EngineBench(num_blocks=30, max_num_seqs=2, max_waiting=200)
        for number in range(100):
            bench.tell(submit(f"many{number}", prompt(number % 40 + 1, 9), tenant="many"))
        bench.step()
        bench.tell(submit("one", prompt(45, 9), tenant="one"))
        bench.run()
        order = list(bench.finishes)
        assert order.index("one") < 6


class TestParking:
    def test_goes_on_at_the_next_token(self) -> None:
        """Parking keeps the blocks; unparking repeats at most the token that was in flight."""
        bench = EngineBench()
        bench.tell(submit("a", prompt(1, 20), max_tokens=30))
        for _ in range(8):
            bench.step()
        bench.tell(Park("a"))
        assert bench.scheduler.stats().parked == 1
        bench.run()
        said = len(bench.tokens["a"])
        fed = bench.runner.num_tokens_fed
        bench.tell(Unpark("a"))
        bench.run()
        assert bench.tokens["a"] == bench.expected("a")
        assert bench.runner.num_tokens_fed - fed == 30 - said + 1

    def test_gives_its_blocks_up_before_a_running_sequence_gives_way(self) -> None:
        """Under pressure parked blocks go first, and are computed again afterwards."""
        bench = EngineBench(num_blocks=6)
        bench.tell(submit("a", prompt(1, 20), max_tokens=10))
        for _ in range(4):
            bench.step()
        bench.tell(Park("a"))
        bench.tell(submit("b", prompt(2, 30), max_tokens=15))
        bench.run()
        assert "b" in bench.finishes
        assert bench.scheduler.stats().num_preemptions_total == 0
        bench.tell(Unpark("a"))
        bench.run()
        assert_outputs_are_the_oracles(bench)

    def test_waiting_sequences_can_be_parked(self) -> None:
        """Parked before it ever ran, a sequence runs when it is unparked."""
        bench = EngineBench()
        bench.tell(submit("a", prompt(1, 20)))
        bench.tell(Park("a"))
        assert bench.step() is None
        bench.tell(Unpark("a"))
        bench.run()
        assert bench.tokens["a"] == bench.expected("a")


class TestCancelling:
    @pytest.mark.parametrize("num_steps", range(8))
    @pytest.mark.parametrize("parked", [False, True])
    def test_ends_in_every_state_and_stops(self, num_steps: int, parked: bool) -> None:
        """Waiting, prefilling, decoding, parked: one finish with usage, and no step after it."""
        bench = EngineBench(max_batched_tokens=16)
        bench.tell(submit("a", prompt(1, 40), max_tokens=30))
        for _ in range(num_steps):
            bench.step()
        if parked:
            bench.tell(Park("a"))
        num_said = len(bench.tokens.get("a", []))
        bench.tell(Cancel("a"))
        bench.tell(Cancel("a"))
        finish = bench.finishes["a"]
        assert (finish.reason, finish.usage.num_output_tokens) == ("cancelled", num_said)
        assert bench.step() is None
        assert bench.step() is None
        assert bench.scheduler.stats().blocks_leased == 0

    def test_an_unknown_id_is_ignored(self) -> None:
        """A cancel may cross the finish on its way: nothing is said twice."""
        bench = EngineBench()
        for command in (Cancel("x"), Park("x"), Unpark("x"), Release("x")):
            assert bench.scheduler.handle(command) == []

    def test_keeps_only_the_tokens_before_a_stop_string(self) -> None:
        """keep_tokens trims the lease: the next turn finds the kept tokens and no others."""
        bench = EngineBench()
        bench.tell(submit("a", prompt(1, 10), max_tokens=30, lease_id="chat"))
        while len(bench.tokens.get("a", [])) < 14:
            bench.step()
        bench.tell(Cancel("a", keep_tokens=5))
        assert bench.finishes["a"].usage.num_output_tokens == 5
        stats = bench.scheduler.stats()
        assert stats.blocks_leased == 2
        kept = prompt(1, 10) + bench.tokens["a"][:5]
        bench.tell(submit("b", [*kept, 3, 3], max_tokens=4, lease_id="chat"))
        bench.run()
        assert bench.finishes["b"].usage.num_cached_tokens == 15
        assert bench.tokens["b"] == bench.expected("b")


class TestReleasing:
    def test_frees_an_idle_lease(self) -> None:
        """Its blocks are cached like any others, and found."""
        bench = EngineBench()
        bench.tell(submit("a", prompt(1, 20), lease_id="chat"))
        bench.run()
        assert bench.scheduler.stats().blocks_leased > 0
        bench.tell(Release("chat"))
        assert bench.scheduler.stats().blocks_leased == 0
        assert bench.scheduler.stats().blocks_cached > 0

    @pytest.mark.parametrize("num_steps", [0, 3, 100])
    def test_erases_what_nobody_else_uses(self, num_steps: int) -> None:
        """Before, while and after it runs: erased tokens are found by no later prompt."""
        bench = EngineBench()
        bench.tell(submit("a", prompt(1, 20), lease_id="chat"))
        for _ in range(num_steps):
            bench.step()
        bench.tell(Release("chat", erase=True))
        bench.run()
        stats = bench.scheduler.stats()
        assert (stats.blocks_leased, stats.blocks_cached) == (0, 0)
        assert bench.tokens["a"] == bench.expected("a")


def test_waste_is_what_partial_blocks_leave_empty() -> None:
    """The metric: leased tokens against leased room, each block once."""
    bench = EngineBench(num_blocks=100)
    bench.tell(submit("a", prompt(1, 20), max_tokens=2, lease_id="a"))
    bench.tell(submit("b", [*prompt(1, 20), 4], max_tokens=2, lease_id="b"))
    bench.run()
    stats = bench.scheduler.stats()
    # Blocks of 8: two full ones shared, then 5 and 6 tokens in a partial block each.
    assert stats.blocks_leased == 4
    assert (stats.kv_tokens_used, stats.kv_tokens_capacity) == (16 + 5 + 6, 32)


def test_an_output_says_where_it_begins() -> None:
    """Outputs are numbered without gaps, and the last one carries the finish."""
    bench = EngineBench()
    outputs: list[Output] = list(bench.scheduler.handle(submit("a", prompt(1, 5), max_tokens=3)))
    while len(outputs) < 3:
        plan = bench.scheduler.schedule()
        assert plan is not None
        pending = bench.runner.run(bench.builder.build(plan))
        outputs += bench.scheduler.update(plan, pending.result())
    assert [output.first_token for output in outputs] == [0, 1, 2]
    assert [output.finish is None for output in outputs] == [True, True, False]


def test_tokens_in_flight_are_no_waste() -> None:
    """Blocks that a launched step fills count as filled."""
    bench = EngineBench(num_blocks=100)
    bench.tell(submit("a", prompt(1, 40), max_tokens=20))
    for length in (40, 41, 42):
        bench.step()
        stats = bench.scheduler.stats()
        assert (stats.kv_tokens_used, stats.kv_tokens_capacity) == (length, -(-length // 8) * 8)
