"""The journal's files: the directory lock, the schema, the connections, the reserved space.

conversations   one row each
responses       one row a turn; `finish` is NULL while it is open. A turn's context is the
                first `base_tokens` ids of its parent's context and output, then `prompt_ids`.
erased          turns erased since the start, and what each had come after
steps           the output of open turns as it comes, a row for each step of the engine
tokens          the same once it was sorted by turn; moved into `responses` at the finish
"""

import fcntl
import os
import sqlite3
from pathlib import Path

from hillstar.engine.config import ConfigError
from hillstar.server.config import Durability
from hillstar.server.erased import forget_all
from hillstar.server.steps import compact

SCHEMA_VERSION = 3
RESERVED_BYTES = 8 << 20  # given back to the file system when it is full

_SCHEMA = """
CREATE TABLE conversations (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    parent_id TEXT,
    created_at REAL NOT NULL,
    metadata BLOB NOT NULL,
    items BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE responses (
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    conversation_id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    parent_id TEXT,
    client_key TEXT UNIQUE,
    created_at REAL NOT NULL,
    request BLOB NOT NULL,
    seed INTEGER NOT NULL,
    base_tokens INTEGER NOT NULL,
    prompt_ids BLOB,
    output_ids BLOB,
    logprobs BLOB,
    in_history INTEGER NOT NULL DEFAULT 0,
    finish BLOB
);
CREATE INDEX responses_of_conversation ON responses (conversation_id, key);
CREATE INDEX responses_of_parent ON responses (parent_id) WHERE parent_id IS NOT NULL;
CREATE INDEX forks ON conversations (parent_id) WHERE parent_id IS NOT NULL;
CREATE INDEX open_responses ON responses (key) WHERE finish IS NULL;
CREATE TABLE erased (
    id TEXT PRIMARY KEY,
    parent_id TEXT
) WITHOUT ROWID;
CREATE TABLE steps (
    id INTEGER PRIMARY KEY,
    rows BLOB NOT NULL
);
CREATE TABLE tokens (
    key INTEGER NOT NULL,
    first_token INTEGER NOT NULL,
    ids BLOB NOT NULL,
    logprobs BLOB,
    finish BLOB,
    PRIMARY KEY (key, first_token)
) WITHOUT ROWID;
"""


class DirectoryLock:
    """Exclusive use of a data directory, for as long as the process lives or until `release`."""

    def __init__(self, data_dir: Path) -> None:
        """Raises ConfigError when another server holds the directory, or it is not writable."""
        self._fd = -1
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ConfigError(
                "data_dir", str(data_dir), "a directory that no other running server uses"
            ) from None
        except OSError as error:
            self.release()
            raise ConfigError(
                "data_dir", str(data_dir), f"a writable directory ({error.strerror})"
            ) from error

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_writer(path: Path, durability: Durability) -> sqlite3.Connection:
    """The writing connection; creates the schema. Raises ConfigError for a foreign version.

    `process`: no fsync, the kernel keeps what was written when the process dies. `power`: every
    commit is synced. Checkpoints happen elsewhere, off the append path.
    """
    db = _connect(path)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'OFF'}")
    db.execute("PRAGMA wal_autocheckpoint = 0")
    db.execute("PRAGMA secure_delete = ON")
    db.execute("PRAGMA cache_size = -16384")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
    elif version != SCHEMA_VERSION:
        db.close()
        raise ConfigError(
            "data_dir",
            str(path.parent),
            f"a journal of version {SCHEMA_VERSION} (this one is {version})",
        )
    else:
        _tidy(db)
    return db


def open_reader(path: Path) -> sqlite3.Connection:
    db = _connect(path)
    db.execute("PRAGMA query_only = ON")
    return db


def open_checkpointer(path: Path) -> sqlite3.Connection:
    return _connect(path)


def checkpoint(db: sqlite3.Connection) -> bool:
    """Move the write-ahead log into the main file and empty it. False: readers were in the way.

    The first, passive run does the work beside the writer; the second then holds the writer up
    only for what came in meanwhile. Emptying is also what erases deleted content from the log.
    Raises sqlite3.Error.
    """
    db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    is_busy, _, _ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not is_busy


def reserve_space(path: Path) -> bool:
    """Make sure RESERVED_BYTES lie ready in a file that may be given back; False: disk full."""
    try:
        with path.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVED_BYTES)
    except OSError:
        return False
    return True


def _tidy(db: sqlite3.Connection) -> None:
    """Sort the last server's tail by turn; on a full disk it is read as it is."""
    db.execute("BEGIN IMMEDIATE")
    try:
        forget_all(db)
        compact(db)
        db.execute("COMMIT")
    except sqlite3.OperationalError:
        if db.in_transaction:
            db.execute("ROLLBACK")


def _connect(path: Path) -> sqlite3.Connection:
    """Transactions are explicit; each connection is used by one thread at a time."""
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
