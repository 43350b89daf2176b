"""What /metrics says. Latencies are observed as they happen, everything else is read on demand.

A histogram here is two list operations an observation (0.3 µs; the client library's takes a lock
and a linear search, 2 µs), and inter-token latencies are counted for a whole step at once.
Everything runs on the server's event loop.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest

from hillstar.engine.messages import EngineStats
from hillstar.server.ports import HubStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TTFT_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
STEP_BOUNDS_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.2, 0.5, 1.0, 5.0),
)


class LatencyHistogram:
    """Counts of durations in seconds between fixed bounds."""

    def __init__(self, name: str, documentation: str, bounds_s: tuple[float, ...]) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def observe_all(self, durations_s: Sequence[float]) -> None:
        """Count many at once; those of one step of the engine are mostly equal."""
        for seconds, count in Counter(durations_s).items():
            self._counts[bisect_left(self._bounds_s, seconds)] += count
            self._sum_s += count * seconds

    def collect(self) -> Metric:
        """The histogram as Prometheus has it: cumulative counts and the sum."""
        cumulative: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*map(str, self._bounds_s), "+Inf"), self._counts, strict=True):
            total += count
            cumulative.append((bound, float(total)))
        family = HistogramMetricFamily(self._name, self._documentation)
        family.add_metric([], cumulative, self._sum_s)
        return family


class Metrics:
    """The server's metrics with their own registry. Is the `Observer` of the Hub."""

    def __init__(self) -> None:
        self._ttft = LatencyHistogram(
            "hillstar_time_to_first_token_seconds",
            "From the acceptance of a response to its first output token.",
            TTFT_BOUNDS_S,
        )
        self._itl = LatencyHistogram(
            "hillstar_inter_token_latency_seconds",
            "Between two batches of one response's tokens, divided by the tokens.",
            STEP_BOUNDS_S,
        )
        self._step = LatencyHistogram(
            "hillstar_step_seconds", "Duration of one step of the engine.", STEP_BOUNDS_S
        )
        self.ttft = self._ttft.observe
        self.itl = self._itl.observe_all
        self.step = self._step.observe
        self.num_slow_readers = 0  # sockets and streams closed for not reading

    def exposition(self, stats: HubStats, num_connections: int) -> bytes:
        """The whole page in Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Page(list(self._families(stats, num_connections))))
        return generate_latest(registry)

    def _families(self, stats: HubStats, num_connections: int) -> Iterator[Metric]:
        yield from _engine_gauges(stats.engine)
        yield from _engine_counters(stats.engine)
        for name, documentation, total in (
            ("hillstar_engine_restarts", "Engines that died.", stats.num_engine_restarts),
            ("hillstar_actor_restarts", "Session actors that failed.", stats.num_actor_restarts),
            ("hillstar_journal_commits", "Batches written.", stats.num_journal_commits),
            ("hillstar_journal_tokens", "Tokens written.", stats.num_journal_tokens),
            ("hillstar_slow_readers", "Peers cut for not reading.", self.num_slow_readers),
        ):
            yield CounterMetricFamily(name, documentation, value=total)
        yield _gauge("hillstar_connections", "Open sockets and streams.", num_connections)
        yield _labelled(
            "hillstar_sessions",
            "Conversations by the state of their session.",
            {"awake": 0, "parked": 0, "hibernated": 0} | dict(stats.num_sessions),
        )
        yield _labelled(
            "hillstar_responses",
            "Unfinished responses by state.",
            {"queued": 0, "running": 0, "parked": 0} | dict(stats.num_responses),
        )
        yield _gauge("hillstar_ready", "1 while the engine takes work.", int(is_ready(stats)))
        yield from (self._ttft.collect(), self._itl.collect(), self._step.collect())


def is_ready(stats: HubStats) -> bool:
    """Whether new work is welcome: the engine runs, the journal writes, nobody is leaving."""
    return stats.engine_state == "ready" and stats.storage_available and not stats.draining


class _Page:
    """One scrape's families, as a collector."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _engine_counters(stats: EngineStats) -> Iterator[Metric]:
    for name, documentation, total in (
        ("hillstar_prefill_tokens", "Prompt tokens computed.", stats.num_prefill_tokens_total),
        (
            "hillstar_cached_tokens",
            "Prompt tokens whose KV was found.",
            stats.num_cached_tokens_total,
        ),
        ("hillstar_generated_tokens", "Output tokens.", stats.num_generated_tokens_total),
        (
            "hillstar_preemptions",
            "Sequences that had to leave the batch.",
            stats.num_preemptions_total,
        ),
        ("hillstar_steps", "Steps of the engine.", stats.num_steps_total),
    ):
        yield CounterMetricFamily(name, documentation, value=total)
    for name, documentation, total in (
        (
            "hillstar_draft_proposed_tokens",
            "Tokens guessed ahead.",
            stats.num_drafted_tokens_total,
        ),
        (
            "hillstar_draft_accepted_tokens",
            "Guesses that were right.",
            stats.num_accepted_tokens_total,
        ),
    ):
        drafts = CounterMetricFamily(name, documentation, labels=["draft"])
        drafts.add_metric(["lookup"], total)
        yield drafts


def _engine_gauges(stats: EngineStats) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "hillstar_kv_blocks", "KV blocks by tier and state.", labels=["tier", "state"]
    )
    for state, count in (
        ("free", stats.blocks_free),
        ("cached", stats.blocks_cached),
        ("leased", stats.blocks_leased),
    ):
        blocks.add_metric(["gpu", state], count)
    yield blocks
    yield _labelled(
        "hillstar_sequences",
        "Sequences in the engine by state.",
        {"waiting": stats.waiting, "running": stats.running, "parked": stats.parked},
    )
    capacity = stats.kv_tokens_capacity
    waste = 1 - stats.kv_tokens_used / capacity if capacity else 0.0
    yield _gauge("hillstar_kv_waste_ratio", "Share of leased KV slots without a token.", waste)


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(name, documentation, value=value)


def _labelled(name: str, documentation: str, by_state: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=["state"])
    for state, value in by_state.items():
        family.add_metric([state], value)
    return family
