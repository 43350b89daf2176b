"""A load generator: many streams against a running server, timed and checked.

Every stream must end in exactly one terminal event, its usage must be the tokens asked for, and
its deltas must be contiguous and add up to the final text; a stream that fails a check is an
error, so that a figure never stands for wrong output.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

from hillstar.clients.client import Client, CreateParams
from hillstar.clients.errors import ClientError, RequestRefused
from hillstar.clients.events import ConnectionLost, Finished, Response, TextDelta

_TEXT = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work number night point home water
room mother area money story fact month lot right study book eye job word business issue side kind
head house service friend father power hour game line end member
"""
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """What to send, and where. Prompts are random words: about `input_tokens` tokens each."""

    url: str
    key: str | None = None
    num_requests: int = 64
    concurrency: int = 8
    input_tokens: int = 128
    output_tokens: int = 64
    transport: Literal["ws", "sse"] = "ws"
    seed: int = 0


@dataclass(slots=True)
class Sample:
    """One stream: times in seconds, and why it counts as an error (None: it does not)."""

    ttft_s: float | None = None
    itl_s: list[float] = field(default_factory=list)  # one entry a token after the first delta
    total_s: float = 0.0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    num_reconnects: int = 0
    error: str | None = None


class Meter:
    """Times and checks one stream as its pieces come."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.sample = Sample()
        self._clock = clock
        self._began_s = clock()
        self._last_s = self._began_s
        self._texts: list[str] = []
        self._next_token = 0
        self._num_terminals = 0

    def delta(self, text: str, first_token: int | None = None, num_tokens: int = 1) -> None:
        """A piece of text; `first_token` is None where the transport does not say."""
        now_s = self._clock()
        if self.sample.ttft_s is None:
            self.sample.ttft_s = now_s - self._began_s
        else:
            per_token_s = (now_s - self._last_s) / max(num_tokens, 1)
            self.sample.itl_s.extend([per_token_s] * max(num_tokens, 1))
        self._last_s = now_s
        self._texts.append(text)
        if first_token is not None:
            if first_token != self._next_token:
                self.fail(f"a delta begins at token {first_token}, not {self._next_token}")
            self._next_token = first_token + num_tokens

    def finish(self, response: Response, asked_tokens: int) -> None:
        """The terminal event."""
        self._num_terminals += 1
        self.sample.total_s = self._clock() - self._began_s
        self.sample.input_tokens = response.usage.input_tokens
        self.sample.cached_tokens = response.usage.cached_tokens
        self.sample.output_tokens = response.usage.output_tokens
        if response.status == "failed":
            self.fail(response.error_code or "failed")
        elif response.usage.output_tokens != asked_tokens:
            self.fail(f"{response.usage.output_tokens} tokens instead of {asked_tokens}")
        elif "".join(self._texts) != response.text:
            self.fail("the deltas do not add up to the final text")

    def end(self) -> Sample:
        """The stream is over: what it amounts to."""
        if self._num_terminals != 1:
            self.fail(f"{self._num_terminals} terminal events")
        return self.sample

    def fail(self, reason: str) -> None:
        """Count the stream as an error; the first reason stays."""
        self.sample.error = self.sample.error or reason


def prompts(config: LoadConfig) -> Iterator[str]:
    """The prompt of every request: repeatable by the seed, and numbered, so that no two begin
    alike and none is found in the prefix cache."""
    source = random.Random(config.seed)
    for number in range(config.num_requests):
        yield " ".join([str(number), *source.choices(_WORDS, k=config.input_tokens - 1)])


async def run_load(config: LoadConfig, progress: Callable[[int], None]) -> dict[str, Any]:
    """Send every request, `concurrency` at once, and return the report.

    `progress` is called with the number of streams that have ended.
    """
    waiting = prompts(config)
    samples: list[Sample] = []
    worker = _socket_worker if config.transport == "ws" else _sse_worker

    def done(sample: Sample) -> None:
        samples.append(sample)
        progress(len(samples))

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(config.concurrency, config.num_requests)):
            group.create_task(worker(config, waiting, done))
    return summarise(config, samples, time.perf_counter() - began_s)


async def _socket_worker(
    config: LoadConfig, waiting: Iterator[str], done: Callable[[Sample], None]
) -> None:
    """One socket, one stream after another."""
    async with Client(config.url, key=config.key) as client:
        for prompt in waiting:
            meter = Meter()
            try:
                async for event in client.stream(**_params(config, prompt)):
                    if isinstance(event, TextDelta):
                        meter.delta(event.text, event.first_token, event.num_tokens)
                    elif isinstance(event, Finished):
                        meter.finish(event.response, config.output_tokens)
                    elif isinstance(event, ConnectionLost):
                        meter.sample.num_reconnects += 1
            except ClientError as error:
                meter.fail(_name_of(error))
            done(meter.end())


async def _sse_worker(
    config: LoadConfig, waiting: Iterator[str], done: Callable[[Sample], None]
) -> None:
    """One HTTP connection, one server-sent event stream after another."""
    headers = {"Authorization": f"Bearer {config.key}"} if config.key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:
        for prompt in waiting:
            meter = Meter()
            create = {**_params(config, prompt), "stream": True}
            try:
                async with http.post(f"{config.url}/v1/responses", json=create) as answer:
                    if answer.status != 200:
                        body = await answer.json(content_type=None)
                        raise RequestRefused.from_body(answer.status, body)
                    async for line in answer.content:
                        if line.startswith(b"data: {"):
                            _take_sse(meter, msgspec.json.decode(line[6:]), config)
            except (ClientError, aiohttp.ClientError, ValueError) as error:
                meter.fail(_name_of(error))
            done(meter.end())


def _take_sse(meter: Meter, event: Mapping[str, Any], config: LoadConfig) -> None:
    match event.get("type"):
        case "response.output_text.delta":
            meter.delta(event["delta"])
        case "response.completed" | "response.incomplete" | "response.failed":
            meter.finish(Response.from_wire(event["response"]), config.output_tokens)
        case "error":
            meter.fail(str(event.get("code") or (event.get("error") or {}).get("code")))


def _params(config: LoadConfig, prompt: str) -> CreateParams:
    return {
        "input": prompt,
        "max_output_tokens": config.output_tokens,
        "temperature": 0.0,
        "hillstar": {"ignore_eos": True, "category": "bench"},
    }


def _name_of(error: Exception) -> str:
    return error.code if isinstance(error, RequestRefused) else f"{type(error).__name__}: {error}"


def summarise(config: LoadConfig, samples: Sequence[Sample], wall_s: float) -> dict[str, Any]:
    """The report: one flat object. Figures count streams without errors only."""
    good = [sample for sample in samples if sample.error is None]
    errors = Counter(sample.error for sample in samples if sample.error is not None)
    num_output = sum(sample.output_tokens for sample in good)
    ttft_s = [sample.ttft_s for sample in good if sample.ttft_s is not None]
    itl_s = [value for sample in good for value in sample.itl_s]
    return {
        "transport": config.transport,
        "num_requests": config.num_requests,
        "concurrency": config.concurrency,
        "output_tokens": config.output_tokens,
        "seed": config.seed,
        "wall_s": round(wall_s, 3),
        "num_completed": len(good),
        "num_errors": sum(errors.values()),
        "errors": dict(errors),
        "num_reconnects": sum(sample.num_reconnects for sample in samples),
        "mean_input_tokens": round(sum(s.input_tokens for s in good) / max(len(good), 1), 1),
        "cached_tokens": sum(sample.cached_tokens for sample in good),
        "requests_per_s": round(len(good) / wall_s, 3),
        "output_tok_s": round(num_output / wall_s, 2),
        "ttft_p50_ms": percentile_ms(ttft_s, 50),
        "ttft_p99_ms": percentile_ms(ttft_s, 99),
        "itl_p50_ms": percentile_ms(itl_s, 50),
        "itl_p99_ms": percentile_ms(itl_s, 99),
    }


def percentile_ms(values_s: Sequence[float], percent: int) -> float | None:
    """The nearest-rank percentile in milliseconds; None of nothing."""
    if not values_s:
        return None
    ordered = sorted(values_s)
    rank = -(-percent * len(ordered) // 100)  # ceiling
    return round(1000 * ordered[max(rank, 1) - 1], 3)
