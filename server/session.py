"""The session: one conversation's behaviour, as synchronous reactions to messages.

It decides the order: turns run one at a time, in the order in which they were opened, and what
may continue the conversation and what must fork. How a single turn goes is `course`'s.
"""

import asyncio

from hillstar.server.admission import admit
from hillstar.server.conversation import Address, Conversation, Services, resolve
from hillstar.server.course import Course
from hillstar.server.errors import (
    ApiError,
    conflict,
    conversation_not_found,
)
from hillstar.server.live import LiveTurn, Phase
from hillstar.server.mail import (
    Arrived,
    AwaitEnd,
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
from hillstar.server.records import TurnRow
from hillstar.server.recovery import give_up, set_down, take_up

MAX_PAUSE_S = 3600.0  # of a response that memory alone knows


class Session:
    """Owned and called by its actor alone."""

    def __init__(self, services: Services, address: Address, conversation: Conversation) -> None:
        self._services = services
        self._conversation = conversation
        self._course = Course(
            services, address, conversation, waits=lambda turn: self._advance(), left=self._remove
        )
        self.arrived = self._course.arrived  # tokens are stored
        self._turns: dict[str, LiveTurn] = {}  # unfinished, in order
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
        return not self._conversation.is_durable and not self._conversation.kept.holders

    @property
    def is_held(self) -> bool:
        """It knows what the journal does not, for somebody who is still connected."""
        conversation = self._conversation
        is_more = not conversation.is_durable or len(conversation.kept) > 0
        return is_more and bool(conversation.kept.holders)

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
            self._conversation.kept = old._conversation.kept
            self._paused_at_s = old._paused_at_s
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
        if message.parent_id in self._turns:
            raise conflict(
                "previous_response_in_progress",
                f"Response '{message.parent_id}' has not ended yet.",
                "previous_response_id",
            )
        turn = admit(self._services, self._conversation, message, len(self._turns))
        if isinstance(turn, MustFork):
            return turn
        self._turns[turn.id] = turn
        self._resume_blocking()
        if len(self._turns) == 1:
            self._course.prepare(turn, message.base)
        else:
            self._course.store(turn)
        return None

    def _remove(self, turn: LiveTurn) -> None:
        kept, directory = self._conversation.kept, self._services.directory
        directory.ended(turn.id, keep=kept.turn(turn.id) is not None)
        for response_id in kept.forget_oldest():
            directory.ended(response_id, keep=False)
        del self._turns[turn.id]
        self._paused_at_s.pop(turn.id, None)
        self._advance()
        if not self._turns:
            self._answer_closing()

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
        return self._turns.get(response_id) or self._conversation.kept.turn(response_id)

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
        self._conversation.kept.holders.discard(scope)
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
        if not self._conversation.kept.forget(response_id):
            return False
        self._services.directory.ended(response_id, keep=False)
        if self._conversation.last_id == response_id:
            self._conversation.last_id = self._conversation.context = None
        return True

    def forget_all(self) -> None:
        """This activation is over: what only memory knew is gone, its blocks with it."""
        for response_id in self._conversation.kept.clear():
            self._services.directory.ended(response_id, keep=False)
        if not self._conversation.is_durable:
            self._services.sequences.release(self._conversation.row.id, erase=True)

    def _erased(self, response_id: str, last_id: str | None) -> None:
        """An earlier turn is gone: contexts in memory still hold it, the journal's do not."""
        self._conversation.context = None
        self._conversation.kept.clear()
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
