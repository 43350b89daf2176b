"""Which sequences get how many tokens in the next step.

`handle(message)` takes what the server says, `schedule()` makes a plan, `update(plan, result)`
takes in what the device answers; what they return goes to the server. The loop thread calls them
and nobody else. One plan may be unresolved while the next is made, so `schedule` goes by counts:
it never looks at a token that has not come back.
"""

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from hillstar.engine.admission import Admission, OutputLengths, Promises
from hillstar.engine.fairness import TenantShares, WaitingQueue
from hillstar.engine.intake import Intake, Refused
from hillstar.engine.kv.manager import BlockManager
from hillstar.engine.messages import (
    Cancel,
    EngineStats,
    Finish,
    FinishReason,
    Output,
    Park,
    Release,
    Submit,
    Unpark,
    Usage,
)
from hillstar.engine.pace import Pace
from hillstar.engine.plan import Plan, PlanRow, StepResult
from hillstar.engine.planner import Flight, Planner
from hillstar.engine.roster import Roster
from hillstar.engine.sequence import BlockTable, Sequence, State
from hillstar.engine.spec.speculation import Speculation, accepted

MAX_PLANS_IN_FLIGHT = 2

Command = Submit | Cancel | Park | Unpark | Release


class Scheduler:
    """Owns the sequences, the queue and, through the block manager, all block tables.

    A sequence that left the batch with a token in flight still gets that token, and enters again
    only after it; one that has finished ignores it.
    """

    def __init__(
        self,
        *,
        intake: Intake,
        blocks: BlockManager,
        max_num_seqs: int,
        max_batched_tokens: int,
        max_waiting: int,
        inter_token_target_s: float | None = None,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._intake = intake
        self._blocks = blocks
        self._max_waiting = max_waiting
        self._clock = clock
        self._sequences: dict[str, Sequence] = {}  # all that have not finished
        self._shares = TenantShares()
        self._waiting = WaitingQueue(self._shares)
        self._lengths = OutputLengths()
        self._pace = Pace(inter_token_target_s)
        self._speculation = speculation
        promises = Promises()
        self._roster = Roster(blocks, promises, max_num_seqs)
        self._planner = Planner(
            blocks=blocks,
            roster=self._roster,
            promises=promises,
            waiting=self._waiting,
            shares=self._shares,
            admission=Admission(blocks, self._lengths),
            pace=self._pace,
            speculation=speculation,
            max_batched_tokens=max_batched_tokens,
        )
        self._flights: deque[Flight] = deque()
        self._num_arrivals = 0
        self._num_parked = 0
        self._num_generated_tokens = 0

    # -- commands -------------------------------------------------------------------------------

    def handle(self, command: Command) -> list[Output]:
        """Do as the server says; what is over at once is answered at once.

        Unknown ids are ignored: their sequence has just ended, and its finish is on its way.
        """
        if isinstance(command, Submit):
            return self._submit(command)
        if isinstance(command, Release):
            self._release(command)
            return []
        sequence = self._sequences.get(command.sequence_id)
        if sequence is None:
            return []
        if isinstance(command, Cancel):
            return [self._cancel(sequence, command.keep_tokens)]
        if isinstance(command, Park):
            self._park(sequence)
        else:
            self._unpark(sequence)
        return []

    def _submit(self, submit: Submit) -> list[Output]:
        try:
            if submit.sequence_id in self._sequences:
                raise Refused("duplicate_sequence", f"{submit.sequence_id} is running already.")
            # Free rows count: after a restart all that ran before is submitted again at once.
            if len(self._waiting) >= self._max_waiting + self._roster.num_free_rows:
                raise Refused("server_overloaded", "Too many requests are waiting.")
            sequence = self._intake.sequence(submit, self._num_arrivals, self._clock())
        except Refused as refused:
            usage = Usage(len(submit.prompt_ids) // 4, 0, len(submit.output_ids) // 4)
            finish = Finish("refused", usage, refused.code, refused.message)
            return [Output(submit.sequence_id, usage.num_output_tokens, [], finish=finish)]
        self._num_arrivals += 1
        self._sequences[sequence.sequence_id] = sequence
        self._shares.enter(sequence.tenant)
        self._waiting.push(sequence)
        if sequence.lease_id is not None:
            self._blocks.touch(sequence.lease_id)
        reason = sequence.reason_to_stop
        return [self._last_output(sequence, reason)] if reason else []

    def _cancel(self, sequence: Sequence, keep_tokens: int | None) -> Output:
        num_kept = sequence.num_output_tokens
        if keep_tokens is not None and keep_tokens < num_kept:
            num_kept = max(0, keep_tokens)
            if sequence.table is not None:
                self._blocks.trim(sequence.table, sequence.num_prompt_tokens + num_kept)
        return self._last_output(sequence, "cancelled", num_kept)

    def _park(self, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            table = self._roster.leave(sequence)
            sequence.resting_id = sequence.parking_id
            self._blocks.keep(table, sequence.resting_id, parked=True)
        elif sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        else:
            return
        sequence.state = State.PARKED
        self._num_parked += 1

    def _unpark(self, sequence: Sequence) -> None:
        if sequence.state is State.PARKED:
            self._num_parked -= 1
            self._wait(sequence)

    def _release(self, release: Release) -> None:
        self._blocks.release(release.lease_id, erase=release.erase)
        for sequence in self._sequences.values():
            if sequence.lease_id == release.lease_id:
                sequence.lease_id = None
                sequence.erase = release.erase

    # -- making a plan --------------------------------------------------------------------------

    def schedule(self) -> Plan | None:
        """The next step, or None when nobody can be given a token now."""
        assert len(self._flights) < MAX_PLANS_IN_FLIGHT, "too many unresolved plans"
        flight = self._planner.make(self._clock())
        if flight is None:
            return None
        self._flights.append(flight)
        return flight.plan

    # -- taking in a result ---------------------------------------------------------------------

    def update(self, plan: Plan, result: StepResult, seconds: float) -> list[Output]:
        """The oldest unresolved plan has come back. seconds: how long its step took."""
        flight = self._flights.popleft()
        assert flight.plan is plan, f"step {plan.step} resolved out of order"
        self._pace.observe(flight.load, seconds)
        if self._speculation is not None and not flight.load.num_pairs:
            self._speculation.observe_step(plan.num_tokens, seconds)
        outputs: list[Output] = []
        index = 0  # of the row's first sample
        for entry, sequence in zip(plan.rows, flight.sequences, strict=True):
            samples = range(index, index + entry.num_samples)
            index = samples.stop
            sequence.num_in_flight -= 1
            sequence.num_pending -= entry.num_samples
            if sequence.state is State.FINISHED:
                continue
            if entry.sample:
                outputs.append(self._take_tokens(sequence, entry, result, samples))
                continue
            self._commit(sequence, entry.start + entry.num_tokens)
            if sequence.is_prefilled:
                outputs.append(self._last_output(sequence, "prefilled"))
        self._roster.resolved(plan.step)
        return outputs

    def _take_tokens(
        self, sequence: Sequence, entry: PlanRow, result: StepResult, samples: range
    ) -> Output:
        """What was sampled behind the sequence's own token and behind each right draft."""
        first_token = sequence.num_output_tokens
        reason = None
        kept = samples[: 1 + self._num_accepted(sequence, entry, result.token_ids[samples])]
        for count, index in enumerate(kept, start=1):
            sequence.tokens.append(int(result.token_ids[index]))
            reason = sequence.reason_to_stop
            if reason:
                kept = kept[:count]
                break
        self._num_generated_tokens += len(kept)
        end = entry.start + entry.num_tokens - entry.num_drafts + len(kept) - 1
        if entry.num_drafts and sequence.state is State.RUNNING:
            sequence.num_planned = end  # what lies behind was drafted in vain: fed once more
        self._commit(sequence, end)
        num_top = sequence.params.top_logprobs
        return Output(
            sequence.sequence_id,
            first_token,
            result.token_ids[kept].tolist(),
            result.logprobs_of(kept, num_top),
            self._finish(sequence, reason) if reason else None,
        )

    def _num_accepted(self, sequence: Sequence, entry: PlanRow, chosen: np.ndarray) -> int:
        if not entry.num_drafts or self._speculation is None:
            return 0
        assert entry.token_ids is not None, "who drafts knows its last token"
        num_accepted = accepted(entry.token_ids[1:], chosen)
        self._speculation.observe(sequence, entry.num_drafts, num_accepted)
        return num_accepted

    def _commit(self, sequence: Sequence, num_tokens: int) -> None:
        if sequence.state is State.RUNNING:
            self._roster.commit(sequence, num_tokens)

    # -- leaving --------------------------------------------------------------------------------

    def _wait(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        self._waiting.push(sequence)

    def _leave_queue(self, sequence: Sequence) -> None:
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        else:
            self._num_parked -= 1

    def _last_output(
        self, sequence: Sequence, reason: FinishReason, num_kept: int | None = None
    ) -> Output:
        """A finish without a new token."""
        num_output = sequence.num_output_tokens
        finish = self._finish(sequence, reason)
        if num_kept is not None:
            usage = Usage(finish.usage.num_prompt_tokens, finish.usage.num_cached_tokens, num_kept)
            finish = Finish(reason, usage)
        return Output(sequence.sequence_id, num_output, [], finish=finish)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Finish:
        """The one place where a sequence ends."""
        if sequence.state is State.RUNNING:
            self._settle_table(sequence, self._roster.leave(sequence))
        else:
            self._leave_queue(sequence)
            self._settle_rest(sequence)
        sequence.state = State.FINISHED
        del self._sequences[sequence.sequence_id]
        if self._speculation is not None:
            self._speculation.forget(sequence)
        self._shares.leave(sequence.tenant)
        if reason in ("stop", "length"):
            self._lengths.observe(sequence.tenant, sequence.num_output_tokens)
        return Finish(reason, sequence.usage())

    def _settle_table(self, sequence: Sequence, table: BlockTable) -> None:
        if sequence.lease_id is None:
            self._blocks.close(table, erase=sequence.erase)
        else:
            self._blocks.keep(table, sequence.lease_id)

    def _settle_rest(self, sequence: Sequence) -> None:
        """What a sequence outside the batch has left behind: a parking lease, cached blocks."""
        parking_id = sequence.parking_id
        if sequence.erase:
            self._blocks.release(parking_id, erase=True)
            match = self._blocks.match(
                sequence.chain, sequence.tokens, len(sequence.tokens), lease_id=None
            )
            self._blocks.erase(match)
        elif sequence.lease_id is not None:
            self._blocks.rename(parking_id, sequence.lease_id)
        else:
            self._blocks.release(parking_id)

    # -- looking in -----------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters and gauges of this instant; the loop adds `step_seconds`."""
        pool, planner, spec = self._blocks.pool, self._planner, self._speculation
        return EngineStats(
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached,
            blocks_leased=pool.num_leased,
            waiting=len(self._waiting),
            running=len(self._roster.running),
            parked=self._num_parked,
            num_steps_total=planner.num_steps,
            num_prefill_tokens_total=planner.num_prefill_tokens,
            num_cached_tokens_total=planner.num_cached_tokens,
            num_generated_tokens_total=self._num_generated_tokens,
            num_preemptions_total=planner.num_preemptions,
            num_drafted_tokens_total=spec.num_drafted_tokens if spec else 0,
            num_accepted_tokens_total=spec.num_accepted_tokens if spec else 0,
            kv_tokens_used=self._blocks.num_tokens_used + self._roster.num_tokens_in_flight,
            kv_tokens_capacity=pool.num_leased * self._blocks.block_size,
        )

    def check(self) -> None:
        """Assert every invariant of the sequences and their blocks; for tests."""
        self._roster.check()
        by_state = dict.fromkeys(State, 0)
        for sequence in self._sequences.values():
            by_state[sequence.state] += 1
            assert (sequence.table is not None) == (sequence.state is State.RUNNING)
        assert by_state[State.RUNNING] == len(self._roster.running)
        assert by_state[State.WAITING] == len(self._waiting)
        assert by_state[State.PARKED] == self._num_parked
        assert by_state[State.FINISHED] == 0
