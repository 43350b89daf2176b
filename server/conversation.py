"""What the parts of a session share: what they work with, and what they know."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from hillstar.server.directory import Directory
from hillstar.server.errors import previous_response_not_found
from hillstar.server.history import Historian
from hillstar.server.journal import Journal
from hillstar.server.kept import Kept
from hillstar.server.leases import WriterLeases
from hillstar.server.mail import Base, Mail
from hillstar.server.ports import Scope
from hillstar.server.records import ConversationRow, Fence
from hillstar.server.sequence import Owner
from hillstar.server.sequences import SequenceTable
from hillstar.server.text import ParentContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What all sessions work with."""

    journal: Journal
    sequences: SequenceTable
    historian: Historian
    directory: Directory
    leases: WriterLeases
    loop: asyncio.AbstractEventLoop


class Address(Owner, Protocol):
    """The session's actor: how what a session has started comes back to it."""

    def tell(self, message: Mail) -> None: ...

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run slow work beside the actor; its failure is the actor's."""
        ...


@dataclass(slots=True, kw_only=True)
class Conversation:
    """What one activation knows of its conversation; changed by its session alone."""

    row: ConversationRow
    fence: Fence
    is_durable: bool  # journaled; else kept in memory only
    is_stored: bool  # the journal has its row
    last_id: str | None = None  # the turn it continues from
    context: ParentContext | None = None  # after that turn, if at hand
    kept: Kept = field(default_factory=Kept)

    def base(self, parent_id: str, scope: Scope | None) -> Base:
        """What a turn after `parent_id`, which has ended, begins from.

        Raises previous_response_not_found for what is not, or is no longer, kept for `scope`.
        """
        kept = self.kept.context(parent_id)
        if not self.is_durable and (kept is None or scope not in self.kept.holders):
            raise previous_response_not_found(parent_id)
        known = self.context if parent_id == self.last_id else None
        return Base(parent_id, kept or known, self.is_durable, kept is not None)


def resolve(future: asyncio.Future[Any], value: object) -> None:
    """Answer a question; whoever asked may have gone."""
    if not future.done():
        future.set_result(value)
