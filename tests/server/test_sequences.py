"""The sequence table: routing, resubmission, back-pressure, blame."""

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from hillstar.engine.messages import (
    Cancel,
    EngineStats,
    Finish,
    Frame,
    Output,
    Park,
    SamplingParams,
    Submit,
    ToEngine,
    Unpark,
    Usage,
    pack_ids,
)
from hillstar.server.journal import Journal
from hillstar.server.records import AppendTokens, Write
from hillstar.server.sequence import Sequence
from hillstar.server.sequences import (
    MAX_STRIKES,
    MAX_UNSTORED_FRAMES,
    MIN_UNSTORED_FRAMES,
    SequenceTable,
)
from hillstar.server.writer import Done
from support.hub_world import Latencies


class Engine:
    """Notes what it is sent."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self.is_read = True

    async def start(self, listener: object) -> None:
        raise AssertionError("the table starts no engine")

    async def close(self) -> None:
        raise AssertionError("the table closes no engine")

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def submitted(self) -> list[str]:
        return [m.sequence_id for m in self.sent if isinstance(m, Submit)]


class HeldJournal:
    """Answers writes when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[AppendTokens, Done]] = []

    def write(self, write: Write, done: Done) -> None:
        self.waiting.append((cast(AppendTokens, write), done))

    def answer(self, error: Exception | None = None) -> None:
        _, done = self.waiting.pop(0)
        done(error)


@dataclass
class Owner:
    outputs: list[tuple[str, list[int], str | None]] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    def stored(self, sequence: Sequence, output: Output) -> None:
        finish = output.finish.reason if output.finish is not None else None
        self.outputs.append((sequence.id, list(output.token_ids), finish))

    def lost(self, sequence: Sequence, error: Exception) -> None:
        self.errors.append(error)


class Rig:
    """A table with its surroundings, and a clock that the test sets."""

    def __init__(self) -> None:
        self.engine, self.journal, self.owner = Engine(), HeldJournal(), Owner()
        self.latencies = Latencies()
        self.now_s = 0.0
        self.table = SequenceTable(
            self.engine, cast(Journal, self.journal), self.latencies, lambda: self.now_s
        )

    def add(self, name: str, **fields: Any) -> Sequence:
        sequence = Sequence(
            submit=Submit(
                sequence_id=name, prompt_ids=pack_ids([1]), params=SamplingParams(max_tokens=9)
            ),
            response_id=f"resp_{name}",
            conversation_id="conv",
            epoch=1,
            key=fields.pop("key", 1),
            owner=self.owner,
            opened_at_s=self.now_s,
            **fields,
        )
        self.table.add(sequence)
        return sequence

    def say(self, *outputs: Output) -> None:
        self.table.frame(Frame(list(outputs), EngineStats()))


def output(name: str, first: int, *ids: int, finish: str | None = None) -> Output:
    end = Finish(cast(Any, finish), Usage(1, 0, first + len(ids))) if finish else None
    return Output(name, first, list(ids), None, end)


def test_tokens_are_delivered_when_stored_in_the_order_of_the_frames() -> None:
    """One write a step; nothing overtakes an earlier frame's write, not even what needs none."""
    rig = Rig()
    rig.table.engine_up()
    rig.add("a")
    rig.add("b", key=None)
    rig.say(output("a", 0, 5), output("b", 0, 6))
    rig.say(output("b", 1, 7))
    assert len(rig.journal.waiting) == 2 and rig.owner.outputs == []
    assert [row[4] for row in rig.journal.waiting[0][0].rows] == [pack_ids([5])]
    rig.journal.answer()
    assert rig.owner.outputs == [("a", [5], None), ("b", [6], None)]
    rig.journal.answer()
    assert rig.owner.outputs[2:] == [("b", [7], None)]
    rig.say(output("b", 2, 8))  # nothing is waiting: no write at all
    assert rig.owner.outputs[3:] == [("b", [8], None)] and not rig.journal.waiting


def test_latencies_are_counted_from_when_tokens_are_stored() -> None:
    """The first token since the response was opened, then the time between two for each of them."""
    rig = Rig()
    rig.table.engine_up()
    rig.add("a", key=None)
    rig.add("b", key=None, output_ids=bytearray(pack_ids([1])))  # resumed: it has had its first
    for now_s, outputs in (
        (2.0, [output("a", 0, 5), output("b", 1, 6)]),
        (3.0, [output("b", 2, 7)]),
        (6.0, [output("a", 1, 8, 9), output("b", 3, 10, finish="length")]),
    ):
        rig.now_s = now_s
        rig.say(*outputs)
    assert (rig.latencies.ttfts, rig.latencies.itls) == ([2.0], [1.0, 2.0, 3.0])


def test_outputs_of_unknown_sequences_are_dropped() -> None:
    """What comes late, for a sequence that was discarded or has ended, is nobody's."""
    rig = Rig()
    rig.table.engine_up()
    gone = rig.add("a", key=None)
    rig.table.discard(gone)
    assert rig.engine.sent[-1] == Cancel("a")
    rig.say(output("a", 0, 5), output("never", 0, 5))
    assert rig.owner.outputs == [] and len(rig.table) == 0


def test_a_gap_fails_the_sequence_and_no_other() -> None:
    """An engine that loses a token breaks that sequence; the rest of the frame counts."""
    rig = Rig()
    rig.table.engine_up()
    rig.add("a", key=None)
    rig.add("b", key=None)
    rig.say(output("a", 3, 5), output("b", 0, 6))
    assert rig.owner.outputs == [("a", [], "error"), ("b", [6], None)]
    assert Cancel("a") in rig.engine.sent


def test_a_new_engine_gets_what_was_said_so_far() -> None:
    """Resubmission carries all received tokens; held sequences wait; cancelled ones end."""
    rig = Rig()
    rig.table.engine_up()
    rig.add("a", key=None)
    held = rig.add("h", key=None)
    cancelled = rig.add("c", key=None)
    rig.say(output("a", 0, 5, 6), output("h", 0, 7), output("c", 0, 8))
    rig.table.park(held)
    rig.table.cancel(cancelled)
    rig.owner.outputs.clear()
    rig.table.engine_down()
    assert rig.owner.outputs == [("c", [], "cancelled")]
    rig.engine.sent.clear()
    rig.table.engine_up()
    [again] = rig.engine.sent
    assert isinstance(again, Submit) and again.output_ids == pack_ids([5, 6])
    rig.table.unpark(held)
    assert rig.engine.submitted() == ["a", "h"]


def test_parking_and_unparking_reach_the_engine_once() -> None:
    """Asking twice changes nothing; what is parked by storage is unparked by it."""
    rig = Rig()
    rig.table.engine_up()
    stored, unstored = rig.add("a"), rig.add("b", key=None)
    rig.table.park(unstored)
    rig.table.park(unstored)
    rig.table.storage(False)
    assert rig.engine.sent[2:] == [Park("b"), Park("a")]
    late = rig.add("late")
    assert rig.engine.submitted() == ["a", "b"]
    rig.table.park(stored)
    rig.table.storage(True)
    assert rig.engine.submitted() == ["a", "b", "late"] and not late.held
    rig.table.unpark(stored)
    rig.table.unpark(unstored)
    rig.table.unpark(unstored)
    assert [m for m in rig.engine.sent if isinstance(m, Unpark)] == [Unpark("a"), Unpark("b")]


def test_what_need_not_be_stored_parks_as_asked_while_storage_is_away() -> None:
    """Storage parks only what it has to store; the others still park and go on when asked."""
    rig = Rig()
    rig.table.engine_up()
    unstored = rig.add("a", key=None)
    rig.table.storage(False)
    rig.table.park(unstored)
    rig.table.unpark(unstored)
    assert rig.engine.sent[1:] == [Park("a"), Unpark("a")]


def test_the_engine_is_not_read_while_the_journal_is_behind() -> None:
    """Unstored frames are bounded: above the mark reading stops, below the lower one it goes on."""
    rig = Rig()
    rig.table.engine_up()
    rig.add("a")
    for i in range(MAX_UNSTORED_FRAMES + 1):
        assert rig.engine.is_read
        rig.say(output("a", i, i))
    assert not rig.engine.is_read
    while len(rig.journal.waiting) > MIN_UNSTORED_FRAMES:
        rig.journal.answer()
        assert not rig.engine.is_read
    rig.journal.answer()
    assert rig.engine.is_read


def test_owners_hear_of_tokens_that_cannot_be_stored() -> None:
    """A write that fails for good is not delivered as tokens."""
    rig = Rig()
    rig.table.engine_up()
    rig.add("a")
    rig.say(output("a", 0, 5))
    error = RuntimeError("no")
    rig.journal.answer(error)
    assert rig.owner.errors == [error] and rig.owner.outputs == []


def test_blame_falls_on_the_sequence_on_probation() -> None:
    """After a death the silent ones run one at a time, and only the one under trial is blamed."""
    rig = Rig()
    names = ["good", "bad", "other"]
    for name in names:
        rig.add(name, key=None)
    rig.table.engine_up()
    assert rig.engine.submitted() == names
    deaths = 0
    while "bad" not in [name for name, _, finish in rig.owner.outputs if finish == "error"]:
        rig.table.engine_down()
        deaths += 1
        rig.engine.sent.clear()
        rig.table.engine_up()
        position = {"good": 0, "other": 0} | {
            name: sum(len(ids) for who, ids, _ in rig.owner.outputs if who == name)
            for name in ("good", "other")
        }
        while "bad" not in rig.engine.submitted() and len(rig.table) == 3:
            name = rig.engine.submitted()[-1]
            rig.say(output(name, position[name], 1))
            position[name] += 1
        assert deaths < 10
    assert deaths <= MAX_STRIKES + 1
    assert [finish for name, _, finish in rig.owner.outputs if name != "bad" and finish] == []


def test_a_parked_suspect_holds_up_nobody() -> None:
    """Whoever waits behind the sequence on trial gets its turn when that one is parked."""
    rig = Rig()
    suspect = rig.add("a", key=None)
    rig.add("b", key=None)
    rig.table.engine_up()
    rig.table.engine_down()
    rig.engine.sent.clear()
    rig.table.engine_up()
    assert rig.engine.submitted() == ["a"]
    rig.table.park(suspect)
    assert rig.engine.submitted() == ["a", "b"]


def test_an_innocent_that_speaks_between_deaths_is_never_blamed() -> None:
    """Strikes count only deaths before a word was said."""
    rig = Rig()
    rig.add("a", key=None)
    for i in range(3 * MAX_STRIKES):
        rig.table.engine_up()
        rig.say(output("a", i, 1))
        rig.table.engine_down()
    assert all(finish is None for _, _, finish in rig.owner.outputs)


@pytest.mark.parametrize("engine_is_up", [True, False])
def test_cancel_before_and_after_submission(engine_is_up: bool) -> None:
    """With an engine its finish is awaited, without one the sequence ends at once; never twice."""
    rig = Rig()
    if engine_is_up:
        rig.table.engine_up()
    sequence = rig.add("a", key=None)
    rig.table.cancel(sequence, keep_tokens=1)
    rig.table.cancel(sequence)
    if engine_is_up:
        assert rig.engine.sent[1:] == [Cancel("a", 1)] and rig.owner.outputs == []
        rig.say(output("a", 0, finish="cancelled"))
    assert rig.owner.outputs == [("a", [], "cancelled")]
    rig.table.cancel(sequence)
    assert len(rig.owner.outputs) == 1 and len(rig.table) == 0


def test_a_closed_table_takes_nothing_more() -> None:
    """After the close frames are neither stored nor delivered."""
    rig = Rig()
    rig.table.engine_up()
    rig.add("a")
    rig.table.close()
    rig.say(output("a", 0, 5))
    assert not rig.journal.waiting and rig.owner.outputs == []
