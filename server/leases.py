"""Who writes to which conversation: the newest writer wins, the older one is told."""

from collections import OrderedDict

from hillstar.server.ports import Scope

MAX_LEASES = 65536  # beyond it, who has written longest ago is no longer known


class WriterLeases:
    """Owner of conversation → the scope that wrote last; outlives the conversation's actor."""

    def __init__(self, maximum: int = MAX_LEASES) -> None:
        self._maximum = maximum
        self._writers: OrderedDict[str, Scope] = OrderedDict()  # longest ago first
        self._held: dict[Scope, set[str]] = {}

    def __len__(self) -> int:
        return len(self._writers)

    def take(self, conversation_id: str, scope: Scope | None) -> None:
        """The scope writes now; None: nobody who could be told."""
        older = self._drop(conversation_id)
        if scope is not None:
            self._writers[conversation_id] = scope
            self._held.setdefault(scope, set()).add(conversation_id)
            if len(self._writers) > self._maximum:
                self._drop(next(iter(self._writers)))
        if older is not None and older is not scope:
            older.superseded(conversation_id)

    def leave(self, scope: Scope) -> None:
        """The scope is gone."""
        for conversation_id in self._held.pop(scope, ()):
            del self._writers[conversation_id]

    def _drop(self, conversation_id: str) -> Scope | None:
        scope = self._writers.pop(conversation_id, None)
        if scope is not None:
            held = self._held[scope]
            held.discard(conversation_id)
            if not held:
                del self._held[scope]
        return scope
