"""Actors without tasks: mailboxes drained by plain callbacks on the event loop.

A message costs one append; however many actors a step wakes, the loop is woken once. Handlers
are synchronous and short, one actor runs one message at a time, and slow work comes back as a
message.
"""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from hillstar.server.runqueue import RunQueue

MAX_RUN = 64  # messages of one actor before the next has its turn

M = TypeVar("M")


class Mailbox(Generic[M]):
    """Two lanes of messages for one handler.

    The user lane is bounded: `offer` refuses when it is full. The control lane (tokens, commits,
    cancel, close, ack) goes first and refuses nothing; what fills it is bounded where it comes
    from. While `paused`, messages gather.
    """

    def __init__(
        self, queue: RunQueue, handle: Callable[[M], None], *, max_user: int, paused: bool = False
    ) -> None:
        """`handle` must not raise."""
        self._queue = queue
        self._handle = handle
        self._max_user = max_user
        self._control: deque[M] = deque()
        self._user: deque[M] = deque()
        self._queued = False
        self._paused = paused
        self._is_handling = False

    def __len__(self) -> int:
        return len(self._control) + len(self._user)

    def tell(self, message: M) -> None:
        """Append to the control lane."""
        self._control.append(message)
        self._wake()

    @property
    def is_clear(self) -> bool:
        """Whether something may be handled now: no control message is before it, there is no
        pause, and no handler runs further up."""
        return not (self._control or self._paused or self._is_handling)

    def offer(self, message: M) -> bool:
        """Append to the user lane; False (and nothing happens) when it is full."""
        if len(self._user) >= self._max_user:
            return False
        self._user.append(message)
        self._wake()
        return True

    def pause(self) -> None:
        """Handle nothing more until `resume`, from the next message on."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        if self._control or self._user:
            self._wake()

    def clear(self) -> list[M]:
        """Take everything out, control lane first."""
        messages = [*self._control, *self._user]
        self._control.clear()
        self._user.clear()
        return messages

    def _wake(self) -> None:
        if not self._queued and not self._paused:
            self._queued = True
            self._queue.add(self._run)

    def _run(self) -> bool:
        control, user, handle = self._control, self._user, self._handle
        self._is_handling = True
        for _ in range(MAX_RUN):
            if self._paused:
                break
            if control:
                handle(control.popleft())
            elif user:
                handle(user.popleft())
            else:
                break
        self._is_handling = False
        self._queued = bool(control or user) and not self._paused
        return self._queued
