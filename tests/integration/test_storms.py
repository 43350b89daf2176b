"""Many clients at once on real processes with a tiny random model: nothing leaks, nothing hangs."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hillstar.clients.client import Client
from hillstar.clients.errors import RequestRefused
from hillstar.clients.events import Created, Finished, StreamEvent, TextDelta
from support.process import RealServer
from support.tiny_server import write_tiny_model

NUM_BLOCKS = 96
SEED = 2026


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def serving(
    tmp_path: Path, model_dir: Path, num_blocks: int = NUM_BLOCKS
) -> AsyncIterator[RealServer]:
    """A server on the tiny model; on leaving, every block is accounted for and nothing runs."""
    options = ["--model", str(model_dir), "--dtype", "float32", "--max-model-len", "512"]
    async with RealServer(tmp_path / "data", *options, "--kv-blocks", str(num_blocks)) as server:
        assert _num_blocks(await server.metrics()) == num_blocks
        yield server
        await _until(server, lambda metrics: _num_sequences(metrics) == 0)
        assert _num_blocks(await server.metrics()) == num_blocks


async def _until(server: RealServer, holds: Callable[[dict[str, float]], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds(await server.metrics()):  # noqa: ASYNC110 - asks another process
            await asyncio.sleep(0.05)


def _num_blocks(metrics: dict[str, float]) -> float:
    return sum(n for name, n in metrics.items() if name.startswith("hillstar_kv_blocks{"))


def _num_sequences(metrics: dict[str, float]) -> float:
    return sum(n for name, n in metrics.items() if name.startswith("hillstar_sequences{"))


def _prompt(rng: random.Random, num_words: int) -> str:
    return " ".join(
        rng.choice(["fox", "dog", "night", "day", "bird", "sleeps", "flies"])
        for _ in range(num_words)
    )


async def _cancel_at(client: Client, rng: random.Random) -> Finished:
    """A response that is cancelled right away, after its first event, or after some tokens."""
    num_words = rng.choice((3, 40, 120))
    stream = client.stream(
        input=_prompt(rng, num_words),
        max_output_tokens=rng.choice((4, 200)),
        hillstar={"ignore_eos": True},
    )
    when = rng.randrange(4)  # 0: once created; 1-3: after so many deltas
    num_deltas, finished = 0, []
    async for event in stream:
        num_deltas += isinstance(event, TextDelta)
        if isinstance(event, Finished):
            finished.append(event)
        if (isinstance(event, Created) and not when) or num_deltas == when:
            await stream.cancel()
    assert len(finished) == 1
    return finished[0]


async def test_cancels_in_every_state_leave_nothing_behind(tmp_path: Path, model_dir: Path) -> None:
    """300 responses cancelled while queued, prefilled or decoding: one terminal event each, with
    usage, as the stored response says too; and every block comes back."""
    async with (
        serving(tmp_path, model_dir) as server,
        Client(server.url) as client,
    ):
        for round_ in range(10):
            rngs = [random.Random(SEED + 100 * round_ + i) for i in range(30)]
            ends = await asyncio.gather(*(_cancel_at(client, rng) for rng in rngs))
            for end in ends:
                response = end.response
                assert response.status in ("cancelled", "completed", "incomplete")
                assert response.usage.input_tokens > 0
                stored = await client.retrieve(response.id)
                assert (stored.status, stored.usage) == (response.status, response.usage)
                assert stored.text == response.text


async def test_sockets_that_vanish_leave_nothing_behind(tmp_path: Path, model_dir: Path) -> None:
    """200 sockets dropped in mid-response, which was to be cancelled then: nothing runs on."""
    async with serving(tmp_path, model_dir) as server:

        async def vanish(seed: int) -> None:
            rng = random.Random(seed)
            num_events = rng.randrange(12)
            async with Client(server.url) as client:
                stream = client.stream(
                    input=_prompt(rng, rng.choice((3, 60))),
                    max_output_tokens=300,
                    hillstar={"ignore_eos": True, "on_disconnect": "cancel"},
                )
                async for _ in stream:
                    num_events -= 1
                    if num_events < 0:
                        break

        for first in range(0, 200, 25):
            await asyncio.gather(*(vanish(SEED + first + i) for i in range(25)))


async def test_a_pool_far_too_small_serves_or_refuses_everybody(
    tmp_path: Path, model_dir: Path
) -> None:
    """With 16 blocks for 60 responses, each finishes whole or is refused with a typed error."""
    async with (
        serving(tmp_path, model_dir, 16) as server,
        Client(server.url) as client,
    ):

        async def one(seed: int) -> str:
            rng = random.Random(seed)
            num_tokens = rng.choice((8, 64, 150))
            try:
                response = await client.create(
                    input=_prompt(rng, rng.choice((3, 30, 80, 400))),
                    max_output_tokens=num_tokens,
                    hillstar={"ignore_eos": True},
                )
            except RequestRefused as error:
                return str(error.code)
            if response.status == "failed":
                return str(response.error_code)
            assert response.usage.output_tokens == num_tokens
            return "done"

        outcomes = await asyncio.gather(*(one(SEED + i) for i in range(60)))
    assert outcomes.count("done") >= 20
    assert set(outcomes) <= {"done", "kv_capacity_exceeded", "context_length_exceeded"}


async def test_a_prompt_that_can_never_fit_is_refused_at_once(
    tmp_path: Path, model_dir: Path
) -> None:
    """While others keep the pool full, a hopeless request gets its refusal within a second."""
    async with (
        serving(tmp_path, model_dir, 16) as server,
        Client(server.url) as client,
    ):
        busy = [
            client.stream(input="go on", max_output_tokens=200, hillstar={"ignore_eos": True})
            for _ in range(4)
        ]
        readers = [asyncio.ensure_future(stream.result()) for stream in busy]
        async with asyncio.timeout(1):
            outcome = await _code_of(
                client.create(input=_prompt(random.Random(SEED), 60), max_output_tokens=300)
            )
        assert outcome == "kv_capacity_exceeded"
        for reader in readers:
            assert (await reader).usage.output_tokens == 200


async def _code_of(create: Awaitable[object]) -> str | None:
    try:
        response = await create
    except RequestRefused as error:
        return error.code
    return getattr(response, "error_code", None)


async def _events(stream: AsyncIterator[StreamEvent]) -> list[StreamEvent]:
    return [event async for event in stream]


async def test_a_response_resumed_anywhere_is_the_response(tmp_path: Path, model_dir: Path) -> None:
    """Resuming a finished response behind any of its events yields exactly the events after it."""
    async with (
        serving(tmp_path, model_dir) as server,
        Client(server.url) as client,
    ):
        whole = await _events(
            client.stream(input="the quick fox", max_output_tokens=40, temperature=0.0)
        )
        response_id = whole[0].response.id  # type: ignore[union-attr]
        for index in range(len(whole) - 1):
            after = whole[index].sequence_number  # type: ignore[union-attr]
            resumed = await _events(client.resume(response_id, starting_after=after))
            text = "".join(e.text for e in resumed if isinstance(e, TextDelta))
            expected = "".join(e.text for e in whole[index + 1 :] if isinstance(e, TextDelta))
            assert text == expected
            assert resumed[-1] == whole[-1]
