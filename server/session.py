"""The session: one conversation's behaviour, as synchronous reactions to messages.

Turns run one at a time, in the order in which they were opened. A turn goes PREPARING (its prompt
is built in a thread) → OPENING (stored) → RUNNING → ENDING (its end is stored) → ENDED; one that
comes while another lives is stored first, waits QUEUED, and is prepared when its time comes.
Nothing is posted to a follower before what it tells of is stored.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from hillstar.engine.messages import Finish, FinishReason, Output, Submit
from hillstar.server.directory import Directory
from hillstar.server.errors import (
    ApiError,
    conflict,
    conversation_not_found,
    invalid,
    previous_response_not_found,
    server_overloaded,
)
from hillstar.server.events import TurnEnd
from hillstar.server.history import Historian, Prepared, continued, decode_request, stored_logprobs
from hillstar.server.ids import new_id
from hillstar.server.journal import Journal
from hillstar.server.live import LiveTurn, Phase
from hillstar.server.mail import (
    Arrived,
    AwaitEnd,
    Base,
    Close,
    Disconnected,
    EndStored,
    Erased,
    Failed,
    FollowIt,
    Forget,
    Lost,
    Mail,
    MustFork,
    Open,
    PromptBuilt,
    Show,
    ShowInput,
    TurnStored,
    Unfollow,
)
from hillstar.server.ports import Created, Followed, Observer, Scope
from hillstar.server.reads import Place
from hillstar.server.records import (
    NOT_STORED,
    ConversationRow,
    Fence,
    FinishTurn,
    OpenTurn,
    PlacePrompt,
    TurnRow,
)
from hillstar.server.request import Message
from hillstar.server.sequences import Owner, Sequence, SequenceTable
from hillstar.server.text import ParentContext
from hillstar.server.writer import Fenced

MAX_QUEUED_TURNS = 64  # of one conversation

encode = msgspec.msgpack.Encoder().encode
decode_finish = msgspec.msgpack.Decoder(Finish).decode
decode_items = msgspec.msgpack.Decoder(tuple[Message, ...]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What all sessions work with."""

    journal: Journal
    sequences: SequenceTable
    historian: Historian
    directory: Directory
    observer: Observer
    loop: asyncio.AbstractEventLoop


class Address(Owner, Protocol):
    """The session's actor: how what a session has started comes back to it."""

    def tell(self, message: Mail) -> None: ...

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run slow work beside the actor; its failure is the actor's."""
        ...


class Session:
    """Owned and called by its actor alone."""

    def __init__(
        self,
        services: Services,
        address: Address,
        row: ConversationRow,
        fence: Fence,
        *,
        is_durable: bool,
        is_stored: bool,
        last_id: str | None = None,
    ) -> None:
        """`is_durable`: journaled. `is_stored`: the journal has its row. `last_id`: its end."""
        self._services = services
        self._address = address
        self._row = row
        self._fence = fence
        self._is_durable = is_durable
        self._is_stored = is_stored
        self._last_id = last_id
        self._context: ParentContext | None = None  # after the last turn, if at hand
        self._turns: dict[str, LiveTurn] = {}  # unfinished, in order
        self._past: dict[str, tuple[LiveTurn, ParentContext]] = {}  # ended, kept in memory only
        self._scope: Scope | None = None  # whose the turns in memory are
        self._writer: Scope | None = None
        self._closing: list[asyncio.Future[None]] = []
        self._is_closing = False

    @property
    def row(self) -> ConversationRow:
        return self._row

    @property
    def last_id(self) -> str | None:
        """The end of the conversation."""
        return self._last_id

    @property
    def is_idle(self) -> bool:
        return not self._turns

    @property
    def is_parked(self) -> bool:
        return any(turn.is_paused for turn in self._turns.values())

    @property
    def is_orphan(self) -> bool:
        """Kept in memory only, and nobody may continue it any more."""
        return not self._is_durable and self._scope is None

    @property
    def turns(self) -> tuple[LiveTurn, ...]:
        return tuple(self._turns.values())

    def handle(self, message: Mail) -> None:
        """React to one message."""
        match message:
            case Arrived():
                self._arrived(message.sequence, message.output)
            case TurnStored():
                self._turn_stored(message.turn, message.error)
            case EndStored():
                self._end_stored(message.turn, message.error)
            case PromptBuilt():
                self._prompt_built(message.turn, message.result)
            case Open():
                self._open(message)
            case FollowIt():
                _answer(message.answer, self._follow(message))
            case Unfollow():
                if (turn := self._turns.get(message.response_id)) is not None:
                    turn.unfollow(message.follower)
            case Show():
                turn = self._known(message.response_id)
                _answer(message.answer, turn and turn.stream.response_object())
            case ShowInput():
                turn = self._known(message.response_id)
                _answer(message.answer, turn and turn.request)
            case AwaitEnd():
                self._await_end(message)
            case Disconnected():
                self._disconnected(message.scope)
            case Forget():
                _answer(message.answer, self._forget(message.response_id))
            case Erased():
                self._erased(message.response_id, message.last_id)
            case Close():
                self._close(message.answer)
            case Lost():
                turn = self._turns.get(message.sequence.response_id)
                if turn is not None and turn.sequence is message.sequence:
                    raise message.error
            case Failed():
                raise message.error

    # Recovery.

    def restore(self, rows: tuple[TurnRow, ...], old: "Session | None", failed: bool) -> None:
        """Take unfinished turns up again: after a server's death (`old` None) or an actor's.

        `failed`: this conversation has broken its actor too often; its turns end as failed.
        """
        if old is not None:
            self._writer, self._scope = old._writer, old._scope
            self._past = old._past
            self._is_closing, self._closing = old._is_closing, old._closing
        for row in rows:
            services, before = self._services, old._turns.get(row.id) if old is not None else None
            if failed and before is not None:
                row = replace(row, output_ids=row.output_ids[: 4 * before.num_handled])
            request = decode_request(row.request)
            stream = services.historian.stream(row, request)
            turn = LiveTurn(row, request, stream, Phase.QUEUED, services.loop.time())
            services.directory.adopt(Place(row.id, row.conversation_id, row.tenant))
            self._turns[row.id] = turn
            turn.restore(before)
            if before is not None:
                turn.prepared = None if self._is_durable else before.prepared
            else:
                turn.is_cancelled = request.on_disconnect == "cancel"
                turn.is_paused = request.on_disconnect == "pause"
        for turn in self.turns:
            if failed:
                self._end(turn, "error", "server_error", "The server failed on this response.")
        self._advance()

    def abandon(self) -> tuple[TurnRow, ...]:
        """Stop everything that runs; the rows of the stored turns, as far as memory knows them.

        Creates that still wait for storage are told to try again.
        """
        rows: list[TurnRow] = []
        for turn in self.turns:
            if turn.sequence is not None:
                self._services.sequences.discard(turn.sequence)
            if turn.is_stored:
                logprobs = turn.sequence.logprobs if turn.sequence is not None else []
                chunks = (encode(logprobs),) if logprobs else turn.row.logprobs
                said = turn.sequence.output_ids if turn.sequence else turn.row.output_ids
                rows.append(replace(turn.row, output_ids=bytes(said), logprobs=chunks))
            else:
                turn.reject(server_overloaded("The session failed; try again."))
                self._services.directory.ended(turn.id, keep=False)
        return tuple(rows)

    # Opening.

    def _open(self, message: Open) -> None:
        try:
            answer = self._admit(message)
        except ApiError as error:
            _fail(message.answer, error)
            return
        if answer is not None:
            _answer(message.answer, answer)

    def _admit(self, message: Open) -> MustFork | None:
        """Take a new turn on, or say that it must fork. Raises ApiError."""
        if self._is_closing:
            raise conversation_not_found(self._row.id)
        request = message.request
        if message.parent_id is not None:
            base = self._base(message.parent_id, message.scope)
            if base.parent_id != self._last_id or self._turns or request.store != self._is_durable:
                return MustFork(base)
        elif request.conversation is not None and not request.store:
            raise invalid("A response in a conversation is stored; 'store' must be true.", "store")
        if len(self._turns) >= MAX_QUEUED_TURNS:
            raise server_overloaded(f"{MAX_QUEUED_TURNS} turns of this conversation wait already.")
        turn = self._new_turn(message)
        self._services.directory.admit(Place(turn.id, self._row.id, self._row.tenant))
        if request.conversation is not None:
            self._take_writer_lease(message.scope)
        if not self._is_durable:
            self._scope = message.scope
        turn.answer = message.answer
        if message.follower is not None:
            turn.follow(message.follower, message.scope, 0)
        if message.scope is not None:
            turn.scopes.add(message.scope)
        self._turns[turn.id] = turn
        if len(self._turns) == 1:
            self._prepare(turn, message.base)
        else:
            self._store(turn)
        return None

    def _base(self, parent_id: str, scope: Scope | None) -> Base:
        """What a turn after `parent_id` begins from. Raises ApiError."""
        if parent_id in self._turns:
            raise conflict(
                "previous_response_in_progress",
                f"Response '{parent_id}' has not ended yet.",
                "previous_response_id",
            )
        if self._is_durable:
            context = self._context if parent_id == self._last_id else None
            return Base(parent_id, context, True)
        if parent_id not in self._past or scope is None or scope is not self._scope:
            raise previous_response_not_found(parent_id)
        return Base(parent_id, self._past[parent_id][1], False)

    def _new_turn(self, message: Open) -> LiveTurn:
        services, request = self._services, message.request
        base = message.base
        seed = request.hillstar.seed
        row = TurnRow(
            key=services.journal.new_key(),
            id=new_id("resp"),
            conversation_id=self._row.id,
            tenant=self._row.tenant,
            created_at=time.time(),
            request=encode(request),
            seed=secrets.randbits(63) if seed is None else seed,
            parent_id=base.parent_id if base is not None else message.parent_id,
            client_key=message.client_key,
            base_tokens=NOT_STORED if base is not None and not base.is_stored else 0,
        )
        stream = services.historian.stream(row, request)
        return LiveTurn(row, request, stream, Phase.PREPARING, services.loop.time())

    def _take_writer_lease(self, scope: Scope | None) -> None:
        """The newest writer wins; the older one is told and stays a reader."""
        older, self._writer = self._writer, scope
        if older is not None and older is not scope:
            older.superseded(self._row.id)

    # Preparing and storing.

    def _prepare(self, turn: LiveTurn, base: Base | None = None) -> None:
        """Build the prompt in a thread: after the end of the conversation, or where it forks."""
        if turn.prepared is not None:
            self._run(turn)
            return
        turn.phase = Phase.PREPARING
        historian = self._services.historian
        if turn.row.prompt_ids is not None or turn.row.output_ids:
            row = turn.row
            self._build(turn, lambda: historian.restore(row))
            return
        if base is not None:
            parent_id, context = base.parent_id, base.context
        else:
            parent_id, context = self._last_id or self._row.parent_id, self._context
        if parent_id is None:
            opening = decode_items(self._row.items)
            if opening:
                turn.request = msgspec.structs.replace(
                    turn.request, input=opening + turn.request.input
                )
                turn.row = replace(turn.row, request=encode(turn.request))
        turn.row = replace(turn.row, parent_id=parent_id)
        request = turn.request
        self._build(turn, lambda: historian.prepare(request, parent_id, context))

    def _build(self, turn: LiveTurn, work: Callable[[], Awaitable[Prepared]]) -> None:
        async def build() -> None:
            result: Prepared | ApiError
            try:
                result = await work()
            except ApiError as refusal:
                result = refusal
            self._address.tell(PromptBuilt(turn, result))

        self._address.start(build())

    def _prompt_built(self, turn: LiveTurn, result: Prepared | ApiError) -> None:
        if self._turns.get(turn.id) is not turn:
            return
        if isinstance(result, ApiError):
            if not turn.is_stored:
                self._reject(turn, result)
            elif turn.is_cancelled:
                self._end(turn, "cancelled")
            else:
                self._end(turn, "refused", result.code, result.message)
            return
        turn.prepared = result
        if turn.row.prompt_ids is not None or turn.row.output_ids:
            self._run(turn)
            return
        if turn.row.base_tokens != NOT_STORED:
            inherited = result.prompt.num_inherited
            own = result.prompt.prompt_ids[4 * inherited :]
            turn.row = replace(turn.row, base_tokens=inherited, prompt_ids=own)
        self._store(turn)

    def _store(self, turn: LiveTurn) -> None:
        """Store the turn as far as it is known."""
        turn.phase = Phase.OPENING
        if not self._is_durable:
            self._turn_stored(turn, None)
            return
        write: OpenTurn | PlacePrompt
        if turn.is_stored:
            write = PlacePrompt(self._fence, turn.row)
        else:
            conversation = None if self._is_stored else self._row
            write = OpenTurn(self._fence, turn.row, conversation)
        tell = self._address.tell
        self._services.journal.write(write, lambda error: tell(TurnStored(turn, error)))

    def _turn_stored(self, turn: LiveTurn, error: Exception | None) -> None:
        if self._turns.get(turn.id) is not turn or isinstance(error, Fenced):
            return
        if isinstance(error, ApiError) and not turn.is_stored:
            self._reject(turn, error)
            return
        if error is not None:
            raise error
        self._is_stored = True
        if not turn.is_stored:
            turn.is_stored = True
            if turn.answer is not None:
                _answer(turn.answer, Created(turn.id, self._row.id, False))
                turn.answer = None
            turn.emit(turn.stream.open())
        if turn.prepared is not None:
            self._run(turn)
        else:
            turn.phase = Phase.QUEUED
            if turn.is_cancelled:
                self._end(turn, "cancelled")
            else:
                self._advance()

    def _reject(self, turn: LiveTurn, error: ApiError) -> None:
        """The turn never was: only its create hears of it."""
        turn.phase = Phase.ENDED
        turn.reject(error)
        self._remove(turn)

    # Running.

    def _run(self, turn: LiveTurn) -> None:
        prepared = turn.prepared
        assert prepared is not None, f"{turn.id} has no prompt"
        turn.phase = Phase.RUNNING
        row, request = turn.row, turn.request
        if turn.stream.stopped_at is not None:
            self._end(turn, "stop")
            return
        if row.engine_finish is not None:
            self._finished(turn, decode_finish(row.engine_finish))
            return
        if turn.is_cancelled:
            self._end(turn, "cancelled")
            return
        turn.sequence = Sequence(
            submit=Submit(
                sequence_id=f"{turn.id}:{self._fence.epoch}",
                prompt_ids=prepared.prompt.prompt_ids,
                params=self._services.historian.sampling(
                    request, row.seed, prepared.prompt.num_tokens
                ),
                priority=request.hillstar.priority,
                tenant=row.tenant,
                salt=_salt(row.tenant),
                lease_id=row.conversation_id,
            ),
            response_id=turn.id,
            conversation_id=row.conversation_id,
            epoch=self._fence.epoch,
            key=row.key if self._is_durable else None,
            owner=self._address,
            output_ids=bytearray(row.output_ids),
            logprobs=stored_logprobs(row) or [],
            held=turn.is_paused,
        )
        self._services.sequences.add(turn.sequence)

    def _arrived(self, sequence: Sequence, output: Output) -> None:
        turn = self._turns.get(sequence.response_id)
        if turn is None or turn.sequence is not sequence or turn.phase is not Phase.RUNNING:
            return
        if output.token_ids:
            turn.push(
                output.first_token,
                output.token_ids,
                output.logprobs,
                self._services.loop.time(),
                self._services.observer,
            )
        if output.finish is not None:
            self._finished(turn, output.finish)
        elif turn.stream.stopped_at is not None:
            # Wait for the engine's finish: it knows the usage. What it says meanwhile is lost.
            self._services.sequences.cancel(sequence, keep_tokens=turn.stream.stopped_at)

    def _finished(self, turn: LiveTurn, finish: Finish) -> None:
        """The engine has ended the sequence."""
        reason = finish.reason
        if turn.stream.stopped_at is not None:
            reason = "stop"
        elif turn.is_cancelled:
            reason = "cancelled"
        turn.num_cached_tokens = finish.usage.num_cached_tokens
        self._end(turn, reason, finish.code, finish.message)

    # Ending.

    def _end(
        self,
        turn: LiveTurn,
        reason: FinishReason,
        code: str | None = None,
        message: str | None = None,
    ) -> None:
        """Store the turn's end; it is told when it is stored."""
        turn.phase = Phase.ENDING
        turn.end = TurnEnd(
            reason=reason,
            completed_at=int(time.time()),
            num_prompt_tokens=turn.prepared.prompt.num_tokens if turn.prepared else 0,
            num_cached_tokens=turn.num_cached_tokens,
            code=code,
            message=message,
        )
        if not self._is_durable:
            self._end_stored(turn, None)
            return
        logprobs = turn.output_logprobs()
        write = FinishTurn(
            self._fence,
            turn.row.key,
            turn.output_ids(),
            encode(logprobs) if logprobs else None,
            turn.joins_history,
            encode(turn.end),
        )
        tell = self._address.tell
        self._services.journal.write(write, lambda error: tell(EndStored(turn, error)))

    def _end_stored(self, turn: LiveTurn, error: Exception | None) -> None:
        if self._turns.get(turn.id) is not turn or isinstance(error, Fenced):
            return
        if error is not None:
            raise error
        assert turn.end is not None, f"{turn.id} has no end"
        turn.phase = Phase.ENDED
        turn.emit(turn.stream.finish(turn.end))
        turn.answer_waiters()
        if turn.prepared is not None:
            context = continued(
                turn.prepared.parent,
                turn.request,
                turn.prepared.prompt.prompt_ids,
                turn.output_ids(),
            )
            if turn.joins_history:
                self._last_id = turn.id
                self._context = None if turn.is_rewritten else context
            if not self._is_durable:
                self._past[turn.id] = (turn, context)
        self._remove(turn)

    def _remove(self, turn: LiveTurn) -> None:
        self._services.directory.ended(turn.id, keep=turn.id in self._past)
        del self._turns[turn.id]
        self._advance()
        if self._is_closing and not self._turns:
            for answer in self._closing:
                _answer(answer, None)
            self._closing.clear()

    def _advance(self) -> None:
        """Begin the oldest turn, if it waits for its time."""
        for turn in self._turns.values():
            if turn.phase is Phase.QUEUED:
                self._prepare(turn)
            return

    # Asking, following, cancelling.

    def _known(self, response_id: str) -> LiveTurn | None:
        turn = self._turns.get(response_id)
        if turn is None and response_id in self._past:
            return self._past[response_id][0]
        return turn

    def _follow(self, message: FollowIt) -> Followed | None:
        """Replay and attach in one step: what is posted here and later is the whole log."""
        turn = self._known(message.response_id)
        if turn is None:
            return None
        start = 0 if message.starting_after is None else message.starting_after + 1
        start = max(0, min(start, len(turn.events)))
        sequence = turn.sequence
        if turn.is_paused:
            turn.is_paused = False
            if sequence is not None:
                self._services.sequences.unpark(sequence)
        is_placed = sequence is not None and sequence.submitted and sequence.heard
        followed = Followed(
            turn.id,
            self._row.id,
            True,
            start,
            {
                "tier": "gpu" if is_placed else None,
                "cached_tokens": turn.num_context_tokens if is_placed else 0,
                "wake_ms": 0,
            },
        )
        turn.follow(message.follower, message.scope, start)
        return followed

    def _await_end(self, message: AwaitEnd) -> None:
        turn = self._known(message.response_id)
        if turn is None:
            _answer(message.answer, None)
        elif turn.phase is Phase.ENDED:
            _answer(message.answer, turn.stream.response_object())
        else:
            turn.waiters.append(message.answer)
            if message.cancel:
                self._cancel(turn)

    def _cancel(self, turn: LiveTurn) -> None:
        """End it as soon as where it stands allows; it then ends like any other."""
        if turn.is_cancelled or turn.phase in (Phase.ENDING, Phase.ENDED):
            return
        turn.is_cancelled = True
        if turn.phase is Phase.QUEUED:
            self._end(turn, "cancelled")
        elif turn.phase is Phase.RUNNING:
            assert turn.sequence is not None, f"{turn.id} runs without a sequence"
            self._services.sequences.cancel(turn.sequence)

    def _disconnected(self, scope: Scope) -> None:
        if self._writer is scope:
            self._writer = None
        if self._scope is scope:
            self._scope = None
        for turn in self.turns:
            if not turn.leave(scope):
                continue
            match turn.request.on_disconnect:
                case "cancel":
                    self._cancel(turn)
                case "pause":
                    turn.is_paused = True
                    if turn.sequence is not None:
                        self._services.sequences.park(turn.sequence)
                case "continue":
                    pass

    def _forget(self, response_id: str) -> bool:
        if self._past.pop(response_id, None) is None:
            return False
        self._services.directory.ended(response_id, keep=False)
        if self._last_id == response_id:
            self._last_id, self._context = None, None
        return True

    def forget_all(self) -> None:
        """This activation is over: what only memory knew is gone, its blocks with it."""
        for response_id in self._past:
            self._services.directory.ended(response_id, keep=False)
        self._past = {}
        if not self._is_durable:
            self._services.sequences.release(self._row.id, erase=True)

    def _erased(self, response_id: str, last_id: str | None) -> None:
        """An earlier turn is gone: contexts in memory still hold it, the journal's do not."""
        self._context = None
        if self._last_id == response_id:
            self._last_id = last_id
        for turn in self._turns.values():
            turn.is_rewritten = True

    def _close(self, answer: asyncio.Future[None]) -> None:
        self._is_closing = True
        if not self._turns:
            _answer(answer, None)
            return
        self._closing.append(answer)
        for turn in self.turns:
            self._cancel(turn)


def _answer(future: asyncio.Future[Any], value: object) -> None:
    """Whoever asked may have gone."""
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _salt(tenant: str) -> bytes:
    """Part of every block's hash: tenants never share a prefix."""
    return hashlib.blake2b(tenant.encode(), digest_size=16, person=b"hillstar-salt").digest()
