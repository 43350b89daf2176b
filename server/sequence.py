"""One response inside the engine, as the server keeps it, and who is told of it."""

from dataclasses import dataclass, field
from typing import Protocol

from hillstar.engine.messages import Output, Submit, TokenLogprobs


class Owner(Protocol):
    """Who is told what became of a sequence (its session's actor)."""

    def stored(self, sequence: "Sequence", output: Output) -> None:
        """These tokens are in the journal (where they belong there); in order, without gaps."""
        ...

    def lost(self, sequence: "Sequence", error: Exception) -> None:
        """Tokens could not be stored and never will be; more may follow, not to be sent."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One response inside the engine. Changed by the table alone."""

    submit: Submit  # without output ids
    response_id: str
    conversation_id: str
    epoch: int
    key: int | None  # in the journal; None: kept in memory only
    owner: Owner
    opened_at_s: float  # by the table's clock
    told_at_s: float | None = None  # when its owner got the last tokens
    output_ids: bytearray = field(default_factory=bytearray)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    held: bool = False  # parked as asked
    submitted: bool = False  # to the engine that is up
    cancelled: bool = False
    heard: bool = False  # has said something since it was submitted
    strikes: int = 0

    @property
    def id(self) -> str:
        return self.submit.sequence_id

    @property
    def num_tokens(self) -> int:
        return len(self.output_ids) // 4
