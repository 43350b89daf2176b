"""The actor around a session: its mailbox, its activation, its restarts.

A handler that raises has broken its session: the session is dropped and built again from the
journal under a new epoch, so nothing that the broken one still has on its way can be stored.
Restarts are delayed a little longer each time; a conversation that breaks its actor MAX_CRASHES
times has its responses ended as failed.
"""

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from hillstar.engine.messages import Output
from hillstar.server import reads
from hillstar.server.conversation import Conversation, Services
from hillstar.server.errors import (
    ApiError,
    conversation_not_found,
    internal_error,
    response_not_found,
)
from hillstar.server.mail import Arrived, Failed, Lost, Mail
from hillstar.server.mailbox import Mailbox
from hillstar.server.records import ConversationRow, Fence, TurnRow
from hillstar.server.runqueue import RunQueue
from hillstar.server.sequence import Sequence
from hillstar.server.session import Session
from hillstar.server.tasks import Tasks

MAX_USER_MESSAGES = 256
MAX_CRASHES = 3  # within CRASH_WINDOW_S
CRASH_WINDOW_S = 60.0
RESTART_DELAY_S = 0.05  # doubled with each crash in the window

log = logging.getLogger(__name__)


class Actor:
    """Owns one conversation's session. Messages gather while it is activated or restarted."""

    def __init__(
        self,
        services: Services,
        queue: RunQueue,
        tasks: Tasks,
        conversation_id: str,
        new_epoch: Callable[[], int],
        gone: Callable[["Actor", ApiError], None],
    ) -> None:
        """`gone` is called when the conversation does not exist or cannot be recovered, with
        the answer to whoever asks it something."""
        self.conversation_id = conversation_id
        self.is_durable = True
        self.num_crashes = 0
        self.idle_since_s = services.loop.time()
        self._services = services
        self._tasks = tasks
        self._new_epoch = new_epoch
        self._gone = gone
        self._mailbox: Mailbox[Mail] = Mailbox(
            queue, self._handle, max_user=MAX_USER_MESSAGES, paused=True
        )
        self._session: Session | None = None
        self._fence: Fence | None = None
        self._recent_crashes: list[float] = []

    def begin(self, row: ConversationRow, *, is_durable: bool) -> None:
        """Start with a new conversation, stored with its first turn."""
        self.is_durable = is_durable
        conversation = Conversation(
            row=row, fence=self._claim(), is_durable=is_durable, is_stored=False
        )
        self._session = Session(self._services, self, conversation)
        self._mailbox.resume()

    def activate(self) -> None:
        """Start from the journal."""
        self._begin_load(None, ())

    @property
    def session(self) -> Session | None:
        """None while it is being loaded."""
        return self._session

    @property
    def is_idle(self) -> bool:
        """Nothing lives in it and nothing is on its way to it."""
        return self._session is not None and self._session.is_idle and not len(self._mailbox)

    @property
    def knows_more(self) -> bool:
        """Whether somebody may still ask for what the journal does not have."""
        return self._session is not None and self._session.is_held

    def tell(self, message: Mail) -> None:
        """The control lane."""
        self._mailbox.tell(message)

    def offer(self, message: Mail) -> bool:
        """The user lane; False when it is full."""
        return self._mailbox.offer(message)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.start(work, lambda error: self.tell(Failed(error)))

    def stored(self, sequence: Sequence, output: Output) -> None:
        """Tokens are handled at once where nothing is in their way: a message and a wake-up would
        cost as much as the rest of their way to a follower."""
        session = self._session
        if session is None or not self._mailbox.is_clear:
            self._mailbox.tell(Arrived(sequence, output))
            return
        try:
            session.arrived(sequence, output)
        except Exception as error:  # the task boundary of an actor
            self._crashed(session, error)

    def lost(self, sequence: Sequence, error: Exception) -> None:
        self._mailbox.tell(Lost(sequence, error))

    def retire(self) -> list[Mail]:
        """The end of this activation: no write of it may follow. What had gathered is returned."""
        if self._fence is not None and self.is_durable:
            self._services.journal.release(self._fence)
        self._mailbox.pause()
        return self._mailbox.clear()

    def _handle(self, message: Mail) -> None:
        session = self._session
        assert session is not None, "the mailbox is paused without a session"
        try:
            session.handle(message)
        except Exception as error:  # the task boundary of an actor
            self._crashed(session, error)

    def _claim(self) -> Fence:
        self._fence = Fence(self.conversation_id, self._new_epoch())
        if self.is_durable:
            self._services.journal.claim(self._fence)
        return self._fence

    def _crashed(self, session: Session, error: BaseException) -> None:
        """Drop the session; build it again after a delay."""
        self._mailbox.pause()
        self._session = None
        self._count_crash(error)
        self._load_later(session, session.abandon())

    def _count_crash(self, error: BaseException) -> None:
        now = self._services.loop.time()
        self.num_crashes += 1
        recent = [at for at in self._recent_crashes if now - at < CRASH_WINDOW_S]
        self._recent_crashes = [*recent, now]
        log.error(
            "a session failed (%d in the last minute)",
            len(self._recent_crashes),
            exc_info=error,
            extra={"conversation_id": self.conversation_id},
        )

    def _load_later(self, old: Session | None, rows: tuple[TurnRow, ...]) -> None:
        delay_s = RESTART_DELAY_S * 2 ** (len(self._recent_crashes) - 1)
        self._services.loop.call_later(delay_s, self._begin_load, old, rows)

    def _begin_load(self, old: Session | None, rows: tuple[TurnRow, ...]) -> None:
        def failed(error: BaseException) -> None:
            self._count_crash(error)
            if len(self._recent_crashes) > MAX_CRASHES:
                self._give_up(old, internal_error())
            else:
                self._load_later(old, rows)

        self._tasks.start(self._load(old, rows), failed)

    async def _load(self, old: Session | None, rows: tuple[TurnRow, ...]) -> None:
        """Claim the conversation and build its session from what is stored."""
        fence = self._claim()
        if self.is_durable:
            # The claim is behind all writes of older activations: they are stored or refused now.
            await self._services.journal.flushed()
            state = await self._services.journal.read(reads.load_conversation, self.conversation_id)
            if state is None:
                self._give_up(old, conversation_not_found(self.conversation_id))
                return
            row, rows, last_id = state.row, state.open_turns, state.last_id
            if old is not None:
                await self._settle(old, rows)
        else:
            assert old is not None, "what is kept in memory is not loaded"
            row, last_id = old.conversation.row, old.conversation.last_id
        conversation = Conversation(
            row=row,
            fence=fence,
            is_durable=self.is_durable,
            is_stored=self.is_durable,
            last_id=last_id,
        )
        session = Session(self._services, self, conversation)
        session.restore(rows, old, failed=len(self._recent_crashes) >= MAX_CRASHES)
        self._session = session
        self._mailbox.resume()

    def _give_up(self, old: Session | None, error: ApiError) -> None:
        """There will be no session: nobody is left waiting for the last one's turns."""
        if old is not None:
            old.fail(error)
        self._gone(self, error)

    async def _settle(self, old: Session, open_turns: tuple[TurnRow, ...]) -> None:
        """Tell of the turns whose end was stored while their session failed."""
        unfinished = {row.id for row in open_turns}
        for turn in old.turns:
            if not turn.is_stored or turn.id in unfinished:
                continue
            row = await self._services.journal.read(reads.load_turn, turn.id)
            if row is not None and row.finish is not None:
                recalled = await self._services.historian.recall(row)
                turn.catch_up(recalled.events)
                turn.answer_waiters(recalled.response)
            else:
                turn.lose(response_not_found(turn.id))
            self._services.directory.ended(turn.id, keep=False)
