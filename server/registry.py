"""The Hub: every operation on responses and conversations, and the way from an id to its actor.

The front calls the Hub and nothing below it. Coroutine methods raise `ApiError`; the plain ones
never raise and never block. Everything runs on the event loop that called `start`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hillstar.server.ports import Created, Followed, Follower, HubStats, Principal, Scope
from hillstar.server.request import CreateResponse, Message


class Hub:
    """Owner of the table of active session actors."""

    async def start(self) -> None:
        """Lock and open the journal, start the engine, take unfinished responses up again.

        Returns as soon as requests are accepted; the engine may still be loading
        (`stats().engine_state`), creates then wait for it.
        """

    async def drain(self, deadline_s: float) -> None:
        """Refuse new responses; wait for the running ones; park at the deadline what remains.

        What was parked is taken up again by the next server on the same data directory.
        """

    async def close(self) -> None:
        """Stop the engine and close the journal. Responses still running stay resumable."""

    async def create(
        self,
        principal: Principal,
        request: CreateResponse,
        *,
        scope: Scope | None,
        follower: Follower | None,
    ) -> Created:
        """Open a response. Returns once it is stored.

        The follower gets every event from sequence number 0 on; the first ones may be posted
        before the caller runs again. `scope=None`: nothing happens to it on a disconnect
        (`background`). A `client_event_id` seen before answers with the response it made and
        follows that one from 0.

        Raises ApiError: previous_response_not_found, conversation_not_found,
        context_length_exceeded, server_overloaded, storage_unavailable, and what the text layer
        refuses. What the engine refuses later ends the response as `failed`.
        """
        raise NotImplementedError

    async def follow(
        self,
        principal: Principal,
        response_id: str,
        *,
        starting_after: int | None,
        follower: Follower,
        scope: Scope | None,
    ) -> Followed:
        """Follow a response: the events after `starting_after` (None: all), then live ones.

        Replay and attachment are one step of the actor: no gap, no duplicate. Events may be
        posted before the caller runs again, none before the answer is decided. A paused
        response goes on. Works on finished responses too. Raises response_not_found.
        """
        raise NotImplementedError

    def unfollow(self, response_id: str, follower: Follower) -> None:
        """Post no more of this response to the follower; nothing else changes."""

    def disconnected(self, scope: Scope) -> None:
        """The scope is gone: its followers are dropped, and each running response it created or
        followed which nobody else follows goes by its `on_disconnect`: continue, cancel, pause.
        """

    def ack(self, response_id: str, follower: Follower, sequence_number: int) -> None:
        """Move the follower's cursor; events are rebuilt from tokens, so nothing is freed."""

    async def cancel(self, principal: Principal, response_id: str) -> dict[str, Any]:
        """End a response in whatever state it is and return it; idempotent.

        Followers get the terminal event before this returns. Raises response_not_found.
        """
        raise NotImplementedError

    async def get(self, principal: Principal, response_id: str) -> dict[str, Any]:
        """The response object as it stands. Raises response_not_found."""
        raise NotImplementedError

    async def wait_done(self, principal: Principal, response_id: str) -> dict[str, Any]:
        """The response object once it has ended. Raises response_not_found."""
        raise NotImplementedError

    async def delete(self, principal: Principal, response_id: str) -> None:
        """Cancel if running, then erase the response's tokens, text and unshared blocks.

        Later turns stay readable; what is continued from them no longer knows this turn.
        Raises response_not_found.
        """

    async def input_items(self, principal: Principal, response_id: str) -> list[dict[str, Any]]:
        """The response's own input as item objects, oldest first. Raises response_not_found."""
        raise NotImplementedError

    async def create_conversation(
        self,
        principal: Principal,
        metadata: Mapping[str, str],
        items: Sequence[Message] = (),
    ) -> dict[str, Any]:
        """An empty conversation, or one whose first turn begins with `items`; the object.

        Raises storage_unavailable.
        """
        raise NotImplementedError

    async def get_conversation(self, principal: Principal, conversation_id: str) -> dict[str, Any]:
        """The conversation object. Raises conversation_not_found."""
        raise NotImplementedError

    async def delete_conversation(self, principal: Principal, conversation_id: str) -> None:
        """Cancel and erase every response of the conversation. Raises conversation_not_found."""

    async def hint(
        self,
        principal: Principal,
        hint: str,
        *,
        conversation_id: str | None = None,
        previous_response_id: str | None = None,
    ) -> None:
        """`typing` activates the conversation ahead of its next turn. Never an error."""

    def stats(self) -> HubStats:
        """A snapshot for /metrics and the health endpoints."""
        raise NotImplementedError
