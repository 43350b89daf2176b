"""Running sequences go on at their pace while prompts are read, and prompts are read all the same.

Each test has a machine whose step times follow a cost model that the engine has to find out.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hillstar.engine.pace import MIN_CHUNK, Load, StepCosts
from hillstar.engine.plan import Plan, PlanRow
from support.engine_bench import EngineBench, prompt, submit

NUM_DECODERS = 4
PROMPT_TOKENS = 1500


@dataclass(frozen=True)
class Machine:
    """Seconds of a step, and of each thing in it."""

    fixed_s: float
    token_s: float
    context_token_s: float
    pair_s: float

    def load_s(self, load: Load) -> float:
        return (
            self.fixed_s
            + self.token_s * load.num_tokens
            + self.context_token_s * load.num_context_tokens
            + self.pair_s * load.num_pairs
        )

    def step_s(self, plan: Plan) -> float:
        return self.load_s(load_of(plan.rows))

    def decoders_s(self, plan: Plan) -> float:
        """What the step had taken without the prompts in it."""
        return self.load_s(load_of([row for row in plan.rows if row.num_tokens == 1]))

    def least_s(self, start: int) -> float:
        """What the smallest chunk adds to a step."""
        return self.load_s(Load().plus(start, MIN_CHUNK)) - self.fixed_s


GPU = Machine(4.5e-3, 23.5e-6, 31e-9, 1.3e-9)  # an 8B model on an H200
CPU = Machine(30e-3, 0.7e-3, 1e-6, 0.1e-6)  # a small one on two cores

machines = st.builds(
    Machine,
    fixed_s=st.floats(1e-4, 0.1),
    token_s=st.floats(1e-6, 1e-3),
    context_token_s=st.floats(0, 1e-6),
    pair_s=st.floats(0, 1e-7),
)


def load_of(rows: tuple[PlanRow, ...] | list[PlanRow]) -> Load:
    load = Load()
    for row in rows:
        load = load.plus(row.start, row.num_tokens)
    return load


def bench_of(
    target_s: float | None, step_s: Callable[[Plan], float], max_batched_tokens: int = 1024
) -> EngineBench:
    return EngineBench(
        num_blocks=800,
        max_num_seqs=NUM_DECODERS + 4,
        max_batched_tokens=max_batched_tokens,
        max_model_len=4000,
        inter_token_target_s=target_s,
        step_s=step_s,
    )


def mixed_steps(bench: EngineBench, num_prompts: int = 1) -> list[Plan]:
    """Some sequences decode, then long prompts come: the steps until those are read."""
    for number in range(NUM_DECODERS):
        bench.tell(submit(f"d{number}", prompt(number + 1, 9), max_tokens=900))
    for _ in range(4):
        bench.step()
    first = len(bench.plans)
    names = [f"long{number}" for number in range(num_prompts)]
    for number, name in enumerate(names):
        bench.tell(submit(name, prompt(20 + number, PROMPT_TOKENS), max_tokens=1))
    while not all(name in bench.finishes for name in names):
        bench.step()
    return [p for p in bench.plans[first:] if any(row.num_tokens > 1 for row in p.rows)]


def largest_chunk(plans: list[Plan]) -> int:
    return max(row.num_tokens for plan in plans for row in plan.rows)


@settings(max_examples=40)
@given(
    machine=machines,
    target_ms=st.integers(2, 300),
    num_prompts=st.integers(1, 3),
    has_read=st.booleans(),
)
def test_no_step_is_longer_than_its_target_and_the_smallest_chunk(
    machine: Machine, target_ms: int, num_prompts: int, has_read: bool
) -> None:
    """On any machine, known or not: a token's interval is at most the target, or what decoding
    alone takes, and one smallest chunk; and each step gives prompts at least that chunk."""
    bench = bench_of(target_ms / 1e3, machine.step_s)
    if has_read:
        bench.tell(submit("before", prompt(11, 1100), max_tokens=3))
        bench.run()
    plans = mixed_steps(bench, num_prompts)
    for plan in plans:
        assert plan.num_tokens <= 1024
        bound_s = max(target_ms / 1e3, machine.decoders_s(plan)) + machine.least_s(PROMPT_TOKENS)
        assert machine.step_s(plan) <= 1.001 * bound_s
    for plan in plans[:-num_prompts]:
        assert sum(row.num_tokens for row in plan.rows if row.num_tokens > 1) >= MIN_CHUNK - 1
    assert bench.tokens["long0"] == bench.expected("long0")


@pytest.mark.parametrize(
    ("machine", "target_s", "num_chunks"), [(GPU, 0.02, (3, 5)), (CPU, 0.1, (18, 25))]
)
def test_the_target_is_used(machine: Machine, target_s: float, num_chunks: tuple[int, int]) -> None:
    """A machine that is known takes nearly as many prompt tokens a step as the target allows."""
    bench = bench_of(target_s, machine.step_s)
    bench.tell(submit("before", prompt(11, 1100), max_tokens=3))
    bench.run()
    plans = mixed_steps(bench)
    assert num_chunks[0] <= len(plans) <= num_chunks[1]
    times = [machine.step_s(plan) for plan in plans[len(plans) // 3 : -1]]
    assert min(times) > 0.9 * target_s


@pytest.mark.parametrize("target_s", [None, 0.02])
def test_prompts_alone_take_the_whole_budget(target_s: float | None) -> None:
    """Where nobody decodes, or there is no target, only the budget limits a step."""
    bench = bench_of(target_s, CPU.step_s, max_batched_tokens=512)
    bench.tell(submit("long", prompt(1, PROMPT_TOKENS), max_tokens=1))
    bench.run()
    assert [plan.num_tokens for plan in bench.plans] == [512, 512, 476]
    if target_s is None:
        assert {plan.num_tokens for plan in mixed_steps(bench)[:-1]} == {512}


def test_a_stall_is_forgotten() -> None:
    """Single steps that took far too long, or were seen late, change the chunks little."""
    rng = np.random.default_rng(5)

    def step_s(plan: Plan) -> float:
        return GPU.step_s(plan) * rng.choice([1.0, 30.0, 0.05], p=[0.94, 0.03, 0.03])

    calm, uneasy = (
        mixed_steps(bench_of(0.012, step), num_prompts=3) for step in (GPU.step_s, step_s)
    )
    assert len(uneasy) <= 1.5 * len(calm)
    assert largest_chunk(uneasy) <= 1.5 * largest_chunk(calm)


def test_nobody_enters_a_step_that_is_full() -> None:
    """Prompts that wait enter as the pace leaves room, in their order, not one token each."""
    bench = bench_of(0.05, CPU.step_s)
    for plan in mixed_steps(bench, num_prompts=3)[4:]:
        assert len([row for row in plan.rows if row.num_tokens > 1]) <= 2
    assert [name for name in bench.finishes if name.startswith("long")] == [
        "long0",
        "long1",
        "long2",
    ]


def test_the_costs_are_found() -> None:
    """Steps of all kinds, 5 % of noise: predictions lie within 15 % on the safe side."""
    rng = np.random.default_rng(3)
    costs = StepCosts()
    assert costs.seconds(Load(9, 9, 9)) == 0.0

    def some_load() -> Load:
        load = Load()
        for _ in range(rng.integers(1, 40)):
            load = load.plus(int(rng.integers(0, 3000)), 1)
        if rng.random() < 0.5:
            load = load.plus(int(rng.integers(0, 30000)), int(rng.integers(2, 2000)))
        return load

    for _ in range(300):
        load = some_load()
        costs.observe(load, GPU.load_s(load) * rng.uniform(0.95, 1.05))
    for _ in range(50):
        load = some_load()
        assert 0.95 < costs.seconds(load) / GPU.load_s(load) < 1.15
