"""What a socket's client asks for: validated events in, calls of the Hub, events back.

Creates and resumes run on lanes; cancels and hints beside them. Each runs as a task of the
connection, so the reader never waits, and each kind is bounded: what is too much is refused.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from hillstar.server.errors import ApiError, internal_error, rate_limit_exceeded
from hillstar.server.events import Notice
from hillstar.server.followers import LaneFollower, LastEvent, Sender, has_ended
from hillstar.server.front import Front
from hillstar.server.lanes import Lanes
from hillstar.server.ports import Principal, Scope
from hillstar.server.request import INCLUDE_SESSION, CreateResponse
from hillstar.server.wire import (
    AckEvent,
    CancelEvent,
    ClientEvent,
    CreateEvent,
    HintEvent,
    ResumeEvent,
)

logger = logging.getLogger(__name__)

Work = Coroutine[Any, Any, None]


class Commands:
    """Owner of one socket's lanes and followers. Is the `Board` of its followers."""

    def __init__(
        self,
        front: Front,
        principal: Principal,
        scope: Scope,
        sender: Sender,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._front = front
        self._hub = front.hub
        self._principal = principal
        self._scope = scope
        self._sender = sender
        self._tasks = tasks
        self._lanes: Lanes[CreateResponse] = Lanes(front.limits)
        self._followers: dict[str, LaneFollower] = {}  # by response, while it runs
        self._is_open = True
        self._num_numbered = 0  # responses given a number on this socket
        self._num_beside = 0  # commands running beside the lanes
        self.written: str | None = None  # the conversation last created in or continued

    @property
    def is_idle(self) -> bool:
        """Whether nothing is followed and nothing waits."""
        return self._lanes.num_busy == 0 and self._lanes.num_waiting == 0

    def take(self, event: ClientEvent) -> None:
        """Begin what the client asks for. Never waits, never raises."""
        match event:
            case CreateEvent():
                self._submit(event)
            case ResumeEvent():
                self._resume(event)
            case CancelEvent():
                self._run_beside(self._cancel(event), event.stream_id)
            case HintEvent():
                self._run_beside(self._hint(event), None)
            case AckEvent():
                pass  # nothing waits for it: no event is given up while somebody may ask for it
            case _:
                refusal = ApiError(
                    400, "unsupported_event", "This event is not supported.", param="type"
                )
                self._sender.refuse(refusal, None)

    def close(self) -> None:
        """The peer is gone: what runs is finished, what waits never starts."""
        self._is_open = False

    # Board

    def began(self, follower: LaneFollower, response_id: str) -> None:
        """Of `Board`."""
        self._followers[response_id] = follower

    def ended(self, follower: LaneFollower) -> None:
        """Of `Board`."""
        response_id = follower.response_id
        if response_id is not None and self._followers.get(response_id) is follower:
            del self._followers[response_id]
        self._lanes.release(follower.stream_id)
        self._start_waiting()

    # Creates

    def _submit(self, event: CreateEvent) -> None:
        try:
            self._front.rate.take(self._principal.tenant)
            self._lanes.submit(event.stream_id, event.request)
        except ApiError as error:
            self._sender.refuse(error, event.stream_id)
        else:
            self._start_waiting()

    def _start_waiting(self) -> None:
        while self._is_open and (started := self._lanes.start_next()) is not None:
            lane, request = started
            follower = self._new_follower(lane)
            self._run(self._create(follower, request), lane, on_failure=follower.abandon)

    async def _create(self, follower: LaneFollower, request: CreateResponse) -> None:
        created = await self._hub.create(
            self._principal, request, scope=self._scope, follower=follower
        )
        self.written = created.conversation_id
        if INCLUDE_SESSION in request.include:
            self._tell_session(follower, created.conversation_id)

    # Resumes

    def _resume(self, event: ResumeEvent) -> None:
        try:
            self._lanes.occupy(event.stream_id)
        except ApiError as error:
            self._sender.refuse(error, event.stream_id)
            return
        follower = self._new_follower(event.stream_id)
        follower.hold()
        self._run(self._follow(follower, event), event.stream_id, on_failure=follower.abandon)

    async def _follow(self, follower: LaneFollower, event: ResumeEvent) -> None:
        followed = await self._hub.follow(
            self._principal,
            event.response_id,
            starting_after=event.starting_after,
            follower=follower,
            scope=self._scope,
        )
        is_over = follower.response_id is None and has_ended(
            await self._hub.get(self._principal, event.response_id)
        )
        body = {
            "response_id": followed.response_id,
            "recovered": followed.recovered,
            "next_sequence_number": followed.next_sequence_number,
            "kv": dict(followed.kv),
        }
        self._sender.send_event(follower, Notice("hillstar.resumed", body))
        if INCLUDE_SESSION in event.include:
            self._tell_session(follower, followed.conversation_id)
        follower.release()
        if is_over:
            follower.abandon()  # asked for what comes after the end

    # Beside the lanes

    async def _cancel(self, event: CancelEvent) -> None:
        is_followed = event.response_id in self._followers
        await self._hub.cancel(self._principal, event.response_id)
        if is_followed:
            return  # its follower has the terminal event already
        follower = self._new_follower(event.stream_id)
        await self._hub.follow(
            self._principal,
            event.response_id,
            starting_after=None,
            follower=LastEvent(self._sender, follower),
            scope=None,
        )

    async def _hint(self, event: HintEvent) -> None:
        await self._hub.hint(
            self._principal,
            event.hint,
            conversation_id=event.conversation,
            previous_response_id=event.previous_response_id,
        )

    # Helpers

    def _new_follower(self, stream_id: str | None) -> LaneFollower:
        self._num_numbered += 1
        return LaneFollower(self._sender, self, stream_id, self._num_numbered)

    def _run_beside(self, work: Work, stream_id: str | None) -> None:
        if self._num_beside >= self._front.limits.max_queued:
            work.close()
            self._sender.refuse(rate_limit_exceeded("Too much is asked at once.", 1.0), stream_id)
            return
        self._num_beside += 1
        task = self._run(work, stream_id)
        task.add_done_callback(self._beside_ended)

    def _beside_ended(self, task: asyncio.Task[None]) -> None:
        self._num_beside -= 1

    def _run(
        self, work: Work, stream_id: str | None, on_failure: Callable[[], None] = lambda: None
    ) -> asyncio.Task[None]:
        return self._tasks.create_task(self._guard(work, stream_id, on_failure))

    async def _guard(
        self, work: Work, stream_id: str | None, on_failure: Callable[[], None]
    ) -> None:
        """The boundary of a command's task: a failure is an error frame on its lane."""
        try:
            await work
        except ApiError as error:
            self._sender.refuse(error, stream_id)
            on_failure()
        except Exception:
            logger.exception("a command failed", extra={"tenant": self._principal.tenant})
            self._sender.refuse(internal_error(), stream_id)
            on_failure()

    def _tell_session(self, follower: LaneFollower, conversation_id: str) -> None:
        body = {
            "conversation": conversation_id,
            "state": "awake",
            "tier": "gpu",
            "cached_tokens": 0,
            "bytes": 0,
        }
        self._sender.send_event(follower, Notice("hillstar.session", body))
