"""A Hub on a fake engine and a fake text layer, that can be killed and opened again."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from hillstar.engine.messages import Submit, unpack_ids
from hillstar.server.errors import ApiError
from hillstar.server.events import Event, TextDelta
from hillstar.server.hub import Hub, HubLimits
from hillstar.server.items import Message
from hillstar.server.journal import Journal
from hillstar.server.ports import Created, Principal
from hillstar.server.request import CreateResponse, HillstarOptions
from support.fake_engine import FakeEngine
from support.fake_text import FakeText

ALICE = Principal("alice")
BOB = Principal("bob")

TERMINAL = ("response.completed", "response.incomplete", "response.failed")


class Socket:
    """A scope that notes which conversations it lost the writing of."""

    def __init__(self) -> None:
        self.lost: list[str] = []

    def superseded(self, conversation_id: str) -> None:
        self.lost.append(conversation_id)


class Listener:
    """A follower that keeps everything and can be awaited."""

    def __init__(self) -> None:
        self.events: list[Event | TextDelta] = []
        self.error: ApiError | None = None
        self._changed = asyncio.Event()

    def post(self, response_id: str, events: Sequence[Event | TextDelta]) -> None:
        self.events += events
        self._changed.set()

    def lost(self, response_id: str, error: ApiError) -> None:
        self.error = error
        self._changed.set()

    @property
    def is_done(self) -> bool:
        """Whether anything more may come."""
        return self.error is not None or (bool(self.events) and kind(self.events[-1]) in TERMINAL)

    @property
    def text(self) -> str:
        return "".join(event.delta for event in self.events if isinstance(event, TextDelta))

    @property
    def response(self) -> dict[str, Any]:
        """Of the last event that carries it."""
        for event in reversed(self.events):
            if isinstance(event, Event) and "response" in event.body:
                response: dict[str, Any] = event.body["response"]
                return response
        raise AssertionError("no event carries the response")

    async def wait_for(self, num_events: int) -> None:
        """Until there are so many events, or the last."""
        while len(self.events) < num_events and not self.is_done:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), 60)

    async def wait_done(self) -> list[Event | TextDelta]:
        await self.wait_for(1 << 62)
        return self.events


class Latencies:
    """An observer that counts."""

    def __init__(self) -> None:
        self.ttfts: list[float] = []
        self.itls: list[float] = []
        self.steps: list[float] = []

    def ttft(self, seconds: float) -> None:
        self.ttfts.append(seconds)

    def itl(self, gaps_s: Sequence[float]) -> None:
        self.itls += gaps_s

    def step(self, seconds: float) -> None:
        self.steps.append(seconds)


def kind(event: Event | TextDelta) -> str:
    return event.type if isinstance(event, Event) else "response.output_text.delta"


def ask(text: str = "hello", **fields: Any) -> CreateResponse:
    """A create; `hillstar` fields by name behind `h_`."""
    options = {name[2:]: fields.pop(name) for name in list(fields) if name.startswith("h_")}
    options.setdefault("seed", 7)
    fields.setdefault("max_output_tokens", 24)
    return CreateResponse(
        input=(Message("user", (text,)),), hillstar=HillstarOptions(**options), **fields
    )


class World:
    """One data directory with a Hub on it."""

    def __init__(self, data_dir: Path, engine: FakeEngine, limits: HubLimits | None) -> None:
        self.data_dir = data_dir
        self.engine = engine
        self.text = FakeText()
        self.latencies = Latencies()
        self.journal = Journal(data_dir)
        self.hub = Hub(
            journal=self.journal,
            engine=engine,
            text=self.text,
            observer=self.latencies,
            model_name="fake",
            max_model_len=4096,
            limits=limits,
        )

    async def create(
        self, request: CreateResponse, *, who: Principal = ALICE, scope: Socket | None = None
    ) -> tuple[Created, Listener]:
        listener = Listener()
        created = await self.hub.create(who, request, scope=scope, follower=listener)
        return created, listener

    async def say(
        self,
        text: str = "hello",
        *,
        who: Principal = ALICE,
        scope: Socket | None = None,
        **fields: Any,
    ) -> Listener:
        """Create and wait for the end."""
        _, listener = await self.create(ask(text, **fields), who=who, scope=scope)
        await listener.wait_done()
        return listener

    def query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Read the journal's file directly."""
        with sqlite3.connect(self.data_dir / "journal.sqlite3") as db:
            rows = db.execute(sql, values).fetchall()
        db.close()
        return rows


@asynccontextmanager
async def world(
    data_dir: Path,
    *,
    engine: FakeEngine | None = None,
    limits: HubLimits | None = None,
) -> AsyncIterator[World]:
    """A running Hub; closed at the end."""
    made = World(data_dir, engine or FakeEngine(), limits)
    await made.hub.start()
    try:
        yield made
    finally:
        await made.hub.close()


async def until_submitted(made: World, num: int) -> list[Submit]:
    """Wait until the engine was given so many sequences in all."""
    await made.engine.until(lambda: len(made.engine.submits) >= num)
    return made.engine.submits


def prompt_text(submit: Submit) -> str:
    return "".join(map(chr, unpack_ids(submit.prompt_ids)))


def last_prompt(made: World) -> str:
    """The text of the last prompt that the engine was given."""
    return prompt_text(made.engine.submits[-1])


def holds(data_dir: Path, data: bytes) -> bool:
    """Whether any file of the journal holds these bytes."""
    return any(data in file.read_bytes() for file in data_dir.iterdir())


async def refused(work: Awaitable[object]) -> ApiError:
    """The error that the work ends in."""
    try:
        await work
    except ApiError as error:
        return error
    raise AssertionError("it was not refused")
