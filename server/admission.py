"""A new turn's way into its conversation: whether it may, whether it forks, as what it begins."""

import secrets
import time

import msgspec

from hillstar.server.conversation import Conversation, Services
from hillstar.server.errors import invalid, server_overloaded
from hillstar.server.ids import new_id
from hillstar.server.live import LiveTurn, Phase
from hillstar.server.mail import MustFork, Open
from hillstar.server.reads import Place
from hillstar.server.records import NOT_STORED, TurnRow

MAX_QUEUED_TURNS = 64  # of one conversation

_encode = msgspec.msgpack.Encoder().encode


def admit(
    services: Services, conversation: Conversation, message: Open, num_unfinished: int
) -> LiveTurn | MustFork:
    """The turn, counted and followed, behind `num_unfinished` others; or where it must fork from.

    Raises ApiError.
    """
    request, scope = message.request, message.scope
    if message.parent_id is not None:
        base = conversation.base(message.parent_id, scope)
        is_end = message.parent_id == conversation.last_id and not num_unfinished
        if not is_end or request.store != conversation.is_durable:
            return MustFork(base)
    elif request.conversation is not None and not request.store:
        raise invalid("A response in a conversation is stored; 'store' must be true.", "store")
    if num_unfinished >= MAX_QUEUED_TURNS:
        raise server_overloaded(f"{MAX_QUEUED_TURNS} turns of this conversation wait already.")
    turn = _new_turn(services, conversation, message)
    row = conversation.row
    services.directory.admit(Place(turn.id, row.id, row.tenant))
    if request.conversation is not None:
        services.leases.take(row.id, scope)
    turn.answer = message.answer
    if message.follower is not None:
        turn.follow(message.follower, scope, 0)
    if scope is not None:
        turn.scopes.add(scope)
        if _is_private(conversation, message):
            conversation.kept.holders.add(scope)
    return turn


def _is_private(conversation: Conversation, message: Open) -> bool:
    """Whether the new turn, or what it builds on, is kept in memory only."""
    if not conversation.is_durable:
        return True
    if message.base is not None:
        return message.base.is_private
    return len(conversation.kept) > 0


def _new_turn(services: Services, conversation: Conversation, message: Open) -> LiveTurn:
    request, base = message.request, message.base
    seed = request.hillstar.seed
    row = TurnRow(
        key=services.journal.new_key(),
        id=new_id("resp"),
        conversation_id=conversation.row.id,
        tenant=conversation.row.tenant,
        created_at=time.time(),
        request=_encode(request),
        seed=secrets.randbits(63) if seed is None else seed,
        parent_id=base.parent_id if base is not None else message.parent_id,
        client_key=message.client_key,
        base_tokens=NOT_STORED if base is not None and base.is_private else 0,
    )
    stream = services.historian.stream(row, request)
    return LiveTurn(row, request, stream, Phase.PREPARING, services.loop.time())
