"""What sequences find of each other's work, and what of it is theirs."""

from hillstar.engine.messages import Cancel
from support.engine_bench import EngineBench, assert_outputs_are_the_oracles, prompt, submit


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


def test_tokens_in_flight_are_no_waste() -> None:
    """Blocks that a launched step fills count as filled."""
    bench = EngineBench(num_blocks=100)
    bench.tell(submit("a", prompt(1, 40), max_tokens=20))
    for length in (40, 41, 42):
        bench.step()
        stats = bench.scheduler.stats()
        assert (stats.kv_tokens_used, stats.kv_tokens_capacity) == (length, -(-length // 8) * 8)
