"""What the journal can be asked. Each function runs on the reader thread, in one snapshot."""

import sqlite3
from dataclasses import dataclass
from typing import Any

from hillstar.server.erased import standing
from hillstar.server.records import ConversationRow, TurnRow
from hillstar.server.steps import output_of

_COLUMNS = (
    "r.key, r.id, r.conversation_id, r.tenant, r.created_at, r.request, r.seed, r.parent_id,"
    " r.client_key, r.base_tokens, r.prompt_ids, r.output_ids, r.logprobs, r.in_history, r.finish"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a response lives, and whose it is."""

    response_id: str
    conversation_id: str
    tenant: str


@dataclass(frozen=True, slots=True)
class ConversationState:
    """What an actor starts from: its row, its open turns in order, the end of its history."""

    row: ConversationRow
    open_turns: tuple[TurnRow, ...]
    last_id: str | None


def find_response(db: sqlite3.Connection, response_id: str) -> Place | None:
    row = db.execute(
        "SELECT id, conversation_id, tenant FROM responses WHERE id = ?", (response_id,)
    ).fetchone()
    return Place(*row) if row else None


def find_client_key(db: sqlite3.Connection, client_key: str) -> Place | None:
    """The response that a create with this idempotency key made."""
    row = db.execute(
        "SELECT id, conversation_id, tenant FROM responses WHERE client_key = ?", (client_key,)
    ).fetchone()
    return Place(*row) if row else None


def load_conversation_row(db: sqlite3.Connection, conversation_id: str) -> ConversationRow | None:
    row = db.execute(
        "SELECT id, tenant, created_at, metadata, items, parent_id FROM conversations WHERE id = ?",
        (conversation_id,),
    ).fetchone()
    if row is None:
        return None
    return ConversationRow(
        id=row[0],
        tenant=row[1],
        created_at=row[2],
        metadata=row[3],
        items=row[4],
        parent_id=row[5],
    )


def load_conversation(db: sqlite3.Connection, conversation_id: str) -> ConversationState | None:
    row = load_conversation_row(db, conversation_id)
    if row is None:
        return None
    opened = db.execute(
        f"SELECT {_COLUMNS} FROM responses r"
        " WHERE r.conversation_id = ? AND r.finish IS NULL ORDER BY r.key",
        (conversation_id,),
    ).fetchall()
    return ConversationState(
        row, tuple(_turn(db, r) for r in opened), last_in_history(db, conversation_id)
    )


def last_in_history(db: sqlite3.Connection, conversation_id: str) -> str | None:
    """The turn that the conversation continues from."""
    last = db.execute(
        "SELECT id FROM responses WHERE conversation_id = ? AND in_history = 1"
        " ORDER BY key DESC LIMIT 1",
        (conversation_id,),
    ).fetchone()
    return last[0] if last is not None else None


def load_turn(db: sqlite3.Connection, response_id: str) -> TurnRow | None:
    row = db.execute(f"SELECT {_COLUMNS} FROM responses r WHERE r.id = ?", (response_id,))
    found = row.fetchone()
    return _turn(db, found) if found else None


def load_chain(db: sqlite3.Connection, response_id: str) -> tuple[TurnRow, ...]:
    """The response and everything it builds on, oldest first; () if it is unknown.

    Of a response that was erased since the server's start: what it was built on.
    """
    rows = db.execute(
        "WITH RECURSIVE chain(id, depth) AS (SELECT ?, 0 UNION ALL"
        " SELECT r.parent_id, depth + 1 FROM chain JOIN responses r ON r.id = chain.id"
        " WHERE r.parent_id IS NOT NULL)"
        f" SELECT {_COLUMNS} FROM chain JOIN responses r ON r.id = chain.id ORDER BY depth DESC",
        (standing(db, response_id),),
    ).fetchall()
    return tuple(_turn(db, row) for row in rows)


def conversations_upon(db: sqlite3.Connection, response_id: str) -> tuple[str, ...]:
    """Its own conversation, and those that hold a turn built on it."""
    rows = db.execute(
        "WITH RECURSIVE later(id) AS (SELECT ? UNION"
        " SELECT r.id FROM responses r JOIN later ON r.parent_id = later.id)"
        " SELECT DISTINCT r.conversation_id FROM later JOIN responses r ON r.id = later.id",
        (response_id,),
    ).fetchall()
    return tuple(row[0] for row in rows)


def unfinished_conversations(db: sqlite3.Connection) -> tuple[str, ...]:
    """Conversations with open responses, in the order in which those were opened."""
    rows = db.execute(
        "SELECT conversation_id, min(key) AS first FROM responses WHERE finish IS NULL"
        " GROUP BY conversation_id ORDER BY first"
    ).fetchall()
    return tuple(row[0] for row in rows)


def next_key(db: sqlite3.Connection) -> int:
    """A turn key above every one in use."""
    row = db.execute("SELECT coalesce(max(key), 0) FROM responses").fetchone()
    return int(row[0]) + 1


def _turn(db: sqlite3.Connection, row: Any) -> TurnRow:
    key, logprobs, finish = row[0], row[12], row[14]
    output_ids = row[11] or b""
    chunks: tuple[bytes, ...] = (logprobs,) if logprobs is not None else ()
    engine_finish = None
    if finish is None:
        pieces = output_of(db, key)
        output_ids = b"".join(ids for ids, _, _ in pieces)
        chunks = tuple(chunk for _, chunk, _ in pieces if chunk is not None)
        engine_finish = pieces[-1][2] if pieces else None
    return TurnRow(
        key=key,
        id=row[1],
        conversation_id=row[2],
        tenant=row[3],
        created_at=row[4],
        request=row[5],
        seed=row[6],
        parent_id=row[7],
        client_key=row[8],
        base_tokens=row[9],
        prompt_ids=row[10],
        output_ids=output_ids,
        logprobs=chunks,
        engine_finish=engine_finish,
        in_history=bool(row[13]),
        finish=finish,
    )


def num_conversations(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT count(*) FROM conversations").fetchone()[0])
