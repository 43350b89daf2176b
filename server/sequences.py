"""Responses as the engine sees them: submitted, routed, resubmitted when an engine dies.

Every token passes here once: frame → one journal write for the whole step → when it is stored,
each sequence's owner is told. What a sequence has said so far is kept here too, because this is
the earliest place that knows it: a new engine is given exactly the tokens that were journaled,
also those whose owner has not handled them yet.
"""

import logging
from array import array
from collections import deque
from collections.abc import Callable

import msgspec

from hillstar.engine.messages import (
    Cancel,
    Finish,
    Frame,
    Output,
    Park,
    Release,
    Unpark,
    Usage,
)
from hillstar.server.engineport import Engine
from hillstar.server.journal import Journal
from hillstar.server.ports import Observer
from hillstar.server.records import AppendTokens, TokenRow
from hillstar.server.sequence import Sequence

MAX_STRIKES = 3  # engines that died under a sequence before it said anything
MAX_UNSTORED_FRAMES = 64  # above this the engine is not read
MIN_UNSTORED_FRAMES = 16  # below this it is read again

log = logging.getLogger(__name__)

encode = msgspec.msgpack.Encoder().encode


class SequenceTable:
    """Owner of every unfinished sequence.

    *Poison.* A sequence that has not spoken since it was submitted when its engine dies gets a
    strike. With one it is on probation: such sequences are submitted one at a time, fewest
    strikes first, and while one is, it alone is blamed. At MAX_STRIKES it fails; the others go on.
    """

    def __init__(
        self, engine: Engine, journal: Journal, observer: Observer, clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._observer = observer
        self._clock = clock
        self._sequences: dict[str, Sequence] = {}
        self._engine_is_up = False
        self._storage_is_up = True
        self._probation: deque[Sequence] = deque()
        self._suspect: Sequence | None = None
        self._num_unstored = 0
        self._reading = True
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Run it; a `held` one waits for `unpark`."""
        assert sequence.id not in self._sequences, f"{sequence.id} runs already"
        self._sequences[sequence.id] = sequence
        self._submit(sequence)

    def cancel(self, sequence: Sequence, keep_tokens: int | None = None) -> None:
        """End it; its finish is delivered like any other, at once if no engine has it."""
        if sequence.id not in self._sequences or sequence.cancelled:
            return
        sequence.cancelled = True
        if sequence.submitted:
            self._engine.send(Cancel(sequence.id, keep_tokens))
        else:
            self._finish(sequence, "cancelled")

    def discard(self, sequence: Sequence) -> None:
        """Forget it at once; nothing more of it is delivered or stored."""
        if sequence.id in self._sequences:
            if sequence.submitted:
                self._engine.send(Cancel(sequence.id))
            self._end(sequence)

    def park(self, sequence: Sequence) -> None:
        """Have it leave the batch until `unpark`. Tokens on their way still arrive."""
        if not sequence.held:
            sequence.held = True
            if sequence.submitted and self._may_run(sequence):
                self._engine.send(Park(sequence.id))
            if sequence is self._suspect:
                self._next_suspect()  # parked, it would never speak

    def unpark(self, sequence: Sequence) -> None:
        if sequence.held:
            sequence.held = False
            if not sequence.submitted:
                self._submit(sequence)
            elif self._may_run(sequence):
                self._engine.send(Unpark(sequence.id))

    def release(self, lease_id: str, *, erase: bool) -> None:
        """Give an idle conversation's blocks back."""
        self._engine.send(Release(lease_id, erase))

    def close(self) -> None:
        """What the engine says from now on is neither stored nor sent."""
        self._is_closed = True

    def engine_up(self) -> None:
        """An engine is ready: give it everything that should run."""
        self._engine_is_up = True
        waiting = list(self._sequences.values())
        self._probation = deque(
            sorted((s for s in waiting if s.strikes), key=lambda sequence: sequence.strikes)
        )
        for sequence in waiting:
            if not sequence.strikes:
                self._submit(sequence)
        self._next_suspect()

    def engine_down(self) -> None:
        """The engine is gone and all it held with it."""
        self._engine_is_up = False
        lost = [sequence for sequence in self._sequences.values() if sequence.submitted]
        blamed = [self._suspect] if self._suspect is not None else lost
        for sequence in blamed:
            sequence.strikes += not sequence.heard
        self._suspect = None
        self._probation.clear()
        for sequence in lost:
            sequence.submitted = False
            if sequence.cancelled:
                self._finish(sequence, "cancelled")
            elif sequence.strikes >= MAX_STRIKES:
                log.error(
                    "gave a response up: %d engines died under it",
                    sequence.strikes,
                    extra=_ids(sequence),
                )
                self._finish(sequence, "error")

    def storage(self, available: bool) -> None:
        """Park everything that has to be stored while storage is away."""
        self._storage_is_up = available
        for sequence in list(self._sequences.values()):
            if sequence.key is None or sequence.held:
                continue
            if sequence.submitted:
                self._engine.send(Unpark(sequence.id) if available else Park(sequence.id))
            elif not sequence.strikes:
                self._submit(sequence)
        if self._suspect is None:
            self._next_suspect()

    def frame(self, frame: Frame) -> None:
        """Take a step's outputs. Unknown sequences' are late, and dropped."""
        if self._is_closed:
            return
        rows: list[TokenRow] = []
        deliveries: list[tuple[Sequence, Output]] = []
        get = self._sequences.get
        for output in frame.outputs:
            sequence = get(output.sequence_id)
            if sequence is None:
                continue
            if output.token_ids:
                if 4 * output.first_token != len(sequence.output_ids):
                    self._reject(sequence, output)
                    continue
                self._take(sequence, output, rows)
            if output.finish is not None:
                self._end(sequence)
            deliveries.append((sequence, output))
        if deliveries:
            self._store(rows, deliveries)

    def _take(self, sequence: Sequence, output: Output, rows: list[TokenRow]) -> None:
        """Add its tokens to what it has said, and to what the journal has to store."""
        token_ids, logprobs, finish = output.token_ids, output.logprobs, output.finish
        ids = array("i", token_ids).tobytes()  # as `pack_ids`, where there are few
        sequence.output_ids += ids
        if logprobs is not None:
            sequence.logprobs += logprobs
        if sequence.key is not None:
            rows.append(
                (
                    sequence.conversation_id,
                    sequence.epoch,
                    sequence.key,
                    output.first_token,
                    ids,
                    None if logprobs is None else encode(logprobs),
                    None if finish is None else encode(finish),
                )
            )
        if not sequence.heard:
            sequence.heard = True
            sequence.strikes = 0
            if sequence is self._suspect:
                self._next_suspect()

    def _end(self, sequence: Sequence) -> None:
        """It has ended: whoever waits behind it on probation has its turn."""
        del self._sequences[sequence.id]
        if sequence is self._suspect:
            self._next_suspect()

    def _reject(self, sequence: Sequence, output: Output) -> None:
        """The engine broke the order of a sequence's tokens: that one cannot go on."""
        log.error(
            "the engine sent token %d after %d",
            output.first_token,
            sequence.num_tokens,
            extra=_ids(sequence),
        )
        self._engine.send(Cancel(sequence.id))
        self._finish(sequence, "error")

    def _store(self, rows: list[TokenRow], deliveries: list[tuple[Sequence, Output]]) -> None:
        """Deliver once the rows are stored, and never before an earlier frame's are."""
        if not rows and not self._num_unstored:
            self._deliver(deliveries)
            return
        self._num_unstored += 1
        if self._reading and self._num_unstored > MAX_UNSTORED_FRAMES:
            self._reading = False
            self._engine.pause_reading()

        def done(error: Exception | None) -> None:
            self._num_unstored -= 1
            if not self._reading and self._num_unstored < MIN_UNSTORED_FRAMES:
                self._reading = True
                self._engine.resume_reading()
            if error is None:
                self._deliver(deliveries)
            else:
                for sequence, _ in deliveries:
                    sequence.owner.lost(sequence, error)

        self._journal.write(AppendTokens(rows), done)

    def _deliver(self, deliveries: list[tuple[Sequence, Output]]) -> None:
        """Tell the owners, and how long each of them has waited."""
        now_s = self._clock()
        gaps_s: list[float] = []
        for sequence, output in deliveries:
            if output.token_ids:
                told_at_s, sequence.told_at_s = sequence.told_at_s, now_s
                if told_at_s is not None:
                    gaps_s.append((now_s - told_at_s) / len(output.token_ids))
                elif output.first_token == 0:
                    self._observer.ttft(now_s - sequence.opened_at_s)
            sequence.owner.stored(sequence, output)
        if gaps_s:
            self._observer.itl(gaps_s)

    def _submit(self, sequence: Sequence) -> None:
        may_run = self._may_run(sequence) and not sequence.held
        if self._engine_is_up and may_run and not sequence.submitted:
            sequence.submitted = True
            sequence.heard = False
            submit = sequence.submit
            if sequence.output_ids:
                submit = msgspec.structs.replace(submit, output_ids=bytes(sequence.output_ids))
            self._engine.send(submit)

    def _may_run(self, sequence: Sequence) -> bool:
        """Whether its tokens can be stored, or need not be; else storage has it parked."""
        return self._storage_is_up or sequence.key is None

    def _finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence that no engine has."""
        num_prompt = len(sequence.submit.prompt_ids) // 4
        usage = Usage(num_prompt, 0, sequence.num_tokens)
        if reason == "cancelled":
            finish = Finish("cancelled", usage)
        else:
            finish = Finish("error", usage, "server_error", "The engine failed on this response.")
        output = Output(sequence.id, sequence.num_tokens, [], None, finish)
        self._end(sequence)
        self._store([], [(sequence, output)])

    def _next_suspect(self) -> None:
        """Submit the next sequence on probation, if any is still to be run."""
        self._suspect = None
        while self._probation and self._suspect is None and self._storage_is_up:
            sequence = self._probation.popleft()
            if sequence.id in self._sequences:
                self._submit(sequence)
                if sequence.submitted:
                    self._suspect = sequence


def _ids(sequence: Sequence) -> dict[str, str]:
    """What a log record says about a sequence."""
    return {
        "conversation_id": sequence.conversation_id,
        "response_id": sequence.response_id,
    }
