"""The journal: what must outlive the server, written by one thread in batches.

Writes are queued in order; the writer thread takes what has gathered, commits it as one
transaction and wakes the event loop once. So 256 streams cost one commit a step, and whoever
waits for a write knows that everything queued before it is stored too. Reads run on another
thread and connection.

*Epochs.* `claim` starts a new activation of a conversation; writes queued later with an older
epoch are dropped (`Fenced`). The directory lock keeps a second server away, so epochs need not
be stored.

*When the disk is full.* A write that fails for want of space puts the journal in the state
`unavailable`: reserved space is given back to the file system, tokens and finishes that are on
their way are retried until they are stored, new turns are refused. The loop hears of both
changes of state.
"""

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from hillstar.server import reads
from hillstar.server.config import Durability
from hillstar.server.records import Fence, Write
from hillstar.server.schema import (
    DirectoryLock,
    checkpoint,
    open_checkpointer,
    open_reader,
    open_writer,
)
from hillstar.server.writer import Barrier, Batch, Claim, Done, Queued, Release, Writer

CHECKPOINT_RETRY_S = 1.0
MAX_SLICE_S = 0.005  # of the loop's time before other callbacks have theirs

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Journal:
    """Owner of the journal's files. Methods are called on the event loop that opened it."""

    def __init__(self, data_dir: Path, *, durability: Durability = "process") -> None:
        """Lock the directory, open or create the journal. Raises ConfigError."""
        self._lock = DirectoryLock(data_dir)
        self._path = data_dir / "journal.sqlite3"
        self._reserve = data_dir / "reserved"
        try:
            self._db = open_writer(self._path, durability)
        except BaseException:
            self._lock.release()
            raise
        self._reader_db = open_reader(self._path)
        self._checkpoint_db = open_checkpointer(self._path)
        self._next_key = reads.next_key(self._reader_db)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="journal-read")
        self._checkpointer = ThreadPoolExecutor(1, thread_name_prefix="journal-checkpoint")
        self._queue: queue.SimpleQueue[Queued | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._on_storage: Callable[[bool], None] = lambda available: None
        self._writer = Writer(self._db, self._queue, self._reserve, self._report)
        self._thread = threading.Thread(target=self._writer.run, name="journal-write", daemon=True)
        self._answers: deque[tuple[Done, Exception | None]] = deque()  # due, in order
        self._rests = False  # other callbacks have their turn before the rest of the answers
        self._checkpoint_again: asyncio.TimerHandle | None = None
        self.failed = asyncio.Event()  # nothing is stored any more: the server has to end
        self.available = True
        self.num_pending = 0  # writes queued and not yet answered
        self.num_commits = 0
        self.num_tokens = 0

    def start(self, on_storage: Callable[[bool], None]) -> None:
        """Begin to write. `on_storage(available)` is called on the loop at each change."""
        self._on_storage = on_storage
        self._thread.start()

    async def close(self) -> None:
        """Store what is queued (what cannot be stored now is given up) and close the files."""
        self._closed = True
        if self._checkpoint_again is not None:
            self._checkpoint_again.cancel()
        self._queue.put(None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
            while self._answers:
                self._give_answers()
        await asyncio.to_thread(self._reader.shutdown)
        await asyncio.to_thread(self._checkpointer.shutdown)
        for db in (self._checkpoint_db, self._reader_db, self._db):
            db.close()
        self._lock.release()

    def new_key(self) -> int:
        """The next turn's key."""
        key = self._next_key
        self._next_key += 1
        return key

    def claim(self, fence: Fence) -> None:
        """From here on in the queue, refuse the conversation's older epochs."""
        self._put(Claim(holder=fence), _ignore)

    def release(self, fence: Fence) -> None:
        """The activation is over; forget its fence (unless a newer one has claimed)."""
        self._put(Release(holder=fence), _ignore)

    def write(self, write: Write, done: Done) -> None:
        """Queue a write. `done(None)` is called on the loop once it is stored, in queue order.

        `done(error)`: it is not stored and will not be: `Fenced`, ApiError storage_unavailable,
        or the sqlite3.Error of a write that contradicts the journal.
        """
        self._put(write, done)

    async def stored(self, write: Write) -> None:
        """Queue a write and wait for it. Raises what `write` would answer."""
        future: asyncio.Future[None] = self._loop.create_future()

        def done(error: Exception | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self._put(write, done)
        await future

    async def flushed(self) -> None:
        """Wait until everything queued before is answered."""
        await self.stored(Barrier())

    async def read(
        self,
        query: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run a query on the reader thread; it sees every write that was answered before."""

        def snapshot() -> T:
            self._reader_db.execute("BEGIN")
            try:
                return query(self._reader_db, *args, **kwargs)
            finally:
                self._reader_db.execute("COMMIT")

        return await self._loop.run_in_executor(self._reader, snapshot)

    def _put(self, write: Write, done: Done) -> None:
        self.num_pending += 1
        self._queue.put((write, done))

    def _report(self, batch: Batch) -> None:
        """On the writer thread: hand a batch's outcome to the loop."""
        # A loop that has ended has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._answer, batch)

    def _answer(self, batch: Batch) -> None:
        if batch.available != self.available:
            self.available = batch.available
            self._on_storage(batch.available)
        self.num_commits += batch.num_commits
        self.num_tokens += batch.num_tokens
        if batch.failed:
            self.failed.set()
        if batch.checkpoint:
            self._checkpoint()
        self._answers += batch.outcomes
        if not self._rests:
            self._give_answers()

    def _checkpoint(self) -> None:
        if self._checkpoint_again is not None:
            self._checkpoint_again.cancel()
            self._checkpoint_again = None
        if not self._closed:
            work = self._loop.run_in_executor(self._checkpointer, checkpoint, self._checkpoint_db)
            work.add_done_callback(self._checkpoint_ended)

    def _checkpoint_ended(self, work: asyncio.Future[bool]) -> None:
        """Erased content must not stay in the log: try until it was emptied."""
        error = work.exception()
        if error is None and work.result():
            return
        log.warning("the journal's log could not be emptied (%s)", error or "it is being read")
        if not self._closed and self._checkpoint_again is None:
            self._checkpoint_again = self._loop.call_later(CHECKPOINT_RETRY_S, self._checkpoint)

    def _give_answers(self) -> None:
        """Call what waits for its outcome, resting when that takes long."""
        self._rests = False
        deadline = self._loop.time() + MAX_SLICE_S
        while self._answers:
            done, error = self._answers.popleft()
            self.num_pending -= 1
            done(error)
            if self._answers and self._loop.time() >= deadline:
                self._rests = True
                self._loop.call_soon(self._give_answers)
                return


def _ignore(error: Exception | None) -> None:
    """Claims and releases change nothing that could fail."""
