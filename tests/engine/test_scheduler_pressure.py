"""Who gives way when blocks are short, and that nobody starves."""

from support.engine_bench import EngineBench, assert_outputs_are_the_oracles, prompt, submit


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
