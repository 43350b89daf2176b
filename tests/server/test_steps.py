"""The journal's tail: read as it was appended, before and after it was sorted by turn."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hillstar.engine.messages import pack_ids
from hillstar.server import writer
from hillstar.server.journal import Journal
from hillstar.server.reads import load_turn
from hillstar.server.records import AppendTokens, ConversationRow, Fence, OpenTurn, TurnRow
from hillstar.server.schema import open_writer
from hillstar.server.steps import append, compact, output_of

FENCE = Fence("conv", 1)
CONVERSATION = ConversationRow(id="conv", tenant="t", created_at=0.0, metadata=b"", items=b"")


def turn(key: int) -> TurnRow:
    return TurnRow(
        key=key,
        id=f"resp_{key}",
        conversation_id="conv",
        tenant="t",
        created_at=0.0,
        request=b"",
        seed=0,
    )


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """A journal with the open turns 1 and 2."""
    with closing(open_writer(tmp_path / "journal", "process")) as db:
        OpenTurn(FENCE, turn(1), CONVERSATION).apply(db)
        OpenTurn(FENCE, turn(2)).apply(db)
        yield db


def count(db: sqlite3.Connection, table: str) -> int:
    return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def test_the_tail_joins_what_came_before_it(db: sqlite3.Connection) -> None:
    """What was sorted and what was appended since are one output, in order."""
    append(db, [(1, 0, b"aaaa", None, None), (2, 0, b"bbbb", None, None)])
    append(db, [(1, 1, b"cccc", None, None)])
    compact(db)
    append(db, [(2, 1, b"dddd", None, None), (1, 2, b"eeee", None, b"end")])
    assert output_of(db, 1) == [(b"aaaacccc", None, None), (b"eeee", None, b"end")]
    assert output_of(db, 2) == [(b"bbbb", None, None), (b"dddd", None, None)]


def test_sorting_gives_a_turn_one_row(db: sqlite3.Connection) -> None:
    """Hundreds of steps of two turns become two rows with the last one's finish."""
    for index in range(300):
        finish = b"end" if index == 299 else None
        ids = pack_ids([index])
        append(db, [(1, index, ids, None, finish), (2, index, ids, None, None)])
    compact(db)
    whole = pack_ids(range(300))
    assert (count(db, "steps"), count(db, "tokens")) == (0, 2)
    assert output_of(db, 1) == [(whole, None, b"end")]
    assert output_of(db, 2) == [(whole, None, None)]


def test_logprobs_stay_with_their_tokens(db: sqlite3.Connection) -> None:
    """Pieces with logprobs are kept apart: each has its own chunk."""
    pieces = [(b"aaaa", b"1", None), (b"bbbb", b"2", None), (b"cccc", None, b"end")]
    for index, (ids, logprobs, finish) in enumerate(pieces):
        append(db, [(1, index, ids, logprobs, finish)])
    compact(db)
    assert output_of(db, 1) == pieces


def test_nothing_is_kept_of_a_turn_that_ended(db: sqlite3.Connection) -> None:
    """An ended turn's output is in its own row; the tail's copy goes."""
    append(db, [(1, 0, b"aaaa", None, None), (2, 0, b"bbbb", None, None)])
    db.execute("UPDATE responses SET finish = x'00' WHERE key = 1")
    compact(db)
    assert (count(db, "steps"), output_of(db, 1)) == (0, [])
    assert output_of(db, 2) == [(b"bbbb", None, None)]


async def test_a_full_log_is_sorted_before_it_is_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tail never grows beyond what makes a checkpoint, and every token stays readable."""
    monkeypatch.setattr(writer, "CHECKPOINT_BYTES", 64 * 100)
    journal = Journal(tmp_path)
    journal.start(lambda available: None)
    await journal.stored(OpenTurn(FENCE, turn(1), CONVERSATION))
    most = 0
    for index in range(250):
        row = ("conv", 1, 1, index, pack_ids([index]), None, None)
        await journal.stored(AppendTokens([row]))
        most = max(most, await journal.read(count, "steps"))
    found = await journal.read(load_turn, "resp_1")
    await journal.close()
    assert most <= 100
    assert found is not None
    assert found.output_ids == pack_ids(range(250))
