"""The journal's rows as values, and the writes that change them.

`request`, the finishes, `metadata`, `items` and `logprobs` are opaque bytes here: the session layer
encodes them. A write runs on the journal's writer thread, inside a transaction.
"""

import sqlite3
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from hillstar.server import erased, steps

NOT_STORED = -1
"""`base_tokens` of a stored turn upon an unstored one: its prompt lives in memory only."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Who writes: one activation of a conversation's actor. Older epochs are refused."""

    conversation_id: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRow:
    id: str
    tenant: str
    created_at: float  # seconds since 1970
    metadata: bytes  # msgpack: a map of strings
    items: bytes  # msgpack: the messages it began with
    parent_id: str | None = None  # the response it was forked from


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """One response. Its context: the parent's first `base_tokens` ids, then `prompt_ids`."""

    key: int  # rises in the order of opening
    id: str
    conversation_id: str
    tenant: str
    created_at: float
    request: bytes
    seed: int
    parent_id: str | None = None
    client_key: str | None = None
    base_tokens: int = 0  # NOT_STORED: the prompt holds what must not be stored
    prompt_ids: bytes | None = None  # None: not built yet, forgotten, or not stored
    output_ids: bytes = b""
    logprobs: tuple[bytes, ...] = ()  # chunks in the order of the tokens; () where not asked for
    engine_finish: bytes | None = None  # came with the last tokens of a turn that is open yet
    in_history: bool = False  # later turns of the conversation build on it
    finish: bytes | None = None  # None: still open


class Write(Protocol):
    """One change. `fence` None: not an actor's. `survives`: retried when storage is full."""

    survives: ClassVar[bool]

    @property
    def fence(self) -> Fence | None: ...
    @property
    def size_bytes(self) -> int:
        """About how much it adds to the log."""
        ...

    def apply(self, db: sqlite3.Connection) -> None: ...


@dataclass(frozen=True, slots=True)
class OpenConversation:
    row: ConversationRow
    survives: ClassVar[bool] = False

    @property
    def fence(self) -> Fence | None:
        return None

    @property
    def size_bytes(self) -> int:
        return 256 + len(self.row.items) + len(self.row.metadata)

    def apply(self, db: sqlite3.Connection) -> None:
        row = self.row
        db.execute(
            "INSERT OR IGNORE INTO conversations VALUES (?, ?, ?, ?, ?, ?)",
            (
                row.id,
                row.tenant,
                erased.standing(db, row.parent_id),
                row.created_at,
                row.metadata,
                row.items,
            ),
        )


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """A response begins; with `conversation`, so does its conversation unless it is there."""

    fence: Fence
    row: TurnRow
    conversation: ConversationRow | None = None
    survives: ClassVar[bool] = False

    @property
    def size_bytes(self) -> int:
        return 512 + len(self.row.request) + len(self.row.prompt_ids or b"")

    def apply(self, db: sqlite3.Connection) -> None:
        if self.conversation is not None:
            OpenConversation(self.conversation).apply(db)
        row = _after_erasures(db, self.row)
        db.execute(
            "INSERT INTO responses (key, id, conversation_id, tenant, parent_id, client_key,"
            " created_at, request, seed, base_tokens, prompt_ids)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                row.key,
                row.id,
                row.conversation_id,
                row.tenant,
                row.parent_id,
                row.client_key,
                row.created_at,
                row.request,
                row.seed,
                row.base_tokens,
                row.prompt_ids,
            ),
        )


@dataclass(frozen=True, slots=True)
class PlacePrompt:
    """A turn that was queued has its turn: its parent and its ids are known now."""

    fence: Fence
    row: TurnRow
    survives: ClassVar[bool] = True

    @property
    def size_bytes(self) -> int:
        return 64 + len(self.row.request) + len(self.row.prompt_ids or b"")

    def apply(self, db: sqlite3.Connection) -> None:
        row = _after_erasures(db, self.row)
        db.execute(
            "UPDATE responses SET parent_id = ?, request = ?, base_tokens = ?, prompt_ids = ?"
            " WHERE key = ?",
            (row.parent_id, row.request, row.base_tokens, row.prompt_ids, row.key),
        )


@dataclass(frozen=True, slots=True)
class FinishTurn:
    """A response has ended: its tokens become one blob, cut to what belongs to it."""

    fence: Fence
    key: int
    output_ids: bytes
    logprobs: bytes | None
    in_history: bool
    finish: bytes
    survives: ClassVar[bool] = True

    @property
    def size_bytes(self) -> int:
        return 128 + len(self.output_ids) + len(self.logprobs or b"") + len(self.finish)

    def apply(self, db: sqlite3.Connection) -> None:
        db.execute(
            "UPDATE responses SET output_ids = ?, logprobs = ?, in_history = ?, finish = ?"
            " WHERE key = ?",
            (self.output_ids, self.logprobs, self.in_history, self.finish, self.key),
        )
        db.execute("DELETE FROM tokens WHERE key = ?", (self.key,))


@dataclass(frozen=True, slots=True)
class EraseTurns:
    """Forget some responses, or a whole conversation.

    Later turns hold the erased ones' ids in their context: their prompts are forgotten too and
    rendered afresh from what remains if they are ever continued. So are those of turns that are
    on their way to storage meanwhile.
    """

    response_ids: tuple[str, ...]
    conversation_id: str | None = None
    survives: ClassVar[bool] = False

    @property
    def fence(self) -> Fence | None:
        return None

    @property
    def size_bytes(self) -> int:
        return 4096

    def apply(self, db: sqlite3.Connection) -> None:
        steps.compact(db)  # an erased turn's tokens must not stay among others'
        ids = list(self.response_ids)
        if self.conversation_id is not None:
            rows = db.execute(
                "SELECT id FROM responses WHERE conversation_id = ?", (self.conversation_id,)
            )
            ids += [row[0] for row in rows]
            db.execute("DELETE FROM conversations WHERE id = ?", (self.conversation_id,))
        for response_id in ids:
            self._erase(db, response_id)

    def _erase(self, db: sqlite3.Connection, response_id: str) -> None:
        row = db.execute(
            "SELECT key, parent_id FROM responses WHERE id = ?", (response_id,)
        ).fetchone()
        if row is None:
            return
        db.execute(
            "WITH RECURSIVE later(id) AS (SELECT id FROM responses WHERE parent_id = :id"
            " UNION SELECT r.id FROM responses r JOIN later ON r.parent_id = later.id)"
            " UPDATE responses SET base_tokens = min(base_tokens, 0), prompt_ids = NULL"
            " WHERE id IN (SELECT id FROM later)",
            {"id": response_id},
        )
        key, parent_id = row
        for table in ("responses", "conversations"):
            db.execute(
                f"UPDATE {table} SET parent_id = ? WHERE parent_id = ?", (parent_id, response_id)
            )
        db.execute("DELETE FROM tokens WHERE key = ?", (key,))
        db.execute("DELETE FROM responses WHERE key = ?", (key,))
        erased.remember(db, response_id, parent_id)


def _after_erasures(db: sqlite3.Connection, row: TurnRow) -> TurnRow:
    """The row as it would be if it had been stored before the erasures that overtook it.

    Whatever comes after a forgotten prompt is forgotten too: its base is no longer what it was.
    """
    if row.parent_id is None:
        return row
    parent_id = erased.standing(db, row.parent_id)
    if parent_id == row.parent_id:
        parent = db.execute(
            "SELECT prompt_ids IS NULL FROM responses WHERE id = ?", (parent_id,)
        ).fetchone()
        if parent is None or not parent[0]:  # None: kept in memory only
            return row
    return replace(row, parent_id=parent_id, base_tokens=min(row.base_tokens, 0), prompt_ids=None)


TokenRow = tuple[str, int, int, int, bytes, bytes | None, bytes | None]
"""New output: conversation id, epoch, turn key, first token, ids, logprobs, the engine's finish.

A plain tuple: 256 of them a step. The finish is stored with the last tokens, so that no restart
ever generates beyond an end that was reached.
"""


@dataclass(frozen=True, slots=True)
class AppendTokens:
    """One engine step's tokens, of all conversations at once; each row is fenced by itself."""

    rows: list[TokenRow]
    survives: ClassVar[bool] = True

    @property
    def fence(self) -> Fence | None:
        return None

    @property
    def size_bytes(self) -> int:
        return 64 * len(self.rows)

    @property
    def num_tokens(self) -> int:
        return sum([len(row[4]) for row in self.rows]) // 4

    def apply(self, db: sqlite3.Connection) -> None:
        steps.append(db, [row[2:] for row in self.rows])
