"""The session: one conversation's behaviour, as synchronous reactions to messages.

It decides the order: turns run one at a time, in the order in which they were opened, and what
may continue the conversation and what must fork. How a single turn goes is `course`'s.
"""

import asyncio
import secrets
import time

import msgspec

from hillstar.engine.messages import Output
from hillstar.server.conversation import Address, Conversation, Services, resolve
from hillstar.server.course import Course
from hillstar.server.errors import (
    ApiError,
    conflict,
    conversation_not_found,
    invalid,
    previous_response_not_found,
    server_overloaded,
)
from hillstar.server.ids import new_id
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
from hillstar.server.ports import Followed, Scope
from hillstar.server.reads import Place
from hillstar.server.records import NOT_STORED, TurnRow
from hillstar.server.recovery import give_up, set_down, take_up
from hillstar.server.sequences import Sequence

MAX_QUEUED_TURNS = 64  # of one conversation
MAX_KEPT = 64  # contexts of one conversation that memory alone knows; older ones are forgotten
MAX_PAUSE_S = 3600.0  # of a response that memory alone knows

encode = msgspec.msgpack.Encoder().encode


class Session:
    """Owned and called by its actor alone."""

    def __init__(self, services: Services, address: Address, conversation: Conversation) -> None:
        self._services = services
        self._conversation = conversation
        self._course = Course(
            services, address, conversation, waits=lambda turn: self._advance(), left=self._remove
        )
        self._turns: dict[str, LiveTurn] = {}  # unfinished, in order
        self._holders: set[Scope] = set()  # for whom something is kept in memory only
        self._paused_at_s: dict[str, float] = {}  # when they were last paused
        self._closing: list[asyncio.Future[None]] = []
        self._is_closing = False

    @property
    def conversation(self) -> Conversation:
        return self._conversation

    @property
    def is_idle(self) -> bool:
        return not self._turns

    @property
    def is_parked(self) -> bool:
        return any(turn.is_paused for turn in self._turns.values())

    @property
    def is_orphan(self) -> bool:
        """Kept in memory only, and nobody may continue it any more."""
        return not self._conversation.is_durable and not self._holders

    @property
    def is_held(self) -> bool:
        """It knows what the journal does not, for somebody who is still connected."""
        is_more = not self._conversation.is_durable or bool(self._conversation.private)
        return is_more and bool(self._holders)

    def overdue(self, now_s: float) -> list[str]:
        """Responses kept in memory only that have been paused for too long."""
        if self._conversation.is_durable:
            return []
        return [
            turn.id
            for turn in self.turns
            if turn.is_paused and now_s - self._paused_at_s[turn.id] >= MAX_PAUSE_S
        ]

    @property
    def turns(self) -> tuple[LiveTurn, ...]:
        return tuple(self._turns.values())

    def arrived(self, sequence: Sequence, output: Output) -> None:
        """Tokens are stored: what becomes of them is the way of every token, kept short."""
        turn = self._turns.get(sequence.response_id)
        if turn is not None:
            self._course.arrived(turn, sequence, output)

    def handle(self, message: Mail) -> None:
        """React to one message."""
        match message:
            case Arrived():
                self.arrived(message.sequence, message.output)
            case TurnStored():
                self._course.turn_stored(message.turn, message.error)
            case EndStored():
                self._course.end_stored(message.turn, message.error)
            case PromptBuilt():
                self._course.prompt_built(message.turn, message.result)
            case Open():
                self._open(message)
            case FollowIt():
                resolve(message.answer, self._follow(message))
            case Unfollow():
                if (turn := self._turns.get(message.response_id)) is not None:
                    turn.unfollow(message.follower)
            case Show():
                turn = self._known(message.response_id)
                resolve(message.answer, turn and turn.stream.response_object())
            case ShowInput():
                turn = self._known(message.response_id)
                resolve(message.answer, turn and turn.request)
            case AwaitEnd():
                self._await_end(message)
            case Disconnected():
                self._disconnected(message.scope)
            case Forget():
                resolve(message.answer, self._forget(message.response_id))
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
            self._holders, self._paused_at_s = old._holders, old._paused_at_s
            self._conversation.past = old._conversation.past
            self._conversation.private = old._conversation.private
            self._is_closing, self._closing = old._is_closing, old._closing
        for row in rows:
            before = old._turns.get(row.id) if old is not None else None
            self._turns[row.id] = take_up(
                row,
                before,
                self._services,
                is_durable=self._conversation.is_durable,
                failed=failed,
            )
        self._resume_blocking()
        for turn in self.turns:
            if failed:
                self._course.end(
                    turn, "error", "server_error", "The server failed on this response."
                )
        self._advance()

    def abandon(self) -> tuple[TurnRow, ...]:
        """Stop everything that runs; the rows of the stored turns, as far as memory knows them."""
        return set_down(self.turns, self._services)

    def fail(self, error: ApiError) -> None:
        """After `abandon`, where no other session follows: answer everybody who still waits."""
        give_up(self.turns, self._services, error)
        self._turns.clear()
        self._answer_closing()

    # Opening.

    def _open(self, message: Open) -> None:
        try:
            fork = self._admit(message)
        except ApiError as error:
            if not message.answer.done():
                message.answer.set_exception(error)
            return
        if fork is not None:
            resolve(message.answer, fork)

    def _admit(self, message: Open) -> MustFork | None:
        """Take a new turn on, or say that it must fork. Raises ApiError."""
        if self._is_closing:
            raise conversation_not_found(self._conversation.row.id)
        request = message.request
        if message.parent_id is not None:
            base = self._base(message.parent_id, message.scope)
            if (
                base.parent_id != self._conversation.last_id
                or self._turns
                or request.store != self._conversation.is_durable
            ):
                return MustFork(base)
        elif request.conversation is not None and not request.store:
            raise invalid("A response in a conversation is stored; 'store' must be true.", "store")
        if len(self._turns) >= MAX_QUEUED_TURNS:
            raise server_overloaded(f"{MAX_QUEUED_TURNS} turns of this conversation wait already.")
        turn = self._new_turn(message)
        self._services.directory.admit(
            Place(turn.id, self._conversation.row.id, self._conversation.row.tenant)
        )
        if request.conversation is not None:
            self._services.leases.take(self._conversation.row.id, message.scope)
        if message.scope is not None and self._is_private(message):
            self._holders.add(message.scope)
        turn.answer = message.answer
        if message.follower is not None:
            turn.follow(message.follower, message.scope, 0)
        if message.scope is not None:
            turn.scopes.add(message.scope)
        self._turns[turn.id] = turn
        self._resume_blocking()
        if len(self._turns) == 1:
            self._course.prepare(turn, message.base)
        else:
            self._course.store(turn)
        return None

    def _base(self, parent_id: str, scope: Scope | None) -> Base:
        """What a turn after `parent_id` begins from. Raises ApiError."""
        if parent_id in self._turns:
            raise conflict(
                "previous_response_in_progress",
                f"Response '{parent_id}' has not ended yet.",
                "previous_response_id",
            )
        conversation = self._conversation
        if conversation.is_durable:
            private = conversation.private.get(parent_id)
            known = conversation.context if parent_id == conversation.last_id else None
            return Base(parent_id, private or known, True, private is not None)
        if parent_id not in conversation.past or scope not in self._holders:
            raise previous_response_not_found(parent_id)
        return Base(parent_id, conversation.past[parent_id][1], False, True)

    def _is_private(self, message: Open) -> bool:
        """Whether the new turn, or what it builds on, is kept in memory only."""
        if not self._conversation.is_durable:
            return True
        if message.base is not None:
            return message.base.is_private
        return bool(self._conversation.private)

    def _new_turn(self, message: Open) -> LiveTurn:
        services, request = self._services, message.request
        base = message.base
        seed = request.hillstar.seed
        row = TurnRow(
            key=services.journal.new_key(),
            id=new_id("resp"),
            conversation_id=self._conversation.row.id,
            tenant=self._conversation.row.tenant,
            created_at=time.time(),
            request=encode(request),
            seed=secrets.randbits(63) if seed is None else seed,
            parent_id=base.parent_id if base is not None else message.parent_id,
            client_key=message.client_key,
            base_tokens=NOT_STORED if base is not None and base.is_private else 0,
        )
        stream = services.historian.stream(row, request)
        return LiveTurn(row, request, stream, Phase.PREPARING, services.loop.time())

    def _remove(self, turn: LiveTurn) -> None:
        self._services.directory.ended(turn.id, keep=turn.id in self._conversation.past)
        del self._turns[turn.id]
        self._paused_at_s.pop(turn.id, None)
        self._forget_oldest()
        self._advance()
        if not self._turns:
            self._answer_closing()

    def _forget_oldest(self) -> None:
        """A chain of any length takes as much memory as its last turns."""
        conversation = self._conversation
        while len(conversation.past) > MAX_KEPT:
            self._forget(next(iter(conversation.past)))
        while len(conversation.private) > MAX_KEPT:
            del conversation.private[next(iter(conversation.private))]

    def _answer_closing(self) -> None:
        """Nothing lives in the conversation any more: it can be deleted."""
        for answer in self._closing:
            resolve(answer, None)
        self._closing.clear()

    def _advance(self) -> None:
        """Begin the oldest turn, if it waits for its time."""
        for turn in self._turns.values():
            if turn.phase is Phase.QUEUED:
                self._course.prepare(turn)
            return

    # Asking, following, cancelling.

    def _known(self, response_id: str) -> LiveTurn | None:
        turn = self._turns.get(response_id)
        if turn is None and response_id in self._conversation.past:
            return self._conversation.past[response_id][0]
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
            self._course.resume(turn)
        is_placed = sequence is not None and sequence.submitted and sequence.heard
        followed = Followed(
            turn.id,
            self._conversation.row.id,
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
            resolve(message.answer, None)
        elif turn.phase is Phase.ENDED:
            resolve(message.answer, turn.stream.response_object())
        else:
            turn.waiters.append(message.answer)
            if message.cancel:
                self._course.cancel(turn)

    def _disconnected(self, scope: Scope) -> None:
        self._holders.discard(scope)
        for turn in self.turns:
            if not turn.leave(scope):
                continue
            match turn.request.on_disconnect:
                case "cancel":
                    self._course.cancel(turn)
                case "pause":
                    self._paused_at_s[turn.id] = self._services.loop.time()
                    self._course.pause(turn)
                case "continue":
                    pass
        self._resume_blocking()

    def _resume_blocking(self) -> None:
        """A paused turn is nobody's hurry, until one behind it that is not paused waits."""
        is_waited_for = False
        for turn in reversed(self._turns.values()):
            if not turn.is_paused:
                is_waited_for = True
            elif is_waited_for:
                self._course.resume(turn)

    def _forget(self, response_id: str) -> bool:
        if self._conversation.past.pop(response_id, None) is None:
            return False
        self._services.directory.ended(response_id, keep=False)
        if self._conversation.last_id == response_id:
            self._conversation.last_id = self._conversation.context = None
        return True

    def forget_all(self) -> None:
        """This activation is over: what only memory knew is gone, its blocks with it."""
        for response_id in self._conversation.past:
            self._services.directory.ended(response_id, keep=False)
        self._conversation.past = {}
        if not self._conversation.is_durable:
            self._services.sequences.release(self._conversation.row.id, erase=True)

    def _erased(self, response_id: str, last_id: str | None) -> None:
        """An earlier turn is gone: contexts in memory still hold it, the journal's do not."""
        self._conversation.context = None
        self._conversation.private.clear()
        if self._conversation.last_id == response_id:
            self._conversation.last_id = last_id
        for turn in self._turns.values():
            turn.is_rewritten = True

    def _close(self, answer: asyncio.Future[None]) -> None:
        self._is_closing = True
        if not self._turns:
            resolve(answer, None)
            return
        self._closing.append(answer)
        for turn in self.turns:
            self._course.cancel(turn)
