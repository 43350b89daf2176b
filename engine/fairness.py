"""Who is next: priority first, then the tenant that has had least, then who came first.

Between tenants of equal priority each is owed the same number of tokens over time; the counters
follow Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), section 4: a tenant
pays for every token computed for it, and one that comes back after a pause starts no lower than
those who stayed, so idling saves nothing up.

Nobody starves. A sequence's level rises by one every `AGING_S` seconds that it has existed, up to
the highest level now waiting; there the least served tenant comes first, and within a tenant the
oldest sequence. So it is overtaken only for a bounded time.
"""

import bisect
import heapq
from collections.abc import Iterator

from hillstar.engine.sequence import Sequence

AGING_S = 10.0


class TenantShares:
    """Owns how many tokens each tenant has been served. Called by the scheduler."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._num_sequences: dict[str, int] = {}  # tenants with any, only

    def enter(self, tenant: str) -> None:
        """A sequence of the tenant has come."""
        if tenant not in self._num_sequences:
            floor = min((self._served[other] for other in self._num_sequences), default=0)
            self._served[tenant] = max(self._served.get(tenant, 0), floor)
            self._num_sequences[tenant] = 0
        self._num_sequences[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A sequence of the tenant has ended."""
        self._num_sequences[tenant] -= 1
        if not self._num_sequences[tenant]:
            del self._num_sequences[tenant]

    def charge(self, tenant: str, num_tokens: int) -> None:
        self._served[tenant] += num_tokens

    def served(self, tenant: str) -> int:
        return self._served[tenant]


class WaitingQueue:
    """Owns the waiting sequences. One list per tenant and standing, in order of arrival."""

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self._groups: dict[tuple[str, int], list[Sequence]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, sequence: Sequence) -> None:
        """Enter, at the place its arrival gives it: who had to give way is first again."""
        group = self._groups.setdefault((sequence.tenant, sequence.standing), [])
        bisect.insort(group, sequence, key=_arrival)
        self._length += 1

    def remove(self, sequence: Sequence) -> None:
        key = (sequence.tenant, sequence.standing)
        group = self._groups[key]
        index = bisect.bisect_left(group, sequence.arrival, key=_arrival)
        assert group[index] is sequence, f"{sequence.sequence_id} is not waiting"
        del group[index]
        if not group:
            del self._groups[key]
        self._length -= 1

    def candidates(self, now_s: float) -> Iterator[Sequence]:
        """All waiting sequences, the most deserving first; lazily, from one moment's order.

        What has been yielded may be removed meanwhile, and tenants may be charged: that moves
        the tenant's other sequences back.
        """
        if not self._groups:
            return
        top = max(standing for _, standing in self._groups)

        def entry(group: list[Sequence], index: int) -> tuple[int, int, int, int, list[Sequence]]:
            sequence = group[index]
            aged = sequence.standing + int((now_s - sequence.arrived_s) / AGING_S)
            served = self._shares.served(sequence.tenant)
            return (-min(aged, top), served, sequence.arrival, index, group)

        heap = [entry(list(group), 0) for group in self._groups.values()]
        heapq.heapify(heap)
        while heap:
            _, _, _, index, group = heap[0]
            yield group[index]
            if index + 1 < len(group):
                heapq.heapreplace(heap, entry(group, index + 1))
            else:
                heapq.heappop(heap)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
