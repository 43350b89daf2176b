"""Creates: which conversation a new response belongs to, and whether it forks."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hillstar.server.actor import Actor
from hillstar.server.actors import ActorTable
from hillstar.server.create_keys import CreateKeys, client_key
from hillstar.server.errors import ApiError, previous_response_not_found
from hillstar.server.ids import new_id
from hillstar.server.items import Message
from hillstar.server.lookup import Lookup
from hillstar.server.mail import Base, MustFork, Open
from hillstar.server.ports import Created, Follower, Principal, Scope
from hillstar.server.records import ConversationRow
from hillstar.server.request import CreateResponse

_encode = msgspec.msgpack.Encoder().encode


class Opening:
    """The way of a create from the Hub to a session.

    No parent: a new conversation. `conversation`: its end, after the turns that wait there.
    `previous_response_id`: the session of that response decides; where it is not the idle end,
    a new conversation forks from it.
    """

    def __init__(
        self, lookup: Lookup, actors: ActorTable, keys: CreateKeys, *, model_name: str
    ) -> None:
        self._lookup = lookup
        self._actors = actors
        self._keys = keys
        self._model_name = model_name

    async def create(
        self,
        principal: Principal,
        request: CreateResponse,
        scope: Scope | None,
        follower: Follower | None,
    ) -> Created:
        """The response this request makes, or made before. Raises ApiError."""
        if request.model not in (None, self._model_name):
            raise ApiError(
                404,
                "model_not_found",
                f"The model '{request.model}' is not served here; '{self._model_name}' is.",
                param="model",
            )
        key = client_key(principal.tenant, request)
        turn = _NewTurn(principal, request, scope, follower, key if request.store else None)
        if key is None:
            return await self._place(turn)
        return await self._keys.once(key, lambda: self._place(turn))

    async def _place(self, turn: "_NewTurn") -> Created:
        principal, request = turn.principal, turn.request
        parent_id = request.previous_response_id
        if request.conversation is not None:
            row = await self._lookup.conversation(principal, request.conversation)
            actor = self._actors.get(row.id)
        elif parent_id is not None:
            place = await self._lookup.find(principal, parent_id)
            if place is None:
                raise previous_response_not_found(parent_id)
            actor = self._actors.get(place.conversation_id)
        else:
            return await self._begin(turn, None)
        answer = await self._open(actor, turn, parent_id, None)
        if isinstance(answer, MustFork):
            return await self._begin(turn, answer.base)
        return answer

    async def _begin(self, turn: "_NewTurn", base: Base | None) -> Created:
        """The first turn of a new conversation, which is stored with it."""
        parent_id = base.parent_id if base is not None and base.is_stored else None
        row = new_conversation(turn.principal, parent_id=parent_id)
        actor = self._actors.begin(row, is_durable=turn.request.store)
        try:
            created = await self._open(actor, turn, None, base)
        except ApiError:
            self._actors.drop(actor)
            raise
        assert isinstance(created, Created), "a fork does not fork again"
        self._actors.num_stored += turn.request.store
        return created

    async def _open(
        self, actor: Actor, turn: "_NewTurn", parent_id: str | None, base: Base | None
    ) -> Created | MustFork:
        self._actors.touch(turn.scope, actor.conversation_id)
        return await self._lookup.ask(
            actor,
            lambda answer: Open(
                request=turn.request,
                scope=turn.scope,
                follower=turn.follower,
                client_key=turn.client_key,
                parent_id=parent_id,
                base=base,
                answer=answer,
            ),
        )


class _NewTurn(msgspec.Struct, frozen=True):
    """What every attempt at opening a turn needs."""

    principal: Principal
    request: CreateResponse
    scope: Scope | None
    follower: Follower | None
    client_key: str | None


def new_conversation(
    principal: Principal,
    *,
    metadata: Mapping[str, str] | None = None,
    items: Sequence[Message] = (),
    parent_id: str | None = None,
) -> ConversationRow:
    """A conversation that nobody knows of yet."""
    return ConversationRow(
        id=new_id("conv"),
        tenant=principal.tenant,
        created_at=time.time(),
        metadata=_encode(dict(metadata or {})),
        items=_encode(tuple(items)),
        parent_id=parent_id,
    )


def conversation_object(row: ConversationRow) -> dict[str, Any]:
    """OpenAI's conversation object."""
    return {
        "id": row.id,
        "object": "conversation",
        "created_at": int(row.created_at),
        "metadata": msgspec.msgpack.decode(row.metadata),
    }
