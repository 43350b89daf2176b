"""The official openai client, unmodified, against a real socket: everything but the model is real.

Every event that arrives is validated against `openresponses-types`.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.lib.responses_websocket import (
    AsyncResponsesWebSocketSession,
    ResponsesWebSocketLimits,
)
from openai.types.websocket_reconnection import ReconnectingEvent

from hillstar.server.hub import Hub
from support.events import validate
from support.fake_engine import FakeEngine
from support.server import Running, fake_engine_server

LANES = ResponsesWebSocketLimits(
    max_lanes=4,
    max_events_per_lane=4096,
    max_events=8192,
    max_bytes_per_lane=1 << 24,
    max_bytes=1 << 25,
    max_response_bytes=None,
)
TERMINAL = ("response.completed", "response.incomplete", "response.failed")
ASK: dict[str, Any] = {"model": "fake", "input": "hello", "max_output_tokens": 24}
GREEDY = {**ASK, "temperature": 0}  # sampled, an answer may be empty


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running[Hub]]:
    async with fake_engine_server(tmp_path) as server:
        yield server


@pytest.fixture
async def client(running: Running[Hub]) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key="unused") as made:
        yield made


async def collect(stream: AsyncIterator[Any]) -> list[Any]:
    """The events up to the terminal one, each validated."""
    events = []
    async for event in stream:
        validate(event.model_dump(mode="json", exclude_unset=True))
        events.append(event)
        if event.type in TERMINAL:
            break
    return events


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


async def test_create_plain(client: AsyncOpenAI) -> None:
    """`responses.create` returns the finished response with its text and usage."""
    response = await client.responses.create(**ASK)
    assert response.status in ("completed", "incomplete")
    assert response.output_text
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert (await client.responses.retrieve(response.id)).output_text == response.output_text


async def test_create_streamed_equals_plain(client: AsyncOpenAI) -> None:
    """Deltas concatenate to the `done` text and to the final response's text."""
    events = await collect(await client.responses.create(stream=True, **ASK))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = next(event for event in events if event.type == "response.output_text.done")
    assert text_of(events) == done.text == events[-1].response.output_text
    assert events[-1].response.usage is not None


async def test_create_in_the_background(client: AsyncOpenAI) -> None:
    """A background response is polled, or its stream read from any number."""
    response = await client.responses.create(background=True, **ASK)
    whole = await collect(await client.responses.retrieve(response.id, stream=True))
    for cut in (0, 3, len(whole) - 2):
        tail = await collect(
            await client.responses.retrieve(response.id, stream=True, starting_after=cut)
        )
        assert [event.sequence_number for event in tail] == list(range(cut + 1, len(whole)))
        assert text_of(whole[: cut + 1]) + text_of(tail) == text_of(whole)
    assert (await client.responses.retrieve(response.id)).output_text == text_of(whole)


async def test_any_stored_response_can_be_streamed_again(client: AsyncOpenAI) -> None:
    """`retrieve(stream=True)` repeats a response that was neither background nor streamed."""
    response = await client.responses.create(**ASK)
    events = await collect(await client.responses.retrieve(response.id, stream=True))
    assert text_of(events) == response.output_text


async def test_cancel_delete_and_input_items(tmp_path: Path) -> None:
    """A running response is cancelled with usage; its input is listed; it is deleted."""
    engine = FakeEngine(auto=False)
    async with (
        fake_engine_server(tmp_path, engine) as running,
        AsyncOpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        response = await client.responses.create(background=True, **ASK)
        engine.auto = True
        cancelling = asyncio.create_task(client.responses.cancel(response.id))
        cancelled = await cancelling
        assert cancelled.status == "cancelled"
        assert cancelled.usage is not None
        items = [item async for item in await client.responses.input_items.list(response.id)]
        assert [item.type for item in items] == ["message"]
        await client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError) as refusal:
            await client.responses.retrieve(response.id)
        assert refusal.value.code == "response_not_found"


async def test_connect_with_two_lanes(client: AsyncOpenAI) -> None:
    """Two lanes of one socket run side by side, and a chain goes on from the last response."""
    async with (
        client.responses.connect(websocket_connection_options={"max_size": None}) as connection,
        AsyncResponsesWebSocketSession(connection, limits=LANES) as session,
    ):
        lanes = [session.lane("one"), session.lane("two")]
        for lane in lanes:
            await lane.send({"type": "response.create", **GREEDY})
        first, second = [await lane.get_final_response() for lane in lanes]
        assert first.id != second.id
        assert first.output_text and second.output_text
        await lanes[0].send({"type": "response.create", "previous_response_id": first.id, **GREEDY})
        third = await lanes[0].get_final_response()
        assert third.previous_response_id == first.id
        assert third.usage is not None and first.usage is not None
        assert third.usage.input_tokens > first.usage.total_tokens


async def test_raw_connection_events_validate(client: AsyncOpenAI) -> None:
    """Every event of a plain `connect()` validates, and carries its lane's `stream_id`."""
    async with client.responses.connect() as connection:
        await connection.response.create(stream_id="lane", **ASK)
        events = await collect(aiter(connection))
        assert {event.stream_id for event in events} == {"lane"}
        await connection.response.create(**ASK)
        events = await collect(aiter(connection))
        assert not any("stream_id" in event.model_fields_set for event in events)


async def test_a_fork_continues_an_earlier_turn(client: AsyncOpenAI) -> None:
    """Continuing from a turn that is not the last makes a new conversation with that past."""
    first = await client.responses.create(**ASK)
    second = await client.responses.create(previous_response_id=first.id, **ASK)
    fork = await client.responses.create(previous_response_id=first.id, **ASK)
    assert first.conversation is not None and second.conversation is not None
    assert fork.conversation is not None
    assert second.conversation.id == first.conversation.id
    assert fork.conversation.id != first.conversation.id
    assert fork.usage is not None and second.usage is not None
    assert fork.usage.input_tokens == second.usage.input_tokens


async def test_an_unknown_parent_is_a_typed_error(client: AsyncOpenAI) -> None:
    """`previous_response_not_found` arrives typed, over HTTP and on the socket's lane."""
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.responses.create(previous_response_id="resp_none", **ASK)
    assert refusal.value.code == "previous_response_not_found"
    assert refusal.value.param == "previous_response_id"
    async with client.responses.connect() as connection:
        await connection.response.create(previous_response_id="resp_none", stream_id="lane", **ASK)
        event = await connection.recv()
        assert event.type == "error"
        assert event.error.code == "previous_response_not_found"
        assert event.stream_id == "lane"


async def test_conversations(client: AsyncOpenAI) -> None:
    """Turns in a conversation build on each other; the conversation is deleted with them."""
    conversation = await client.conversations.create(metadata={"topic": "birds"})
    first = await client.responses.create(conversation=conversation.id, **ASK)
    second = await client.responses.create(conversation=conversation.id, **ASK)
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens
    assert (await client.conversations.retrieve(conversation.id)).metadata == {"topic": "birds"}
    assert (await client.conversations.delete(conversation.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.conversations.retrieve(conversation.id)


async def test_models(client: AsyncOpenAI) -> None:
    """The served model is listed and can be retrieved."""
    assert [model.id async for model in client.models.list()] == ["fake"]
    assert (await client.models.retrieve("fake")).owned_by == "hillstar"


async def test_the_clients_own_reconnect_after_1012(tmp_path: Path) -> None:
    """After our 1012 the client reconnects by itself, and its chain goes on."""
    reconnects: list[int] = []

    def note(event: ReconnectingEvent) -> None:
        reconnects.append(event.close_code)

    async with fake_engine_server(tmp_path) as before:
        port = int(before.url.rsplit(":", 1)[1])
        client = AsyncOpenAI(base_url=f"{before.url}/v1", api_key="unused")
        connection = await client.responses.connect(
            on_reconnecting=note, initial_delay=0.01, max_delay=0.05, max_retries=50
        ).enter()
        await connection.response.create(**ASK)
        first = (await collect(aiter(connection)))[-1].response
        reading = asyncio.create_task(collect(aiter(connection)))
        await before.server.drain()
    async with fake_engine_server(tmp_path, port=port):
        await connection.response.create(previous_response_id=first.id, **ASK)
        events = await asyncio.wait_for(reading, 30)
        assert events[-1].response.previous_response_id == first.id
        assert set(reconnects) == {1012}
        await connection.close()
    await client.close()
