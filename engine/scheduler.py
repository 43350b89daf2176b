"""Which sequences get how many tokens in the next step.

`handle(message)` takes what the server says, `schedule()` makes a plan, `update(plan, result)`
takes in what the device answers; what they return goes to the server. The loop thread calls them
and nobody else. One plan may be unresolved while the next is made, so `schedule` goes by counts:
it never looks at a token that has not come back.
"""

import bisect
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hillstar.engine.admission import Admission, OutputLengths, Promises
from hillstar.engine.fairness import TenantShares, WaitingQueue
from hillstar.engine.intake import Intake, Refused
from hillstar.engine.kv.manager import BlockManager, Match
from hillstar.engine.messages import (
    Cancel,
    EngineStats,
    Finish,
    FinishReason,
    Output,
    Park,
    Release,
    Submit,
    TokenLogprobs,
    Unpark,
    Usage,
)
from hillstar.engine.plan import Plan, PlanRow, RowInit, StepResult
from hillstar.engine.sequence import BlockTable, Sequence, State

MAX_PLANS_IN_FLIGHT = 2

Command = Submit | Cancel | Park | Unpark | Release


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched plan and whose its rows are."""

    plan: Plan
    sequences: tuple[Sequence, ...]


class _Draft:
    """The plan being made: who gets how many tokens, under one budget."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.shares: dict[Sequence, int] = {}
        self.entered: list[Sequence] = []
        self.has_preempted = False

    def give(self, sequence: Sequence, num_tokens: int) -> None:
        self.shares[sequence] = num_tokens
        self.budget -= num_tokens

    def take_back(self, sequence: Sequence) -> None:
        self.budget += self.shares.pop(sequence, 0)


@dataclass(slots=True)
class _Totals:
    steps: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Owns the sequences, the queue and, through the block manager, all block tables.

    A row of the device's state is given to another sequence only when every plan that names its
    old one has resolved. A sequence that left the batch with a token in flight still gets that
    token, and enters again only after it; one that has finished ignores it.
    """

    def __init__(
        self,
        *,
        intake: Intake,
        blocks: BlockManager,
        max_num_seqs: int,
        max_batched_tokens: int,
        max_waiting: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._intake = intake
        self._blocks = blocks
        self._max_batched_tokens = max_batched_tokens
        self._max_waiting = max_waiting
        self._clock = clock
        self._sequences: dict[str, Sequence] = {}  # all that have not finished
        self._running: list[Sequence] = []  # by rank
        self._shares = TenantShares()
        self._waiting = WaitingQueue(self._shares)
        self._lengths = OutputLengths()
        self._admission = Admission(blocks, self._lengths)
        self._promises = Promises()
        self._flights: deque[_Flight] = deque()
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._retired_rows: dict[int, list[int]] = {}  # last step that names them -> rows
        self._num_arrivals = 0
        self._num_parked = 0
        self._totals = _Totals()

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
            if len(self._waiting) >= self._max_waiting:
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
        reason = self._reason_to_stop(sequence)
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
            table = self._leave_batch(sequence)
            sequence.resting_id = _parking_id(sequence)
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
        """The next step, or None when nobody can be given a token now.

        Running sequences come first, each with at least one token; what is left of the budget
        admits waiting ones.
        """
        assert len(self._flights) < MAX_PLANS_IN_FLIGHT, "too many unresolved plans"
        draft = _Draft(self._max_batched_tokens)
        self._continue_running(draft)
        if not draft.has_preempted:
            self._admit(draft)
        return self._launch(draft)

    def _continue_running(self, draft: _Draft) -> None:
        """Decodes, then prefills in chunks; by rank among both."""
        wanting = [sequence for sequence in self._running if sequence.num_wanted]
        wanting.sort(key=lambda sequence: sequence.num_wanted > 1)
        for index, sequence in enumerate(wanting):
            if sequence.state is State.RUNNING and self._make_room(sequence, draft):
                num_behind = len(wanting) - index - 1  # one token is left for each of them
                self._feed(sequence, draft, draft.budget - num_behind)

    def _make_room(self, sequence: Sequence, draft: _Draft) -> bool:
        """See to it that one more token has a place; False if the sequence itself gave way."""
        assert sequence.table is not None
        while self._blocks.room(sequence.table) <= sequence.num_planned:
            assert len(self._running) > 1, "a sequence that runs alone has room"
            victim = self._running[-1]
            self._preempt(victim, draft)
            if victim is sequence:
                return False
        return True

    def _feed(self, sequence: Sequence, draft: _Draft, most: int) -> None:
        assert sequence.table is not None
        room = self._blocks.room(sequence.table) - sequence.num_planned
        num_tokens = min(sequence.num_wanted, most, room)
        assert num_tokens > 0, f"nothing to feed to {sequence.sequence_id}"
        grown = self._blocks.grow(sequence.table, sequence.num_planned + num_tokens)
        assert grown, "room was counted"
        draft.give(sequence, num_tokens)

    def _admit(self, draft: _Draft) -> None:
        """Let waiting sequences in while they fit, strictly in the queue's order.

        Only those step aside that wait for something that is on its way: a token of their own,
        or a prefix that another sequence is computing.
        """
        if not self._free_rows or draft.budget <= 0 or not len(self._waiting):
            return
        outstanding = self._admission.outstanding(self._running)
        for sequence in self._waiting.candidates(self._clock()):
            if not self._free_rows or draft.budget <= 0:
                break
            if sequence.num_in_flight or self._is_held_back(sequence):
                continue
            match = self._blocks.match(
                sequence.chain, sequence.tokens, len(sequence.tokens) - 1, sequence.resting_id
            )
            if self._holds_back(sequence, match):
                continue
            if self._running and not self._admission.fits(sequence, match, outstanding):
                break
            self._enter(sequence, match, draft)
            self._feed(sequence, draft, draft.budget)
            outstanding += self._admission.outstanding([sequence])

    def _is_held_back(self, sequence: Sequence) -> bool:
        return sequence.awaited is not None and sequence.awaited in self._promises

    def _holds_back(self, sequence: Sequence, match: Match) -> bool:
        """Whether the next block it needs is being computed by another sequence."""
        index = len(match.blocks)
        if (index + 1) * self._blocks.block_size > len(sequence.tokens):
            sequence.awaited = None
            return False
        sequence.awaited = sequence.chain.of(index)
        return sequence.awaited in self._promises

    def _enter(self, sequence: Sequence, match: Match, draft: _Draft) -> None:
        self._waiting.remove(sequence)
        sequence.state = State.RUNNING
        sequence.table, num_cached = self._blocks.open(match, sequence.resting_id)
        sequence.resting_id = None
        sequence.row = self._free_rows.pop()
        sequence.num_planned = num_cached
        sequence.num_sent_blocks = 0
        bisect.insort(self._running, sequence, key=_rank)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens)
            sequence.num_charged = num_cached
            self._totals.cached_tokens += sequence.num_cached_tokens
        num_full = len(sequence.tokens) // self._blocks.block_size
        self._promises.make(sequence, len(match.blocks), num_full)
        draft.entered.append(sequence)

    def _preempt(self, sequence: Sequence, draft: _Draft) -> None:
        """Take the sequence out of the batch; its full blocks stay cached while they can."""
        draft.take_back(sequence)
        draft.has_preempted = True
        self._totals.preemptions += 1
        self._blocks.close(self._leave_batch(sequence))
        sequence.num_preemptions += 1
        self._wait(sequence)

    def _launch(self, draft: _Draft) -> Plan | None:
        copies = self._blocks.take_copies()
        if not draft.shares:
            return None
        step = self._totals.steps
        self._totals.steps += 1
        inits = tuple(
            RowInit(
                row=sequence.row,
                params=sequence.params,
                num_prompt_tokens=sequence.num_prompt_tokens,
                history=sequence.tokens.slice(0, len(sequence.tokens)),
            )
            for sequence in draft.entered
        )
        rows = tuple(self._plan_row(sequence, n, step) for sequence, n in draft.shares.items())
        plan = Plan(step=step, rows=rows, inits=inits, copies=copies)
        self._flights.append(_Flight(plan, tuple(draft.shares)))
        return plan

    def _plan_row(self, sequence: Sequence, num_tokens: int, step: int) -> PlanRow:
        """The sequence's row of a plan; from here on the plan counts as launched."""
        assert sequence.table is not None
        start, end = sequence.num_planned, sequence.num_planned + num_tokens
        is_complete = end == len(sequence.tokens) + sequence.num_pending
        sample = is_complete and sequence.max_output_tokens > 0
        row = PlanRow(
            row=sequence.row,
            start=start,
            num_tokens=num_tokens,
            token_ids=None if sequence.num_pending else sequence.tokens.slice(start, end),
            new_blocks=tuple(sequence.table.blocks[sequence.num_sent_blocks :]),
            sample=sample,
        )
        sequence.num_sent_blocks = len(sequence.table.blocks)
        sequence.num_planned = end
        sequence.num_pending += sample
        sequence.num_in_flight += 1
        sequence.last_step = step
        self._shares.charge(sequence.tenant, max(0, end - sequence.num_charged))
        sequence.num_charged = max(end, sequence.num_charged)
        num_prompt = sequence.num_prompt_tokens
        self._totals.prefill_tokens += min(end, num_prompt) - min(start, num_prompt)
        return row

    # -- taking in a result ---------------------------------------------------------------------

    def update(self, plan: Plan, result: StepResult) -> list[Output]:
        """The oldest unresolved plan has come back."""
        flight = self._flights.popleft()
        assert flight.plan is plan, f"step {plan.step} resolved out of order"
        outputs: list[Output] = []
        index = -1  # of the row among those that sampled
        for entry, sequence in zip(plan.rows, flight.sequences, strict=True):
            index += entry.sample
            sequence.num_in_flight -= 1
            sequence.num_pending -= entry.sample
            if sequence.state is State.RUNNING:
                self._commit(sequence, entry.start + entry.num_tokens)
            if sequence.state is State.FINISHED:
                continue
            if entry.sample:
                outputs.append(self._take_token(sequence, result, index))
            elif _is_prefilled(sequence):
                outputs.append(self._last_output(sequence, "prefilled"))
        self._free_rows += self._retired_rows.pop(plan.step, [])
        return outputs

    def _commit(self, sequence: Sequence, num_tokens: int) -> None:
        assert sequence.table is not None
        size = self._blocks.block_size
        first = sequence.table.num_tokens // size
        self._blocks.commit(sequence.table, sequence.chain, sequence.tokens, num_tokens)
        self._promises.end(sequence, first, num_tokens // size)

    def _take_token(self, sequence: Sequence, result: StepResult, index: int) -> Output:
        first_token = sequence.num_output_tokens
        token_id = int(result.token_ids[index])
        sequence.tokens.append(token_id)
        self._totals.generated_tokens += 1
        reason = self._reason_to_stop(sequence)
        return Output(
            sequence.sequence_id,
            first_token,
            [token_id],
            _logprobs(sequence, result, index),
            self._finish(sequence, reason) if reason else None,
        )

    def _reason_to_stop(self, sequence: Sequence) -> FinishReason | None:
        num_output = sequence.num_output_tokens
        if not num_output:
            return None
        last = int(sequence.tokens.slice(len(sequence.tokens) - 1, len(sequence.tokens))[0])
        if last in sequence.stop_ids and num_output > sequence.params.min_tokens:
            return "stop"
        return "length" if num_output >= sequence.max_output_tokens else None

    # -- leaving --------------------------------------------------------------------------------

    def _wait(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        self._waiting.push(sequence)

    def _leave_batch(self, sequence: Sequence) -> BlockTable:
        """Take a running sequence's row and table away; the caller says what becomes of both."""
        table = sequence.table
        assert table is not None
        size = self._blocks.block_size
        self._promises.end(sequence, table.num_tokens // size, len(sequence.tokens) // size)
        self._running.remove(sequence)
        if sequence.num_in_flight:
            self._retired_rows.setdefault(sequence.last_step, []).append(sequence.row)
        else:
            self._free_rows.append(sequence.row)
        sequence.table = None
        sequence.row = -1
        sequence.num_planned = 0
        return table

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
            self._settle_table(sequence, self._leave_batch(sequence))
        else:
            self._leave_queue(sequence)
            self._settle_rest(sequence)
        sequence.state = State.FINISHED
        del self._sequences[sequence.sequence_id]
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
        parking_id = _parking_id(sequence)
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
        pool, totals = self._blocks.pool, self._totals
        return EngineStats(
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached,
            blocks_leased=pool.num_leased,
            waiting=len(self._waiting),
            running=len(self._running),
            parked=self._num_parked,
            num_steps_total=totals.steps,
            num_prefill_tokens_total=totals.prefill_tokens,
            num_cached_tokens_total=totals.cached_tokens,
            num_generated_tokens_total=totals.generated_tokens,
            num_preemptions_total=totals.preemptions,
            kv_tokens_used=self._blocks.num_tokens_used,
            kv_tokens_capacity=pool.num_leased * self._blocks.block_size,
        )

    def check(self) -> None:
        """Assert every invariant of the sequences and their blocks; for tests."""
        tables = [sequence.table for sequence in self._running]
        self._blocks.check(table for table in tables if table is not None)
        by_state = dict.fromkeys(State, 0)
        for sequence in self._sequences.values():
            by_state[sequence.state] += 1
            assert (sequence.table is not None) == (sequence.state is State.RUNNING)
        assert by_state[State.RUNNING] == len(self._running)
        assert by_state[State.WAITING] == len(self._waiting)
        assert by_state[State.PARKED] == self._num_parked
        assert by_state[State.FINISHED] == 0
        assert self._running == sorted(self._running, key=_rank)


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


def _parking_id(sequence: Sequence) -> str:
    """The lease that holds a parked sequence's blocks; no server chooses such a name."""
    return f"\0parked:{sequence.sequence_id}"


def _is_prefilled(sequence: Sequence) -> bool:
    """Whether it was to be prefilled only, and every plan that does it has resolved."""
    return (
        sequence.max_output_tokens == 0
        and sequence.table is not None
        and sequence.table.num_tokens == len(sequence.tokens)
    )


def _logprobs(sequence: Sequence, result: StepResult, index: int) -> list[TokenLogprobs] | None:
    num_top = sequence.params.top_logprobs
    if num_top is None:
        return None
    assert result.logprobs is not None, "the plan asked for logprobs"
    top: list[tuple[int, float]] = []
    if num_top:
        assert result.top_ids is not None and result.top_logprobs is not None
        ids = result.top_ids[index, :num_top].tolist()
        top = list(zip(ids, result.top_logprobs[index, :num_top].tolist(), strict=True))
    return [TokenLogprobs(float(result.logprobs[index]), top)]
