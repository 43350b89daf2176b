"""What /metrics says: names, labels, counters that never fall, histograms that add up."""

import json
import logging
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hillstar.engine.messages import EngineStats
from hillstar.server.logs import JsonFormatter, current_request_id
from hillstar.server.metrics import LatencyHistogram, Metrics
from hillstar.server.ports import HubStats
from support.fake_engine import FakeEngine
from support.hub_world import world

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(metrics: Metrics, stats: HubStats, num_connections: int = 0) -> Samples:
    """The page, parsed by Prometheus' own parser."""
    text = metrics.exposition(stats, num_connections).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def test_every_promised_metric_is_there() -> None:
    """The page has each documented name from the first scrape on."""
    samples = scrape(Metrics(), HubStats())
    names = {name for name, _ in samples}
    assert names >= {
        "hillstar_kv_blocks",
        "hillstar_sequences",
        "hillstar_prefill_tokens_total",
        "hillstar_cached_tokens_total",
        "hillstar_generated_tokens_total",
        "hillstar_preemptions_total",
        "hillstar_engine_restarts_total",
        "hillstar_connections",
        "hillstar_sessions",
        "hillstar_kv_waste_ratio",
        "hillstar_time_to_first_token_seconds_bucket",
        "hillstar_inter_token_latency_seconds_count",
        "hillstar_step_seconds_sum",
        "hillstar_draft_proposed_tokens_total",
        "hillstar_draft_accepted_tokens_total",
    }
    for state in ("waiting", "running", "parked"):
        assert value(samples, "hillstar_sequences", state=state) == 0
    for state in ("awake", "parked", "hibernated"):
        assert value(samples, "hillstar_sessions", state=state) == 0


def test_gauges_are_of_this_instant() -> None:
    """Gauges repeat what the snapshot says; waste is what leased slots do not hold."""
    engine = EngineStats(
        blocks_free=5,
        blocks_cached=3,
        blocks_leased=2,
        running=4,
        kv_tokens_used=24,
        kv_tokens_capacity=32,
    )
    stats = HubStats(engine_state="ready", engine=engine, num_sessions={"awake": 7})
    samples = scrape(Metrics(), stats, num_connections=9)
    for state, count in (("free", 5), ("cached", 3), ("leased", 2)):
        assert value(samples, "hillstar_kv_blocks", tier="gpu", state=state) == count
    assert value(samples, "hillstar_sequences", state="running") == 4
    assert value(samples, "hillstar_sessions", state="awake") == 7
    assert value(samples, "hillstar_connections") == 9
    assert value(samples, "hillstar_kv_waste_ratio") == pytest.approx(0.25)
    assert value(samples, "hillstar_ready") == 1


def test_draft_tokens_are_counted_by_draft() -> None:
    """What was drafted and what of it was right carry the name of the draft."""
    engine = EngineStats(num_drafted_tokens_total=7, num_accepted_tokens_total=5)
    samples = scrape(Metrics(), HubStats(engine_state="ready", engine=engine))
    assert value(samples, "hillstar_draft_proposed_tokens_total", draft="lookup") == 7
    assert value(samples, "hillstar_draft_accepted_tokens_total", draft="lookup") == 5


async def test_counters_go_on_over_an_engines_death(tmp_path: Path) -> None:
    """A fresh engine counts from 0; the page adds what the dead ones had reached, to the last."""
    async with world(tmp_path, engine=FakeEngine(auto=False)) as made:
        metrics = Metrics()

        def total(name: str) -> float:
            return value(scrape(metrics, made.hub.stats()), f"hillstar_{name}_total")

        def frame(count: int) -> None:
            made.engine.say(EngineStats(num_generated_tokens_total=count, num_steps_total=1))

        frame(10)
        assert total("generated_tokens") == 10
        frame(15)  # nobody has looked when it dies
        made.engine.die()
        assert total("generated_tokens") == 15
        frame(40)
        made.engine.die()
        frame(2)
        assert (total("generated_tokens"), total("steps")) == (57, 3)


def test_histograms_are_cumulative() -> None:
    """A duration counts in every bucket at or above it, and once in count and sum."""
    metrics = Metrics()
    for seconds in (0.01, 0.011, 99.0):
        metrics.ttft(seconds)
    samples = scrape(metrics, HubStats())
    name = "hillstar_time_to_first_token_seconds"
    assert value(samples, f"{name}_bucket", le="0.005") == 0
    assert value(samples, f"{name}_bucket", le="0.01") == 1
    assert value(samples, f"{name}_bucket", le="0.025") == 2
    assert value(samples, f"{name}_bucket", le="+Inf") == 3
    assert value(samples, f"{name}_count") == 3
    assert value(samples, f"{name}_sum") == pytest.approx(99.021)


def test_a_step_is_counted_at_once() -> None:
    """Many durations together count as each of them would alone."""
    durations = [0.003, 0.003, 0.5, 0.003]
    alone, together = (LatencyHistogram("h", "h", (0.01, 1.0)) for _ in range(2))
    for seconds in durations:
        alone.observe(seconds)
    together.observe_all(durations)
    samples = [sample.value for sample in together.collect().samples]
    assert samples == pytest.approx([sample.value for sample in alone.collect().samples])
    assert samples[:2] == [3, 4]


def test_bounds_are_inclusive() -> None:
    """A duration equal to a bound belongs to that bound's bucket, as Prometheus has it."""
    histogram = LatencyHistogram("h", "h", (1.0, 2.0))
    histogram.observe(1.0)
    buckets = {s.labels.get("le"): s.value for s in histogram.collect().samples}
    assert buckets["1.0"] == 1


def test_logs_are_lines_of_json_with_ids_alone() -> None:
    """A record is one JSON object with the ids it is about; other extras are not written."""
    record = logging.LogRecord("n", logging.WARNING, "f", 1, "failed: %s\n2", ("x",), None)
    record.response_id = "resp_1"
    record.prompt = "secret"
    token = current_request_id.set("req_1")
    try:
        line = JsonFormatter().format(record)
    finally:
        current_request_id.reset(token)
    assert "\n" not in line
    parsed = json.loads(line)
    assert parsed["message"] == "failed: x\n2"
    assert (parsed["level"], parsed["response_id"]) == ("warning", "resp_1")
    assert parsed["request_id"] == "req_1"
    assert "secret" not in line
