"""What a chat has said so far, as the tree the server keeps, seen from one branch."""

from dataclasses import dataclass

from hillstar.clients.client import CreateParams


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and the response that answered it."""

    question: str
    response_id: str
    conversation_id: str | None


class Transcript:
    """The turns of the branch on the screen. Owned by the chat.

    A turn follows its predecessor by `previous_response_id`; so a turn that was cancelled keeps
    what it said, and going back to an earlier turn forks on the server by itself.
    """

    def __init__(self, conversation_id: str | None = None) -> None:
        self._turns: list[Turn] = []
        self._conversation_id = conversation_id  # to go on with, as long as there is no turn

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns)

    def parent(self, num_turns: int) -> CreateParams:
        """The field that makes a turn follow the first `num_turns`; empty: it follows nothing.

        Raises ValueError where that place in the conversation has no name.
        """
        if num_turns:
            return {"previous_response_id": self._turns[num_turns - 1].response_id}
        if self._conversation_id is not None and self._turns:
            raise ValueError("what came before this chat's first turn is not known here")
        if self._conversation_id is not None:
            return {"conversation": self._conversation_id}
        return {}

    def put(self, num_turns: int, turn: Turn) -> bool:
        """Have `turn` follow the first `num_turns`; True where it began a branch of its own."""
        known = {earlier.conversation_id for earlier in self._turns} or {turn.conversation_id}
        self._turns[num_turns:] = [turn]
        return turn.conversation_id not in known

    def back_to(self, num_turns: int) -> None:
        """Keep the first `num_turns` turns. Raises ValueError where that cannot be."""
        if not 0 <= num_turns <= len(self._turns):
            raise ValueError(f"there are {len(self._turns)} turns; {num_turns} is none of them")
        self.parent(num_turns)
        del self._turns[num_turns:]

    def clear(self) -> None:
        """Start anew, with no conversation."""
        self._turns.clear()
        self._conversation_id = None
