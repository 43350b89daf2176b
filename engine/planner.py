"""Makes plans: continues what runs, makes room when there is none, admits what waits."""

from dataclasses import dataclass

from hillstar.engine.admission import Admission, Promises
from hillstar.engine.fairness import TenantShares, WaitingQueue
from hillstar.engine.kv.manager import BlockManager, Match
from hillstar.engine.pace import Load, Pace
from hillstar.engine.plan import Plan
from hillstar.engine.roster import Roster
from hillstar.engine.sequence import Sequence, State
from hillstar.engine.sketch import Sketch
from hillstar.engine.spec.speculation import Speculation


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched plan, whose its rows are, and how much it computes."""

    plan: Plan
    sequences: tuple[Sequence, ...]
    load: Load


class Planner:
    """Owns the step counters; changes roster, queue and blocks on behalf of the scheduler."""

    def __init__(
        self,
        *,
        blocks: BlockManager,
        roster: Roster,
        promises: Promises,
        waiting: WaitingQueue,
        shares: TenantShares,
        admission: Admission,
        pace: Pace,
        speculation: Speculation | None,
        max_batched_tokens: int,
    ) -> None:
        self._blocks = blocks
        self._roster = roster
        self._promises = promises
        self._waiting = waiting
        self._shares = shares
        self._admission = admission
        self._pace = pace
        self._speculation = speculation
        self._max_batched_tokens = max_batched_tokens
        self.num_steps = 0
        self.num_prefill_tokens = 0  # prompt tokens computed
        self.num_cached_tokens = 0  # prompt tokens found
        self.num_preemptions = 0

    def make(self, now_s: float) -> Flight | None:
        """The next step, or None when nobody can be given a token now.

        Running sequences come first, each with at least one token; what is left of the budget
        admits waiting ones, unless somebody has just had to give way. A step that carries
        decoders takes no more of prompts than its pace allows.
        """
        if self._speculation is not None and self._speculation.must_wait(self._roster.running):
            return None
        sketch = Sketch(self._max_batched_tokens)
        self._continue_running(sketch)
        if self._speculation is not None and not sketch.has_preempted:
            self._draft_ahead(sketch, self._speculation)
        if not sketch.has_preempted:
            self._admit(sketch, now_s)
        copies = self._blocks.take_copies()
        if not sketch.shares:
            return None
        for sequence in sketch.shares:
            self._account(sequence, sketch.num_own_tokens(sequence))
        plan = sketch.seal(self.num_steps, copies)
        self.num_steps += 1
        return Flight(plan, tuple(sketch.shares), sketch.load)

    def _continue_running(self, sketch: Sketch) -> None:
        """Decodes, then prefills in chunks; by rank among both."""
        wanting = [(sequence, sequence.num_wanted) for sequence in self._roster.running]
        wanting = [entry for entry in wanting if entry[1]]
        wanting.sort(key=lambda entry: entry[1] > 1)
        sketch.has_decoders = bool(wanting) and wanting[0][1] == 1
        for index, (sequence, num_wanted) in enumerate(wanting):
            if sequence.state is State.RUNNING and (room := self._make_room(sequence, sketch)):
                num_behind = len(wanting) - index - 1  # one token is left for each of them
                most = min(num_wanted, room, sketch.budget - num_behind)
                self._feed(sequence, sketch, most)

    def _draft_ahead(self, sketch: Sketch, speculation: Speculation) -> None:
        """Let decoders feed drafted tokens too, with what prompts left of the budget."""
        num_expected = float(len(sketch.shares))
        for sequence in [s for s, count in sketch.shares.items() if count == s.num_wanted == 1]:
            assert sequence.table is not None
            num_left = sequence.max_output_tokens - sequence.num_output_tokens - 1
            most = min(sketch.budget, self._room(sequence) - 1, num_left)
            tokens, num_right = speculation.draft(
                sequence, most, sketch.load.num_tokens, num_expected
            )
            if not len(tokens):
                continue
            grown = self._blocks.grow(sequence.table, sequence.num_planned + 1 + len(tokens))
            assert grown, "room was counted"
            sketch.add_drafted(sequence, tokens)
            num_expected += num_right

    def _make_room(self, sequence: Sequence, sketch: Sketch) -> int:
        """See to it that one more token has a place; how many have, 0 if it gave way itself."""
        while (room := self._room(sequence)) <= 0:
            assert len(self._roster.running) > 1, "a sequence that runs alone has room"
            victim = self._roster.running[-1]
            self._preempt(victim, sketch)
            if victim is sequence:
                return 0
        return room

    def _room(self, sequence: Sequence) -> int:
        """How many more tokens would have a place if it got every available block."""
        assert sequence.table is not None
        return self._blocks.room(sequence.table) - sequence.num_planned

    def _feed(self, sequence: Sequence, sketch: Sketch, most: int) -> None:
        """Give it up to `most` tokens; fewer where decoders would wait too long for the step."""
        assert most > 0, f"nothing to feed to {sequence.sequence_id}"
        assert sequence.table is not None
        num_tokens = most
        if sketch.has_decoders:
            start, fed = sequence.num_planned, sketch.num_prefill_tokens
            num_tokens = max(1, self._pace.chunk(sketch.load, fed, start, most))
            sketch.is_slow |= num_tokens < most
        grown = self._blocks.grow(sequence.table, sequence.num_planned + num_tokens)
        assert grown, "room was counted"
        sketch.give(sequence, num_tokens)

    def _admit(self, sketch: Sketch, now_s: float) -> None:
        """Let waiting sequences in while they fit, strictly in the queue's order.

        Only those step aside that wait for something that is on its way: a token of their own,
        or a prefix that another sequence is computing.
        """
        if not self._roster.num_free_rows or sketch.is_full or not len(self._waiting):
            return
        outstanding = self._admission.outstanding(self._roster.running)
        for sequence in self._waiting.candidates(now_s):
            if not self._roster.num_free_rows or sketch.is_full:
                break
            if sequence.num_in_flight or self._is_held_back(sequence):
                continue
            match = self._blocks.match(
                sequence.chain, sequence.tokens, len(sequence.tokens) - 1, sequence.resting_id
            )
            if self._holds_back(sequence, match):
                continue
            if self._roster.running and not self._admission.fits(sequence, match, outstanding):
                break
            self._enter(sequence, match, sketch)
            num_tokens = min(sequence.num_wanted, sketch.budget, self._room(sequence))
            self._feed(sequence, sketch, num_tokens)
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

    def _enter(self, sequence: Sequence, match: Match, sketch: Sketch) -> None:
        self._waiting.remove(sequence)
        sequence.state = State.RUNNING
        num_cached = self._roster.enter(sequence, match)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens)
            sequence.num_charged = num_cached
            self.num_cached_tokens += sequence.num_cached_tokens
        sketch.entered.append(sequence)

    def _preempt(self, sequence: Sequence, sketch: Sketch) -> None:
        """Take the sequence out of the batch; its full blocks stay cached while they can."""
        sketch.take_back(sequence)
        sketch.has_preempted = True
        self.num_preemptions += 1
        self._blocks.close(self._roster.leave(sequence))
        sequence.num_preemptions += 1
        sequence.state = State.WAITING
        self._waiting.push(sequence)

    def _account(self, sequence: Sequence, num_tokens: int) -> None:
        """Its tenant pays for each token once, however often it has to be computed."""
        start, end = sequence.num_planned, sequence.num_planned + num_tokens
        self._shares.charge(sequence.tenant, max(0, end - sequence.num_charged))
        sequence.num_charged = max(end, sequence.num_charged)
        num_prompt = sequence.num_prompt_tokens
        self.num_prefill_tokens += min(end, num_prompt) - min(start, num_prompt)
