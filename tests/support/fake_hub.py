"""A Hub for tests of the network front: it answers each input with that input, letter by letter.

The events are the real ones (`ResponseStream`); nothing is stored, no engine runs. A test can hold
all answers after some tokens (`hold_after`, `go`) to look at a response that is under way.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from hillstar.engine.messages import FinishReason
from hillstar.server.errors import (
    ApiError,
    conversation_not_found,
    previous_response_not_found,
    response_not_found,
)
from hillstar.server.events import Event, ResponseStream, TextDelta, Turn, TurnEnd
from hillstar.server.ids import new_id
from hillstar.server.items import Message
from hillstar.server.ports import Created, Followed, Follower, HubStats, Principal, Scope
from hillstar.server.request import CreateResponse


class Letters:
    """A decoder whose token ids are code points."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


class Response:
    """One response of the fake: its log, its followers, its end."""

    def __init__(self, turn: Turn, tenant: str, scope: Scope | None) -> None:
        self.turn = turn
        self.tenant = tenant
        self.scopes: set[Scope] = set() if scope is None else {scope}
        self.stream = ResponseStream(turn, Letters())
        self.log: list[Event | TextDelta] = []
        self.followers: list[Follower] = []
        self.done = asyncio.Event()
        self.end_as: FinishReason = "stop"

    def emit(self, events: Sequence[Event | TextDelta]) -> None:
        self.log += events
        for follower in tuple(self.followers):
            follower.post(self.turn.response_id, events)

    def lose(self) -> None:
        """The response is gone, without an end."""
        self.done.set()
        for follower in self.followers:
            follower.lost(self.turn.response_id, refusal())

    def finish(self, reason: FinishReason) -> None:
        if not self.done.is_set():
            end = TurnEnd(reason=reason, completed_at=1, num_prompt_tokens=3)
            self.emit(self.stream.finish(end))
            self.done.set()


class FakeHub:
    """Implements what the front calls. Counts what it was told in `calls`."""

    def __init__(self) -> None:
        self.responses: dict[str, Response] = {}
        self.conversations: dict[str, dict[str, Any]] = {}
        self.calls: list[tuple[str, Any]] = []
        self.hold_after: int | None = None
        self.go = asyncio.Event()
        self.cancel_gate = asyncio.Event()
        self.cancel_gate.set()
        self.fail_with: Exception | None = None
        self.delta = 1  # letters in one post
        self.repeat = 1  # how many times an answer repeats its input
        self.state = HubStats(engine_state="ready")
        self._tasks: set[asyncio.Task[None]] = set()

    async def drain(self, deadline_s: float) -> None:
        self.calls.append(("drain", deadline_s))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stats(self) -> HubStats:
        return self.state

    async def create(
        self,
        principal: Principal,
        request: CreateResponse,
        *,
        scope: Scope | None,
        follower: Follower | None,
    ) -> Created:
        self.calls.append(("create", request))
        if self.fail_with is not None:
            raise self.fail_with
        parent = request.previous_response_id
        if parent is not None and parent not in self.responses:
            raise previous_response_not_found(parent)
        if request.conversation is not None and request.conversation not in self.conversations:
            raise conversation_not_found(request.conversation)
        turn = Turn(
            response_id=new_id("resp"),
            conversation_id=request.conversation or new_id("conv"),
            created_at=1,
            model="fake",
            request=request,
        )
        response = Response(turn, principal.tenant, scope)
        self.responses[turn.response_id] = response
        if follower is not None:
            response.followers.append(follower)
        response.emit(response.stream.open())
        task = asyncio.create_task(self._answer(response))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return Created(turn.response_id, str(turn.conversation_id), replayed=False)

    async def _answer(self, response: Response) -> None:
        messages = response.turn.request.input
        ids = [ord(letter) for letter in (messages[-1].text if messages else "") * self.repeat]
        for first in range(0, len(ids), self.delta):
            await asyncio.sleep(0)
            if self.hold_after is not None and first >= self.hold_after:
                await self.go.wait()
            if response.done.is_set():
                return
            response.emit(response.stream.push(first, ids[first : first + self.delta]))
        if self.hold_after is not None:
            await self.go.wait()
        response.finish("stop")

    async def follow(
        self,
        principal: Principal,
        response_id: str,
        *,
        starting_after: int | None,
        follower: Follower,
        scope: Scope | None,
    ) -> Followed:
        response = self._find(principal, response_id)
        first = 0 if starting_after is None else starting_after + 1
        follower.post(response_id, [e for e in response.log if e.sequence_number >= first])
        response.followers.append(follower)
        if scope is not None:
            response.scopes.add(scope)
        kv = {"tier": "gpu", "cached_tokens": 0, "wake_ms": 0.0}
        return Followed(response_id, str(response.turn.conversation_id), True, first, kv)

    def unfollow(self, response_id: str, follower: Follower) -> None:
        self.responses[response_id].followers.remove(follower)

    def disconnected(self, scope: Scope) -> None:
        self.calls.append(("disconnected", scope))
        for response in self.responses.values():
            if scope in response.scopes and response.turn.request.on_disconnect == "cancel":
                response.finish("cancelled")

    async def cancel(self, principal: Principal, response_id: str) -> dict[str, Any]:
        await self.cancel_gate.wait()
        response = self._find(principal, response_id)
        response.finish("cancelled")
        return response.stream.response_object()

    async def get(self, principal: Principal, response_id: str) -> dict[str, Any]:
        return self._find(principal, response_id).stream.response_object()

    async def wait_done(self, principal: Principal, response_id: str) -> dict[str, Any]:
        response = self._find(principal, response_id)
        await response.done.wait()
        return response.stream.response_object()

    async def delete(self, principal: Principal, response_id: str) -> None:
        self._find(principal, response_id)
        del self.responses[response_id]

    async def input_items(self, principal: Principal, response_id: str) -> list[dict[str, Any]]:
        messages = self._find(principal, response_id).turn.request.input
        return [{"id": f"msg_{i}", "text": message.text} for i, message in enumerate(messages)]

    async def create_conversation(
        self, principal: Principal, metadata: Mapping[str, str], items: Sequence[Message] = ()
    ) -> dict[str, Any]:
        made = {
            "id": new_id("conv"),
            "object": "conversation",
            "created_at": 1,
            "metadata": dict(metadata),
        }
        self.conversations[str(made["id"])] = made
        return made

    async def get_conversation(self, principal: Principal, conversation_id: str) -> dict[str, Any]:
        if conversation_id not in self.conversations:
            raise conversation_not_found(conversation_id)
        return self.conversations[conversation_id]

    async def delete_conversation(self, principal: Principal, conversation_id: str) -> None:
        await self.get_conversation(principal, conversation_id)
        del self.conversations[conversation_id]

    async def hint(
        self,
        principal: Principal,
        hint: str,
        *,
        conversation_id: str | None = None,
        previous_response_id: str | None = None,
    ) -> None:
        self.calls.append(("hint", hint))

    def _find(self, principal: Principal, response_id: str) -> Response:
        response = self.responses.get(response_id)
        if response is None or response.tenant != principal.tenant:
            raise response_not_found(response_id)
        return response


def refusal(code: str = "server_overloaded") -> ApiError:
    """An error for `fail_with`."""
    return ApiError(503, code, "full", retryable=True, retry_after_s=2.0)
