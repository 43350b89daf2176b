"""Who is next in the queue."""

import numpy as np

from hillstar.engine.fairness import AGING_S, TenantShares, WaitingQueue
from hillstar.engine.messages import SamplingParams
from hillstar.engine.sequence import Sequence
from hillstar.engine.tokens import HashChain, TokenBuffer, root_hash


class Bench:
    def __init__(self) -> None:
        self.shares = TenantShares()
        self.queue = WaitingQueue(self.shares)
        self.count = 0

    def push(
        self, name: str, *, tenant: str = "t", priority: int = 0, arrived_s: float = 0.0
    ) -> Sequence:
        tokens = TokenBuffer(np.array([1]))
        sequence = Sequence(
            sequence_id=name,
            tenant=tenant,
            priority=priority,
            params=SamplingParams(max_tokens=1),
            lease_id=None,
            tokens=tokens,
            chain=HashChain(root_hash(b"", b""), tokens, 8),
            num_prompt_tokens=1,
            max_output_tokens=1,
            stop_ids=frozenset(),
            arrival=self.count,
            arrived_s=arrived_s,
            resting_id=None,
        )
        self.count += 1
        self.shares.enter(tenant)
        self.queue.push(sequence)
        return sequence

    def order(self, now_s: float = 0.0) -> list[str]:
        return [sequence.sequence_id for sequence in self.queue.candidates(now_s)]


def test_priority_comes_before_arrival() -> None:
    """The most urgent first; among equals who came first."""
    bench = Bench()
    for name, priority in (("a", 0), ("b", 2), ("c", 1), ("d", 2)):
        bench.push(name, priority=priority)
    assert bench.order() == ["b", "d", "c", "a"]


def test_waiting_raises_a_sequence_to_the_highest_level_and_no_further() -> None:
    """Old enough, it stands level with the urgent ones, where arrival decides."""
    bench = Bench()
    bench.push("old", priority=0)
    bench.push("urgent", priority=2, arrived_s=2 * AGING_S - 2)
    assert bench.order(2 * AGING_S - 1) == ["urgent", "old"]
    assert bench.order(2 * AGING_S) == ["old", "urgent"]


def test_who_gave_way_comes_back_to_its_place() -> None:
    """One level higher, and by its old arrival."""
    bench = Bench()
    first = bench.push("first")
    bench.push("second")
    bench.push("urgent", priority=1)
    assert bench.order() == ["urgent", "first", "second"]
    bench.queue.remove(first)
    first.num_preemptions += 1
    bench.queue.push(first)
    assert bench.order() == ["first", "urgent", "second"]
    assert len(bench.queue) == 3


def test_the_tenant_that_was_served_least_comes_first() -> None:
    """Charges between two candidates already count."""
    bench = Bench()
    for number in range(3):
        bench.push(f"a{number}", tenant="a")
    for number in range(3):
        bench.push(f"b{number}", tenant="b")
    order = []
    for sequence in bench.queue.candidates(0.0):
        order.append(sequence.sequence_id)
        bench.shares.charge(sequence.tenant, 10)
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_idling_saves_nothing_up() -> None:
    """A tenant that comes back starts no lower than the least served one that stayed."""
    shares = TenantShares()
    shares.enter("idle")
    shares.leave("idle")
    shares.enter("busy")
    shares.charge("busy", 1000)
    shares.enter("idle")
    assert shares.served("idle") == 1000
    shares.leave("idle")
    shares.charge("busy", 1000)
    shares.enter("idle")
    assert shares.served("idle") == 2000


def test_candidates_may_be_removed_while_they_are_looked_at() -> None:
    """Admission takes sequences out as it goes."""
    bench = Bench()
    for number in range(4):
        bench.push(f"s{number}", tenant="ab"[number % 2])
    for sequence in bench.queue.candidates(0.0):
        bench.queue.remove(sequence)
    assert len(bench.queue) == 0
    assert bench.order() == []
