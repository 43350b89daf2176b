"""The journal's writer thread: batches, fences, and what happens when the disk is full."""

import contextlib
import logging
import queue
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from hillstar.server.errors import storage_unavailable
from hillstar.server.records import AppendTokens, EraseTurns, Fence, Write
from hillstar.server.schema import reserve_space
from hillstar.server.steps import compact

MAX_BATCH = 512  # writes in one transaction
CHECKPOINT_BYTES = 8 << 20  # of log
RETRY_S = 0.5  # between attempts while storage is unavailable

log = logging.getLogger(__name__)

Done = Callable[[Exception | None], None]


class Fenced(Exception):
    """A write of an activation that a newer one has replaced. Nothing was stored."""


@dataclass(frozen=True, slots=True)
class Barrier:
    """Changes nothing; its answer says that what was queued before has been answered."""

    survives: ClassVar[bool] = True

    @property
    def fence(self) -> Fence | None:
        return None

    @property
    def size_bytes(self) -> int:
        return 0

    def apply(self, db: sqlite3.Connection) -> None:
        """Nothing to do."""


@dataclass(frozen=True, slots=True)
class Claim(Barrier):
    """From here on refuse older epochs of the conversation."""

    holder: Fence = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Release(Barrier):
    """The holder has ended: forget its fence if it is still the holder."""

    holder: Fence = field(kw_only=True)


Queued = tuple[Write, Done]


@dataclass(slots=True)
class Batch:
    """What became of some writes, for the loop."""

    outcomes: list[tuple[Done, Exception | None]]
    available: bool
    num_commits: int = 0
    num_tokens: int = 0
    checkpoint: bool = False  # the log has grown enough, or holds erased content
    failed: bool = False  # the writer is broken: nothing is stored any more


class Writer:
    """Runs on its own thread, the only one that touches the writing connection and the fences."""

    def __init__(
        self,
        db: sqlite3.Connection,
        writes: "queue.SimpleQueue[Queued | None]",
        reserve: Path,
        report: Callable[[Batch], None],
    ) -> None:
        """`None` in the queue: close, after what came before it. `report` crosses to the loop."""
        self._db = db
        self._writes = writes
        self._reserve = reserve
        self._report = report
        self._fences: dict[str, int] = {}
        self._stuck: list[Queued] = []  # accepted and not stored yet
        self._log_bytes = 0
        self._available = True

    def run(self) -> None:
        """Write until told to close; a broken writer refuses everything instead."""
        try:
            self._write()
        except Exception:  # the boundary of the thread
            log.critical("the journal's writer failed; nothing is stored any more", exc_info=True)
            self._refuse_all()

    def _write(self) -> None:
        self._available = reserve_space(self._reserve)
        last = False
        while not last:
            queued, last = self._gather()
            if queued or self._stuck or not self._available:
                self._store(queued)
        if self._stuck:
            lost = storage_unavailable("The server closed before this could be stored.")
            self._report(Batch([(done, lost) for _, done in self._stuck], self._available))

    def _gather(self) -> tuple[list[Queued], bool]:
        """Wait for a write, then take what has gathered behind it. True: the last batch."""
        queued: list[Queued] = []
        try:
            item = self._writes.get(timeout=None if self._available else RETRY_S)
            while item is not None:
                queued.append(item)
                if len(queued) == MAX_BATCH:
                    return queued, False
                item = self._writes.get_nowait()
        except queue.Empty:
            return queued, False
        return queued, True

    def _store(self, queued: list[Queued]) -> None:
        """Commit what waits and what is new, in order; report what became of it."""
        batch = Batch([], self._available)
        for write, done in queued:
            if self._passes_fence(write):
                self._stuck.append((write, done))
            else:
                batch.outcomes.append((done, Fenced()))
            batch.checkpoint |= isinstance(write, EraseTurns)
        if not self._available and not self._recover():
            self._refuse(batch)
        try:
            self._commit_parts(batch)
        except sqlite3.OperationalError as error:
            # The disk is full or fails: nothing was stored. The reserve may help at once.
            self._suspend(error)
            self._refuse(batch)
            with contextlib.suppress(sqlite3.OperationalError):
                self._commit_parts(batch)
        if self._log_bytes >= CHECKPOINT_BYTES:
            batch.checkpoint = True
        if batch.checkpoint:
            self._log_bytes = 0
        batch.available = self._available
        self._report(batch)

    def _commit_parts(self, batch: Batch) -> None:
        """Commit all that waits, or one by one if one of them contradicts the journal.

        Raises sqlite3.OperationalError; what is not stored then keeps waiting.
        """
        try:
            self._commit(self._stuck, batch)
        except sqlite3.OperationalError:
            raise
        except Exception:  # the boundary of a write; which one is it?
            while self._stuck:
                try:
                    self._commit(self._stuck[:1], batch)
                except sqlite3.OperationalError:
                    raise
                except Exception as error:
                    if not isinstance(error, sqlite3.Error):
                        log.exception("a write to the journal failed")
                    batch.outcomes.append((self._stuck[0][1], error))
                del self._stuck[0]
        self._stuck = []

    def _commit(self, queued: list[Queued], batch: Batch) -> None:
        """One transaction, and its account in `batch`. A full log's tail is sorted by turn."""
        num_bytes = sum(write.size_bytes for write, _ in queued)
        if not all(isinstance(write, Barrier) for write, _ in queued):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for write, _ in queued:
                    write.apply(self._db)
                if self._log_bytes + num_bytes >= CHECKPOINT_BYTES:
                    compact(self._db)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            batch.num_commits += 1
            self._log_bytes += num_bytes
        for write, done in queued:
            batch.outcomes.append((done, None))
            if isinstance(write, AppendTokens):
                batch.num_tokens += write.num_tokens

    def _passes_fence(self, write: Write) -> bool:
        """Apply claims and releases; drop token rows, or whole writes, of older epochs."""
        fences = self._fences
        if isinstance(write, AppendTokens):
            write.rows[:] = [row for row in write.rows if fences.get(row[0], 0) <= row[1]]
        elif isinstance(write, Claim):
            holder = write.holder
            fences[holder.conversation_id] = max(
                holder.epoch, fences.get(holder.conversation_id, 0)
            )
        elif isinstance(write, Release):
            if fences.get(write.holder.conversation_id) == write.holder.epoch:
                del fences[write.holder.conversation_id]
        elif write.fence is not None:
            return fences.get(write.fence.conversation_id, 0) <= write.fence.epoch
        return True

    def _refuse_all(self) -> None:
        """Leave nobody waiting until the journal is closed."""
        self._available = False
        refusal = storage_unavailable("The server cannot store responses any more.")
        queued, last = self._stuck, False
        while True:
            outcomes: list[tuple[Done, Exception | None]] = [(done, refusal) for _, done in queued]
            self._report(Batch(outcomes, self._available, failed=True))
            if last:
                return
            queued, last = self._gather()

    def _suspend(self, error: sqlite3.Error) -> None:
        """Storage fails: give the reserved space back and say so (once)."""
        if self._available:
            log.error("the journal cannot append (%s); running responses park", error)
            self._available = False
            self._report(Batch([], False))
        self._give_back()

    def _give_back(self) -> None:
        """Free the reserved space; a file system that takes no writes may refuse that too."""
        with contextlib.suppress(OSError):
            self._reserve.unlink(missing_ok=True)

    def _recover(self) -> bool:
        """Storage works again when the reserved space can be had and a write goes through."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("CREATE TABLE probe (x)")
            self._db.execute("INSERT INTO probe VALUES (zeroblob(65536))")
            self._db.execute("DROP TABLE probe")
            self._db.execute("COMMIT")
        except sqlite3.Error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            return False
        if not reserve_space(self._reserve):
            self._give_back()
            return False
        log.info("the journal can append again")
        self._available = True
        return True

    def _refuse(self, batch: Batch) -> None:
        """Answer what must not wait for space; what survives keeps waiting."""
        refusal = storage_unavailable("The server cannot store responses at the moment.")
        batch.outcomes += [(done, refusal) for write, done in self._stuck if not write.survives]
        self._stuck = [(write, done) for write, done in self._stuck if write.survives]
