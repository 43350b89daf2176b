"""The one loop of an engine: messages in, one step, a frame out. No asyncio, no text.

Each round: take in what the server said; plan and launch the next step; only then wait for the
step before it. So the device always has its next step when it ends one, and with a runner that
computes when it is asked for the result, the tokens of a step leave before the next is computed.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from hillstar.engine.batch import BatchBuilder
from hillstar.engine.channel import ChannelClosed, Inbox, Outbox
from hillstar.engine.messages import EngineStats, Frame, Output, Shutdown
from hillstar.engine.plan import Pending, Plan, Runner
from hillstar.engine.scheduler import Scheduler

log = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.25
FLUSH_S = 1.0


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: Plan
    pending: Pending
    launched_s: float


class EngineLoop:
    """Owns the step in flight; calls everything else from the one thread that calls `run`."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        builder: BatchBuilder,
        runner: Runner,
        inbox: Inbox,
        outbox: Outbox,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._builder = builder
        self._runner = runner
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._in_flight: _Launched | None = None
        self._resolved_s = clock()  # when the last step's result was there
        self._is_idle = True
        self._step_seconds: list[float] = []
        self._reported = EngineStats()
        self._reported_s = clock()

    def run(self) -> None:
        """Step until the server says `Shutdown` or is gone.

        What the runner raises is a broken invariant and ends the loop: it is not caught here.
        """
        try:
            while self.step():
                pass
            self._outbox.flush(FLUSH_S)
        except ChannelClosed:
            log.info("the server is gone")

    def step(self) -> bool:
        """One round; waits for a message only when there is nothing else to do.

        Returns False after `Shutdown`, when the step in flight has been reported. Raises
        ChannelClosed when the server is gone.
        """
        if self._is_idle:
            self._inbox.wait_readable(None)
        outputs, goes_on = self._take_messages()
        plan = self._scheduler.schedule() if goes_on else None
        before, self._in_flight = self._in_flight, self._launch(plan)
        if before is not None:
            outputs += self._resolve(before)
        self._is_idle = before is None and plan is None  # a result may have made room: look again
        self._report(outputs)
        return goes_on

    def _take_messages(self) -> tuple[list[Output], bool]:
        """What the messages' commands answered, and whether the loop goes on."""
        outputs: list[Output] = []
        for message in self._inbox.receive_nowait():
            if isinstance(message, Shutdown):
                return outputs, False
            outputs += self._scheduler.handle(message)
        return outputs, True

    def _launch(self, plan: Plan | None) -> _Launched | None:
        if plan is None:
            return None
        launched_s = self._clock()
        return _Launched(plan, self._runner.run(self._builder.build(plan)), launched_s)

    def _resolve(self, launched: _Launched) -> list[Output]:
        """Wait for a step. It lasted from the end of the one before, or from its launch if that
        was later: where steps follow each other, that is the time between two tokens."""
        result = launched.pending.result()
        now_s = self._clock()
        seconds = now_s - max(launched.launched_s, self._resolved_s)
        self._resolved_s = now_s
        self._step_seconds.append(seconds)
        return self._scheduler.update(launched.plan, result, seconds)

    def _report(self, outputs: list[Output]) -> None:
        """One frame a round at most; without outputs only now and then, and before going idle."""
        now_s = self._clock()
        if not outputs and not self._is_idle and now_s - self._reported_s < STATS_INTERVAL_S:
            return
        stats = self._scheduler.stats()
        if not outputs and not self._step_seconds and stats == self._reported:
            return
        self._reported, self._reported_s = stats, now_s
        if self._step_seconds:
            stats = msgspec.structs.replace(stats, step_seconds=self._step_seconds)
            self._step_seconds = []
        self._outbox.send(Frame(outputs, stats))
