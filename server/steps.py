"""The journal's tail: what one engine step said, of all its responses, is one row.

A row for each response and step would touch a page of the file for each of them, 4 KiB of log for
a token of 4 bytes. Appended together they share a page. Once much has gathered (and before
anything is erased, and when the journal is opened) `compact` moves it to where it is found by
turn: the table `tokens`, which then gets one row for hundreds of steps of a response.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

StepRow = tuple[int, int, bytes, bytes | None, bytes | None]
"""New output of a turn: its key, first token, ids, logprobs, the engine's finish."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[StepRow]).decode


def append(db: sqlite3.Connection, rows: Sequence[StepRow]) -> None:
    """Store what came of one step."""
    if rows:
        db.execute("INSERT INTO steps (rows) VALUES (?)", (_encode(rows),))


def output_of(db: sqlite3.Connection, key: int) -> list[tuple[bytes, bytes | None, bytes | None]]:
    """An open turn's ids, logprobs and engine's finish, piece by piece in their order."""
    sorted_by_turn = db.execute(
        "SELECT ids, logprobs, finish FROM tokens WHERE key = ? ORDER BY first_token", (key,)
    ).fetchall()
    tail = [row[2:] for row in _rows(db) if row[0] == key]
    return [*sorted_by_turn, *tail]


def compact(db: sqlite3.Connection) -> None:
    """Move the tail into `tokens`, inside the caller's transaction; of ended turns nothing."""
    opened = {row[0] for row in db.execute("SELECT key FROM responses WHERE finish IS NULL")}
    merged: dict[int, list[list[Any]]] = {}
    for key, first, ids, logprobs, finish in _rows(db):
        if key not in opened:
            continue
        pieces = merged.setdefault(key, [])
        if pieces and pieces[-1][3] is None and logprobs is None:
            pieces[-1][2] += ids
            pieces[-1][4] = finish
        else:
            pieces.append([key, first, bytearray(ids), logprobs, finish])
    db.executemany(
        "INSERT OR REPLACE INTO tokens VALUES (?, ?, ?, ?, ?)",
        [piece for pieces in merged.values() for piece in pieces],
    )
    db.execute("DELETE FROM steps")


def _rows(db: sqlite3.Connection) -> Iterator[StepRow]:
    for (step,) in db.execute("SELECT rows FROM steps ORDER BY id"):
        yield from _decode(step)
