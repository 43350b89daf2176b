"""The loop's order, its frames, and when it waits."""

import threading
from collections.abc import Callable

import pytest

from hillstar.engine.channel import QueueChannel
from hillstar.engine.loop import STATS_INTERVAL_S, EngineLoop
from hillstar.engine.messages import (
    Cancel,
    Frame,
    Park,
    Release,
    Shutdown,
    ToEngine,
    Unpark,
)
from hillstar.engine.plan import Batch, Pending, StepResult
from support.engine_bench import EngineBench, submit
from support.fake_runner import FakeModel

DEADLINE_S = 20.0


class LoggingRunner:
    """Writes down in which order steps are launched and resolved."""

    def __init__(self, bench: EngineBench, after_launch: Callable[[int], None] | None) -> None:
        self._bench = bench
        self._after_launch = after_launch
        self.events: list[str] = []

    def run(self, batch: Batch) -> Pending:
        step = batch.plan.step
        self.events.append(f"run {step}")
        pending = self._bench.runner.run(batch)
        if self._after_launch is not None:
            self._after_launch(step)
        return _LoggingPending(self.events, step, pending)


class _LoggingPending:
    def __init__(self, events: list[str], step: int, pending: Pending) -> None:
        self._events = events
        self._step = step
        self._pending = pending

    def result(self) -> StepResult:
        self._events.append(f"result {self._step}")
        return self._pending.result()


class LoopBench:
    """A loop over the fake runner whose rounds are called one by one."""

    def __init__(
        self,
        bench: EngineBench | None = None,
        after_launch: Callable[[int], None] | None = None,
    ) -> None:
        self.bench = bench or EngineBench()
        self.channel = QueueChannel(max_outputs=10_000)
        self.runner = LoggingRunner(self.bench, after_launch)
        self.loop = EngineLoop(
            scheduler=self.bench.scheduler,
            builder=self.bench.builder,
            runner=self.runner,
            inbox=self.channel,
            outbox=self.channel,
            clock=lambda: self.bench.now_s,
        )

    def tell(self, *messages: ToEngine) -> None:
        for message in messages:
            self.channel.post(message)

    def frames(self) -> list[Frame]:
        frames: list[Frame] = []
        while not self.channel.outputs.empty():
            message = self.channel.outputs.get_nowait()
            assert isinstance(message, Frame)
            frames.append(message)
        return frames

    def run_until_shutdown(self) -> None:
        self.loop.run()


def tokens_of(frames: list[Frame], sequence_id: str) -> list[int]:
    outputs = [output for frame in frames for output in frame.outputs]
    return [
        token
        for output in outputs
        if output.sequence_id == sequence_id
        for token in output.token_ids
    ]


def test_the_next_step_is_launched_before_the_last_one_is_resolved() -> None:
    """One plan is always in flight while a result is waited for."""
    bench = LoopBench()
    bench.tell(submit("a", [1, 2, 3], max_tokens=3))
    for _ in range(4):
        bench.loop.step()
    assert bench.runner.events == ["run 0", "run 1", "result 0", "run 2", "result 1", "result 2"]


def test_one_frame_carries_all_of_a_step() -> None:
    """Every step that says something is one frame, with the outputs of all its sequences."""
    bench = LoopBench()
    bench.tell(*(submit(f"s{number}", [number + 1, 2], max_tokens=2) for number in range(5)))
    for _ in range(3):
        bench.loop.step()
    spoken = [frame for frame in bench.frames() if frame.outputs]
    assert [len(frame.outputs) for frame in spoken] == [5, 5]
    assert all(len(frame.stats.step_seconds) == 1 for frame in spoken)


def test_refusals_and_cancels_are_answered_in_the_same_round() -> None:
    """What needs no step is answered without one."""
    bench = LoopBench()
    bench.tell(submit("long", [1] * 9, max_tokens=10_000), submit("a", [1]), Cancel("a"))
    bench.loop.step()
    (frame,) = bench.frames()
    reasons = [output.finish.reason for output in frame.outputs if output.finish]
    assert reasons == ["refused", "cancelled"]
    assert bench.runner.events == []


def test_shutdown_reports_the_step_in_flight() -> None:
    """The loop leaves at a step's end: what was computed is said."""
    bench = LoopBench()
    bench.tell(submit("a", [1, 2, 3], max_tokens=9))
    for _ in range(3):
        assert bench.loop.step()
    bench.tell(Shutdown())
    assert not bench.loop.step()
    assert bench.runner.events[-1] == "result 2"
    assert len(tokens_of(bench.frames(), "a")) == 3


def test_it_runs_until_all_is_said_and_waits_in_between() -> None:
    """On its own thread, with work that comes in portions, it says what the oracle says."""
    bench = LoopBench()
    thread = threading.Thread(target=bench.run_until_shutdown)
    thread.start()
    for number in range(5):
        message = submit(f"s{number}", [number + 1, 5, 6], max_tokens=4)
        bench.bench.submits[message.sequence_id] = message
        bench.tell(message)
        said: list[int] = []
        finished = False
        while not finished:
            frame = bench.channel.outputs.get(timeout=DEADLINE_S)
            assert isinstance(frame, Frame)
            said += tokens_of([frame], message.sequence_id)
            finished = any(output.finish for output in frame.outputs)
        assert said == bench.bench.expected(message.sequence_id)
    bench.tell(Shutdown())
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_it_does_not_spin_while_everything_is_parked() -> None:
    """With parked sequences only, the loop waits for a message."""
    bench = LoopBench()
    bench.tell(submit("a", [1, 2, 3], max_tokens=9))
    bench.loop.step()
    bench.tell(Park("a"))
    bench.loop.step()
    bench.loop.step()
    waits: list[float | None] = []

    def wait(timeout_s: float | None) -> bool:
        waits.append(timeout_s)
        bench.tell(Unpark("a"), Shutdown())
        return True

    bench.channel.wait_readable = wait  # type: ignore[method-assign]
    assert not bench.loop.step()
    assert waits == [None]


def test_work_that_a_result_makes_room_for_is_found_without_a_message() -> None:
    """With one row, the next sequence enters although nothing is in flight when the last ends."""
    bench = LoopBench(EngineBench(max_num_seqs=1))
    bench.tell(submit("a", [1, 2], max_tokens=1), submit("b", [2, 2], max_tokens=1))
    for _ in range(4):
        bench.loop.step()
    assert tokens_of(bench.frames(), "b")


def test_generation_stops_within_two_steps_of_a_cancel() -> None:
    """A cancel that arrives while a step is being launched is obeyed in the next round."""
    launched: list[int] = []
    bench = LoopBench(after_launch=launched.append)
    bench.tell(submit("a", [1, 2, 3], max_tokens=50))
    for _ in range(5):
        bench.loop.step()
    bench.tell(Cancel("a"))
    num_launched = len(launched)
    bench.loop.step()
    bench.tell(Release("nothing"))  # so that the idle loop does not wait
    bench.loop.step()
    assert len(launched) == num_launched
    finishes = [o.finish for frame in bench.frames() for o in frame.outputs if o.finish]
    assert [finish.reason for finish in finishes] == ["cancelled"]


def test_steps_without_outputs_are_reported_now_and_then() -> None:
    """A long prefill says how it goes a few times a second, not at each chunk."""
    engine = EngineBench(num_blocks=100, max_batched_tokens=8)
    bench = LoopBench(engine)
    bench.tell(submit("a", [1 + number % 40 for number in range(400)], max_tokens=1))
    num_rounds = 40
    for _ in range(num_rounds):
        bench.loop.step()
        engine.now_s += STATS_INTERVAL_S / 10
    frames = bench.frames()
    assert 3 <= len(frames) <= 5
    assert all(not frame.outputs for frame in frames)
    assert frames[-1].stats.num_prefill_tokens_total > 200


def test_it_says_once_that_it_is_idle() -> None:
    """The last frame before waiting shows the pool as it is left; then it is quiet."""
    bench = LoopBench()
    bench.tell(submit("a", [1, 2, 3], max_tokens=2, lease_id="chat"))
    for _ in range(4):
        bench.loop.step()
    stats = bench.frames()[-1].stats
    assert (stats.running, stats.waiting, stats.blocks_leased) == (0, 0, 1)
    bench.tell(Release("unknown"))
    bench.loop.step()
    assert bench.frames() == []
    bench.tell(Release("chat"))
    bench.loop.step()
    assert bench.frames()[-1].stats.blocks_leased == 0


def test_a_runner_that_fails_ends_the_loop() -> None:
    """A broken invariant is not caught: the process ends and is restarted."""

    class BrokenModel(FakeModel):
        def next_token(self, context: object, params: object, num_output: int) -> int:
            raise RuntimeError("illegal access")

    bench = LoopBench(EngineBench(model=BrokenModel()))
    bench.tell(submit("a", [1, 2, 3]))
    with pytest.raises(RuntimeError, match="illegal access"):
        bench.loop.run()


def test_it_ends_when_the_server_is_gone() -> None:
    """A closed channel ends the loop, idle or not."""
    for messages in ([], [submit("a", [1, 2, 3], max_tokens=400)]):
        bench = LoopBench()
        bench.tell(*messages)
        bench.channel.close()
        bench.loop.run()
