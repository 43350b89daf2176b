"""The load generator measures what happened and counts what is wrong."""

from collections import deque
from typing import Any, Literal

import pytest

from hillstar.clients.events import Response
from hillstar.clients.load import LoadConfig, Meter, percentile_ms, prompts, run_load
from support.fake_server import ANSWER, FakeServer, Script


def config(url: str, transport: Literal["ws", "sse"] = "ws", **changes: Any) -> LoadConfig:
    settings: dict[str, Any] = {
        "num_requests": 6,
        "concurrency": 3,
        "input_tokens": 5,
        "output_tokens": len(ANSWER),
    }
    return LoadConfig(url=url, transport=transport, **(settings | changes))


def response(text: str = "ab", output_tokens: int = 2, status: str = "completed") -> Response:
    return Response.from_wire(
        {
            "id": "resp_1",
            "status": status,
            "output": [{"type": "message", "content": [{"type": "output_text", "text": text}]}],
            "usage": {"input_tokens": 3, "output_tokens": output_tokens},
        }
    )


class Clock:
    def __init__(self, *times_s: float) -> None:
        self._times_s = iter(times_s)

    def __call__(self) -> float:
        return next(self._times_s)


@pytest.mark.parametrize("transport", ["ws", "sse"])
async def test_a_run_reports_throughput_and_latency(transport: Literal["ws", "sse"]) -> None:
    """Every stream is counted, with its tokens and times, whatever the transport."""
    done: list[int] = []
    async with FakeServer(Script()) as server:
        report = await run_load(config(server.url, transport), done.append)
    assert (report["num_completed"], report["num_errors"]) == (6, 0)
    assert report["output_tok_s"] > 0
    assert report["ttft_p50_ms"] <= report["ttft_p99_ms"]
    assert report["itl_p50_ms"] <= report["itl_p99_ms"]
    assert report["cached_tokens"] == 18
    assert done == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("transport", ["ws", "sse"])
async def test_refusals_are_counted_by_code(transport: Literal["ws", "sse"]) -> None:
    """A refused stream is an error under the server's code, and no figure counts it."""
    script = Script(refuse={"code": "server_overloaded", "message": "busy"})
    async with FakeServer(script) as server:
        report = await run_load(config(server.url, transport), lambda _: None)
    assert report["errors"] == {"server_overloaded": 6}
    assert report["output_tok_s"] == 0
    assert report["ttft_p50_ms"] is None


async def test_other_tokens_than_asked_for_are_an_error() -> None:
    """Usage must be what was asked for."""
    async with FakeServer(Script()) as server:
        report = await run_load(config(server.url, output_tokens=99), lambda _: None)
    assert report["errors"] == {"10 tokens instead of 99": 6}


async def test_reconnects_are_counted_and_are_no_error() -> None:
    """A cut stream that was resumed is whole, and the cut is in the report."""
    async with FakeServer(Script(cuts=deque([6]))) as server:
        report = await run_load(config(server.url, concurrency=1), lambda _: None)
    assert (report["num_errors"], report["num_reconnects"]) == (0, 1)


def test_times_are_per_token() -> None:
    """A delta of several tokens spreads its time over them; the first gives the TTFT."""
    meter = Meter(Clock(10.0, 10.5, 11.5, 12.0))
    meter.delta("a", 0, 1)
    meter.delta("bcde", 1, 4)
    meter.finish(response("abcde", 5), 5)
    sample = meter.end()
    assert sample.error is None
    assert sample.ttft_s == 0.5
    assert sample.itl_s == [0.25] * 4
    assert sample.total_s == 2.0


def test_a_gap_between_deltas_is_an_error() -> None:
    """Deltas must be contiguous."""
    meter = Meter()
    meter.delta("a", 0, 1)
    meter.delta("b", 2, 1)
    meter.finish(response(), 2)
    assert meter.end().error == "a delta begins at token 2, not 1"


def test_deltas_must_add_up_to_the_text() -> None:
    """The final text is the concatenation of the deltas."""
    meter = Meter()
    meter.delta("a", 0, 1)
    meter.finish(response(), 2)
    assert meter.end().error == "the deltas do not add up to the final text"


@pytest.mark.parametrize("num_terminals", [0, 2])
def test_there_is_exactly_one_terminal_event(num_terminals: int) -> None:
    """None, or more than one, is an error."""
    meter = Meter()
    meter.delta("ab", 0, 2)
    for _ in range(num_terminals):
        meter.finish(response(), 2)
    assert meter.end().error == f"{num_terminals} terminal events"


def test_prompts_are_distinct_and_repeatable() -> None:
    """The seed decides the prompts; no two begin alike, so none is found in the cache."""
    first = list(prompts(config("http://x", num_requests=20, input_tokens=8)))
    assert first == list(prompts(config("http://x", num_requests=20, input_tokens=8)))
    assert len({prompt.split()[0] for prompt in first}) == 20
    assert all(len(prompt.split()) == 8 for prompt in first)


def test_percentiles_are_the_nearest_rank() -> None:
    """p50 of four values is the second, p99 the last; nothing has none."""
    values = [0.004, 0.001, 0.003, 0.002]
    assert (percentile_ms(values, 50), percentile_ms(values, 99)) == (2.0, 4.0)
    assert percentile_ms([], 50) is None
