"""The promises of recovery on the default model: real sockets, real processes, real kills."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hillstar.clients.client import Client
from hillstar.clients.events import ConnectionLost, Finished, StreamEvent, TextDelta
from support.process import RealServer

pytestmark = pytest.mark.model

QUESTION = "Write a short story about a hummingbird that sleeps through a cold night."
NUM_TOKENS = 96


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RealServer]:
    """The default model in fp32, where greedy output is exact."""
    async with RealServer(tmp_path / "data", "--dtype", "float32", "--kv-blocks", "256") as server:
        yield server


def greedy(client: Client, **options: object):
    return client.stream(input=QUESTION, temperature=0.0, max_output_tokens=NUM_TOKENS, **options)


async def read_all(stream: AsyncIterator[StreamEvent]) -> tuple[str, Finished]:
    """The concatenated deltas and the terminal event."""
    text, finished = "", None
    async for event in stream:
        if isinstance(event, TextDelta):
            text += event.text
        if isinstance(event, Finished):
            finished = event
    assert finished is not None
    return text, finished


async def read_until(stream: AsyncIterator[StreamEvent], num_tokens: int) -> str:
    """The text of the stream up to its `num_tokens`-th token."""
    text = ""
    async for event in stream:
        if isinstance(event, TextDelta):
            text += event.text
            if event.first_token + event.num_tokens >= num_tokens:
                return text
    raise AssertionError("the stream ended early")


def numbers(finished: Finished) -> tuple[object, ...]:
    """What must be equal between a cut stream and an uncut one, besides the text."""
    response = finished.response
    usage = response.usage
    return (
        response.status,
        response.text,
        finished.sequence_number,
        usage.input_tokens,
        usage.output_tokens,
    )


async def test_the_default_model_knows_the_capital_of_france(server: RealServer) -> None:
    """The default model answers "What is the capital of France?" with Paris."""
    async with Client(server.url) as client:
        answer = await client.create(
            input="What is the capital of France?", temperature=0.0, max_output_tokens=32
        )
    assert "Paris" in answer.text


async def test_an_engine_killed_mid_stream_loses_and_repeats_nothing(server: RealServer) -> None:
    """After kill -9 of the engine every running response goes on at its next token."""
    async with Client(server.url) as client:
        whole, reference = await read_all(greedy(client))
        streams = [greedy(client), greedy(client)]
        heads = [await read_until(stream, 24) for stream in streams]
        server.kill_engine()
        for stream, head in zip(streams, heads, strict=True):
            rest, finished = await read_all(stream)
            assert head + rest == whole
            assert numbers(finished) == numbers(reference)
    metrics = await server.metrics()
    assert metrics["hillstar_engine_restarts_total"] == 1


async def test_a_server_killed_mid_stream_goes_on_after_its_restart(server: RealServer) -> None:
    """After kill -9 of the server a client reads on at the exact token, on a new process."""
    async with Client(server.url) as client:
        whole, reference = await read_all(greedy(client))
        stream = greedy(client)
        head = await read_until(stream, 24)
        await server.kill()
        lost = 0
        await server.start()
        rest = ""
        finished = None
        async for event in stream:
            if isinstance(event, ConnectionLost):
                lost += 1
            if isinstance(event, TextDelta):
                rest += event.text
            if isinstance(event, Finished):
                finished = event
        assert lost >= 1
        assert head + rest == whole
        assert finished is not None
        assert numbers(finished) == numbers(reference)


async def test_a_drained_server_goes_on_after_its_restart(server: RealServer) -> None:
    """SIGTERM mid-stream ends the server cleanly; what it had begun is finished or resumed."""
    async with Client(server.url) as client:
        whole, _ = await read_all(greedy(client))
        stream = greedy(client)
        head = await read_until(stream, 8)
        assert await server.stop() == 0
        await server.start()
        rest, _ = await read_all(stream)
        assert head + rest == whole


async def test_conversations_outlive_the_server(server: RealServer) -> None:
    """A conversation continues after a kill -9 and restart with the answer it would have had."""
    async with Client(server.url) as client:
        first = await client.create(
            input="Name three colours.", temperature=0.0, max_output_tokens=24
        )
        follow_up = {"input": "And three more.", "temperature": 0.0, "max_output_tokens": 24}
        expected = await client.create(previous_response_id=first.id, **follow_up)
        await server.kill()
        await server.start()
        again = await client.create(previous_response_id=first.id, **follow_up)
        assert again.text == expected.text
        assert again.usage.input_tokens == expected.usage.input_tokens
        assert (await client.retrieve(expected.id)).text == expected.text
