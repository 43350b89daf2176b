"""What memory alone knows of a conversation, and for whom it is kept (`store: false`)."""

from hillstar.server.live import LiveTurn
from hillstar.server.ports import Scope
from hillstar.server.text import ParentContext

MAX_KEPT = 64  # contexts of one conversation; older ones are forgotten


class Kept:
    """Owned by a session, and handed on to the one that follows when it fails.

    Of a conversation that is not stored: its ended turns and the contexts after them. Of a stored
    one: the contexts after turns that build on unstored ones, which are in no file.
    """

    def __init__(self) -> None:
        self.holders: set[Scope] = set()  # connections that may still ask for it
        self._contexts: dict[str, ParentContext] = {}  # oldest first
        self._turns: dict[str, LiveTurn] = {}

    def __len__(self) -> int:
        return len(self._contexts)

    def context(self, response_id: str) -> ParentContext | None:
        """After a response that ended."""
        return self._contexts.get(response_id)

    def turn(self, response_id: str) -> LiveTurn | None:
        """A response that ended and is stored nowhere."""
        return self._turns.get(response_id)

    def add(self, turn: LiveTurn, context: ParentContext, *, is_stored: bool) -> None:
        """A turn has ended; `is_stored`: the journal has it, only its context has to be kept."""
        self._contexts[turn.id] = context
        if not is_stored:
            self._turns[turn.id] = turn

    def forget(self, response_id: str) -> bool:
        """Whether it was here."""
        self._turns.pop(response_id, None)
        return self._contexts.pop(response_id, None) is not None

    def forget_oldest(self) -> list[str]:
        """A chain of any length takes as much memory as its last turns; which ones are gone."""
        gone = list(self._contexts)[: max(0, len(self) - MAX_KEPT)]
        for response_id in gone:
            self.forget(response_id)
        return gone

    def clear(self) -> list[str]:
        """Forget everything; which responses were here."""
        gone = list(self._contexts)
        self._contexts.clear()
        self._turns.clear()
        return gone
