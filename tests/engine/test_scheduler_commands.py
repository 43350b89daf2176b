"""Parking, cancelling and releasing, in every state of a sequence."""

import pytest

from hillstar.engine.messages import Cancel, Park, Release, Unpark
from support.engine_bench import EngineBench, assert_outputs_are_the_oracles, prompt, submit


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
