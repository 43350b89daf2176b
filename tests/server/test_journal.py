"""The journal: what was answered is stored, in order, by its rightful writer, erased for good."""

import asyncio
import errno
import logging
import resource
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from hillstar.engine.config import ConfigError
from hillstar.engine.messages import pack_ids
from hillstar.server import journal as journal_module
from hillstar.server import reads, schema
from hillstar.server.errors import ApiError
from hillstar.server.journal import Journal
from hillstar.server.records import (
    AppendTokens,
    ConversationRow,
    EraseTurns,
    Fence,
    FinishTurn,
    OpenConversation,
    OpenTurn,
    PlacePrompt,
    TokenRow,
    TurnRow,
)
from hillstar.server.writer import Batch, Fenced, Writer
from support.wait import until

FENCE = Fence("conv_1", 1)
CONVERSATION = ConversationRow(
    id="conv_1", tenant="alice", created_at=1.5, metadata=b"\x80", items=b"\x90"
)


def turn(key: int = 1, **fields: object) -> TurnRow:
    known = {
        "key": key,
        "id": f"resp_{key}",
        "conversation_id": "conv_1",
        "tenant": "alice",
        "created_at": 2.5,
        "request": b"request",
        "seed": 9,
    }
    return TurnRow(**(known | fields))  # type: ignore[arg-type]


def tokens(
    key: int, first: int, *ids: int, epoch: int = 1, finish: bytes | None = None
) -> TokenRow:
    return ("conv_1", epoch, key, first, pack_ids(ids), None, finish)


def holds(data_dir: Path, data: bytes) -> bool:
    """Whether any file of the journal holds these bytes."""
    return any(data in file.read_bytes() for file in data_dir.iterdir())


@asynccontextmanager
async def opened(data_dir: Path, storage: list[bool] | None = None) -> AsyncIterator[Journal]:
    journal = Journal(data_dir)
    journal.start((storage if storage is not None else []).append)
    try:
        yield journal
    finally:
        await journal.close()


async def test_open_turns_come_back_with_their_tokens_after_a_restart(tmp_path: Path) -> None:
    """What was answered as stored is there when the directory is opened again."""
    async with opened(tmp_path) as journal:
        await journal.stored(
            OpenTurn(FENCE, turn(prompt_ids=pack_ids([1, 2]), client_key="k"), CONVERSATION)
        )
        await journal.stored(AppendTokens([tokens(1, 0, 10, 11)]))
        await journal.stored(AppendTokens([tokens(1, 2, 12, finish=b"end")]))
    async with opened(tmp_path) as journal:
        state = await journal.read(reads.load_conversation, "conv_1")
        assert state is not None and state.row == CONVERSATION and state.last_id is None
        [row] = state.open_turns
        assert row.output_ids == pack_ids([10, 11, 12])
        assert (row.engine_finish, row.prompt_ids) == (b"end", pack_ids([1, 2]))
        assert await journal.read(reads.unfinished_conversations) == ("conv_1",)
        place = await journal.read(reads.find_client_key, "k")
        assert place is not None and place.response_id == "resp_1"
        assert journal.new_key() == 2


async def test_a_finish_leaves_one_blob_cut_to_what_belongs_to_the_response(tmp_path: Path) -> None:
    """At the finish the tokens move into the response's row, without what came after its end."""
    async with opened(tmp_path) as journal:
        await journal.stored(OpenTurn(FENCE, turn(), CONVERSATION))
        await journal.stored(AppendTokens([tokens(1, 0, 10, 11, 12)]))
        await journal.stored(FinishTurn(FENCE, 1, pack_ids([10]), b"lp", True, b"finish"))
        row = await journal.read(reads.load_turn, "resp_1")
        assert row is not None
        assert (row.output_ids, row.logprobs, row.finish) == (pack_ids([10]), (b"lp",), b"finish")
        assert await journal.read(reads.last_in_history, "conv_1") == "resp_1"
        assert await journal.read(reads.unfinished_conversations) == ()
    with sqlite3.connect(tmp_path / "journal.sqlite3") as db:
        assert db.execute("SELECT count(*) FROM tokens").fetchone() == (0,)
    db.close()


async def test_a_queued_turn_gets_its_prompt_later(tmp_path: Path) -> None:
    """Parent, request and prompt of a queued turn are filled in when its time comes."""
    async with opened(tmp_path) as journal:
        await journal.stored(OpenTurn(FENCE, turn(), CONVERSATION))
        placed = turn(parent_id="resp_0", base_tokens=3, prompt_ids=pack_ids([4]), request=b"r2")
        await journal.stored(PlacePrompt(FENCE, placed))
        assert await journal.read(reads.load_turn, "resp_1") == placed


async def test_what_gathers_is_one_commit(tmp_path: Path) -> None:
    """Writes that are queued together are committed together and answered in order."""
    async with opened(tmp_path) as journal:
        await journal.stored(OpenTurn(FENCE, turn(), CONVERSATION))
        before = journal.num_commits
        answered: list[int] = []
        for i in range(50):
            journal.write(AppendTokens([tokens(1, i, i)]), lambda error, i=i: answered.append(i))
        await journal.flushed()
        assert answered == list(range(50))
        assert journal.num_commits - before <= 3
        assert (journal.num_tokens, journal.num_pending) == (50, 0)


async def test_writes_of_an_older_activation_are_refused(tmp_path: Path) -> None:
    """After a claim, an older epoch's writes are dropped, each token row by itself."""
    async with opened(tmp_path) as journal:
        await journal.stored(OpenTurn(FENCE, turn(), CONVERSATION))
        newer = Fence("conv_1", 2)
        journal.claim(newer)
        with pytest.raises(Fenced):
            await journal.stored(FinishTurn(FENCE, 1, b"", None, True, b"stale"))
        await journal.stored(AppendTokens([tokens(1, 0, 5), tokens(1, 0, 6, epoch=2)]))
        row = await journal.read(reads.load_turn, "resp_1")
        assert row is not None and row.output_ids == pack_ids([6]) and row.finish is None
        journal.release(FENCE)  # not the holder any more: changes nothing
        with pytest.raises(Fenced):
            await journal.stored(FinishTurn(FENCE, 1, b"", None, True, b"stale"))
        journal.release(newer)
        await journal.stored(FinishTurn(newer, 1, b"", None, True, b"done"))


async def test_one_contradictory_write_fails_alone(tmp_path: Path) -> None:
    """A write that contradicts the journal fails; those queued beside it are stored."""
    async with opened(tmp_path) as journal:
        await journal.stored(OpenTurn(FENCE, turn(), CONVERSATION))
        results = await asyncio.gather(
            journal.stored(OpenTurn(FENCE, turn(2))),
            journal.stored(OpenTurn(FENCE, turn(1))),
            journal.stored(OpenTurn(FENCE, turn(3))),
            return_exceptions=True,
        )
        assert results[0] is None and results[2] is None
        assert isinstance(results[1], sqlite3.IntegrityError)
        assert await journal.read(reads.find_response, "resp_3") is not None


class Defective(OpenTurn):
    """A write that fails in a way nobody foresaw."""

    def apply(self, db: sqlite3.Connection) -> None:
        super().apply(db)
        raise KeyError("a defect")


async def test_a_defective_write_fails_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception that is not SQLite's is its write's answer; the writer goes on."""
    caplog.set_level(logging.CRITICAL)
    async with opened(tmp_path) as journal:
        results = await asyncio.gather(
            journal.stored(OpenTurn(FENCE, turn(1), CONVERSATION)),
            journal.stored(Defective(FENCE, turn(2))),
            journal.stored(OpenTurn(FENCE, turn(3))),
            return_exceptions=True,
        )
        assert results[0] is None and results[2] is None
        assert isinstance(results[1], KeyError)
        assert await journal.read(reads.find_response, "resp_2") is None
        assert not journal.failed.is_set()


async def test_a_broken_writer_leaves_nobody_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the writer itself fails, it says so, refuses what comes, and the journal closes."""

    def broken(self: Writer, batch: Batch) -> None:
        raise KeyError("a defect")

    storage: list[bool] = []
    async with opened(tmp_path, storage) as journal:
        monkeypatch.setattr(Writer, "_commit_parts", broken)
        for key in (1, 2):
            with pytest.raises(ApiError) as refusal:
                await asyncio.wait_for(journal.stored(OpenTurn(FENCE, turn(key))), 20)
            assert refusal.value.code == "storage_unavailable"
        assert journal.failed.is_set() and storage == [False]
    assert [record.levelname for record in caplog.records] == ["CRITICAL"]


async def test_the_log_is_emptied_again_where_it_could_not_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a checkpoint that fails or is held up, erased content still leaves the log."""
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(journal_module, "CHECKPOINT_RETRY_S", 0.01)
    outcomes: list[bool | Exception] = [sqlite3.OperationalError("disk I/O error"), False]

    def checkpoint(db: sqlite3.Connection) -> bool:
        if outcomes:
            outcome = outcomes.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        return schema.checkpoint(db)

    monkeypatch.setattr(journal_module, "checkpoint", checkpoint)
    log = tmp_path / "journal.sqlite3-wal"
    async with opened(tmp_path) as journal:
        await journal.stored(OpenTurn(FENCE, turn(1, request=b"hush"), CONVERSATION))
        await journal.stored(EraseTurns(("resp_1",)))
        await until(lambda: log.stat().st_size == 0)
        assert outcomes == []
        assert not holds(tmp_path, b"hush")


async def test_a_log_that_is_being_read_is_not_emptied(tmp_path: Path) -> None:
    """A checkpoint says whether a reader kept it from emptying the log."""
    db = schema.open_writer(tmp_path / "j", "process")
    reader, other = schema.open_reader(tmp_path / "j"), schema.open_checkpointer(tmp_path / "j")
    try:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM responses").fetchall()
        OpenConversation(CONVERSATION).apply(db)
        other.execute("PRAGMA busy_timeout = 0")
        assert not schema.checkpoint(other)
        reader.execute("COMMIT")
        assert schema.checkpoint(other)
    finally:
        for connection in (reader, other, db):
            connection.close()


async def test_chains_come_oldest_first(tmp_path: Path) -> None:
    """A response's chain is everything it builds on, across conversations."""
    async with opened(tmp_path) as journal:
        for key in (1, 2, 3):
            parent = f"resp_{key - 1}" if key > 1 else None
            await journal.stored(OpenTurn(FENCE, turn(key, parent_id=parent), CONVERSATION))
        chain = await journal.read(reads.load_chain, "resp_3")
        assert [row.id for row in chain] == ["resp_1", "resp_2", "resp_3"]
        assert await journal.read(reads.load_chain, "resp_9") == ()


async def test_erasing_a_turn_leaves_no_byte_of_it(tmp_path: Path) -> None:
    """An erased response's text and tokens are in no file, also where later turns held them."""
    secret = b"the secret of the second turn"
    ids = pack_ids([0x5EC2E7, 0x5EC2E8])
    async with opened(tmp_path) as journal:
        await journal.stored(OpenTurn(FENCE, turn(1), CONVERSATION))
        await journal.stored(
            OpenTurn(FENCE, turn(2, parent_id="resp_1", request=secret, client_key="k"))
        )
        await journal.stored(AppendTokens([tokens(2, 0, 0x5EC2E7, 0x5EC2E8)]))
        await journal.stored(FinishTurn(FENCE, 2, ids, None, True, b"f"))
        await journal.stored(
            OpenTurn(FENCE, turn(3, parent_id="resp_2", base_tokens=1, prompt_ids=ids))
        )
        assert holds(tmp_path, ids)
        await journal.stored(EraseTurns(("resp_2",)))
        assert await journal.read(reads.find_response, "resp_2") is None
        assert await journal.read(reads.find_client_key, "k") is None
        later = await journal.read(reads.load_turn, "resp_3")
        assert later is not None
        assert (later.parent_id, later.prompt_ids, later.base_tokens) == ("resp_1", None, 0)
    assert not holds(tmp_path, secret) and not holds(tmp_path, ids)


async def test_erasing_a_conversation_erases_all_its_turns(tmp_path: Path) -> None:
    """A deleted conversation and its responses are unknown; a fork from it goes on by itself."""
    async with opened(tmp_path) as journal:
        await journal.stored(OpenTurn(FENCE, turn(1), CONVERSATION))
        await journal.stored(OpenTurn(FENCE, turn(2, parent_id="resp_1")))
        fork = ConversationRow(
            id="conv_2",
            tenant="alice",
            created_at=0,
            metadata=b"",
            items=b"",
            parent_id="resp_2",
        )
        forked = turn(3, parent_id="resp_2", conversation_id="conv_2")
        await journal.stored(OpenTurn(Fence("conv_2", 1), forked, fork))
        await journal.stored(EraseTurns((), "conv_1"))
        assert await journal.read(reads.load_conversation, "conv_1") is None
        assert await journal.read(reads.find_response, "resp_2") is None
        state = await journal.read(reads.load_conversation, "conv_2")
        assert state is not None and state.row.parent_id is None
        assert state.open_turns[0].parent_id is None


async def test_a_second_server_is_kept_out(tmp_path: Path) -> None:
    """Two journals on one directory: the second is refused by name, until the first closes."""
    async with opened(tmp_path):
        with pytest.raises(ConfigError, match="no other running server"):
            Journal(tmp_path)
    async with opened(tmp_path):
        pass


async def test_a_foreign_journal_is_refused(tmp_path: Path) -> None:
    """A journal of another version is left alone, and the message says which it is."""
    async with opened(tmp_path):
        pass
    with sqlite3.connect(tmp_path / "journal.sqlite3") as db:
        db.execute("PRAGMA user_version = 77")
    db.close()
    with pytest.raises(ConfigError, match="77"):
        Journal(tmp_path)


async def test_closing_stores_what_is_queued(tmp_path: Path) -> None:
    """Writes that were queued before the end are stored before the files are closed."""
    async with opened(tmp_path) as journal:
        await journal.stored(OpenTurn(FENCE, turn(), CONVERSATION))
        journal.write(AppendTokens([tokens(1, 0, 7)]), lambda error: None)
    async with opened(tmp_path) as journal:
        row = await journal.read(reads.load_turn, "resp_1")
        assert row is not None and row.output_ids == pack_ids([7])


async def test_a_journal_that_never_started_closes(tmp_path: Path) -> None:
    """Closing right after opening gives the directory back."""
    await Journal(tmp_path).close()
    await Journal(tmp_path).close()


@contextmanager
def files_at_most(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `num_bytes`: what a full disk looks like."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_when_nothing_can_be_written_tokens_wait_and_creates_are_refused(
    tmp_path: Path,
) -> None:
    """A full disk refuses new turns at once, keeps what is under way, and recovers by itself."""
    storage: list[bool] = []
    async with opened(tmp_path, storage) as journal:
        await journal.stored(OpenTurn(FENCE, turn(), CONVERSATION))
        with files_at_most((tmp_path / "journal.sqlite3-wal").stat().st_size + 512):
            waiting = asyncio.create_task(journal.stored(AppendTokens([tokens(1, 0, 7)])))
            with pytest.raises(ApiError) as refusal:
                await journal.stored(OpenTurn(FENCE, turn(2)))
            assert (refusal.value.status, refusal.value.code) == (503, "storage_unavailable")
            assert refusal.value.retryable
            assert not journal.available and storage == [False]
            assert not waiting.done()
            assert not (tmp_path / "reserved").exists()  # the space was given back
        await asyncio.wait_for(waiting, 20)
        assert journal.available and storage == [False, True]
        await journal.stored(OpenTurn(FENCE, turn(3)))
        row = await journal.read(reads.load_turn, "resp_1")
        assert row is not None and row.output_ids == pack_ids([7])
        assert (tmp_path / "reserved").stat().st_size > 0


async def test_a_file_system_that_turns_read_only_refuses_like_a_full_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not even the reserve can be given back, the writer lives on and recovers."""

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    async with opened(tmp_path) as journal:
        await journal.stored(OpenTurn(FENCE, turn(), CONVERSATION))
        monkeypatch.setattr(Path, "unlink", refuse)
        with files_at_most((tmp_path / "journal.sqlite3-wal").stat().st_size):
            with pytest.raises(ApiError, match="cannot store"):
                await asyncio.wait_for(journal.stored(OpenTurn(FENCE, turn(2))), 20)
            waiting = asyncio.create_task(journal.stored(AppendTokens([tokens(1, 0, 7)])))
        await asyncio.wait_for(waiting, 20)
        assert journal.available
