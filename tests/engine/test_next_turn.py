"""A session's next turn costs what is new in it, however long its context."""

import sys
from types import FrameType
from typing import Any

import numpy as np

from hillstar.engine.plan import StepResult
from support.engine_bench import EngineBench, submit

SIZE = 8


class _LineCounter:
    """Counts the lines of Python that run inside `with`: each round of a loop counts."""

    def __init__(self) -> None:
        self.num_lines = 0

    def __enter__(self) -> "_LineCounter":
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, _frame: FrameType, event: str, _arg: object) -> Any:
        self.num_lines += event == "line"
        return self._trace


def _count_lines_of_next_turn(num_blocks: int) -> int:
    bench = EngineBench(
        num_blocks=1000, block_size=SIZE, max_batched_tokens=8000, max_model_len=8000
    )
    first = [index % 49 + 1 for index in range(num_blocks * SIZE + 3)]
    bench.tell(submit("a", first, max_tokens=2, lease_id="chat", ignore_eos=True))
    bench.run()
    context = first + bench.tokens["a"]
    following = submit("b", [*context, 5, 5, 5, 5], max_tokens=1, lease_id="chat")
    with _LineCounter() as counter:
        bench.scheduler.handle(following)
        plan = bench.scheduler.schedule()
        assert plan is not None
        batch = bench.builder.build(plan)
        (output,) = bench.scheduler.update(plan, StepResult(np.array([7], np.int32)), 0.01)
        bench.scheduler.stats()
    assert batch.token_ids.tolist() == [context[-1], 5, 5, 5, 5]  # a block is filled, one begun
    assert output.finish is not None
    assert output.finish.usage.num_cached_tokens == len(context) - 1
    bench.scheduler.check()
    return counter.num_lines


def test_the_work_of_a_next_turn_does_not_grow_with_its_context() -> None:
    """From submit to finish as many lines of Python run for 800 blocks of context as for 50."""
    assert _count_lines_of_next_turn(800) == _count_lines_of_next_turn(50)
