"""Which responses are live, whose they are, and how many of them a tenant may have."""

import asyncio
from collections import Counter

from hillstar.server.errors import server_overloaded
from hillstar.server.reads import Place


class Directory:
    """Response id → place, for unfinished responses and for those kept in memory only.

    Filled by the session actors, asked by the Hub; both on the event loop.
    """

    def __init__(self, *, max_responses: int, max_responses_per_tenant: int) -> None:
        self._max_responses = max_responses
        self._max_per_tenant = max_responses_per_tenant
        self._places: dict[str, Place] = {}
        self._unfinished: dict[str, str] = {}  # response id -> tenant
        self._per_tenant: Counter[str] = Counter()
        self._some_ended = asyncio.Event()

    def find(self, response_id: str) -> Place | None:
        return self._places.get(response_id)

    def admit(self, place: Place) -> None:
        """A new response. Raises ApiError server_overloaded."""
        if len(self._unfinished) >= self._max_responses:
            raise server_overloaded(
                f"The server has {self._max_responses} unfinished responses; try again soon."
            )
        if self._per_tenant[place.tenant] >= self._max_per_tenant:
            raise server_overloaded(
                f"You have {self._max_per_tenant} unfinished responses; let some finish first."
            )
        self.adopt(place)

    def adopt(self, place: Place) -> None:
        """An unfinished response from the journal: it was admitted once."""
        self._places[place.response_id] = place
        if place.response_id not in self._unfinished:
            self._unfinished[place.response_id] = place.tenant
            self._per_tenant[place.tenant] += 1

    def ended(self, response_id: str, *, keep: bool) -> None:
        """It counts no longer; `keep`: it can still be found here."""
        tenant = self._unfinished.pop(response_id, None)
        if tenant is not None:
            self._some_ended.set()
            self._per_tenant[tenant] -= 1
            if not self._per_tenant[tenant]:
                del self._per_tenant[tenant]
        if not keep:
            self._places.pop(response_id, None)

    async def wait_ended(self) -> None:
        """Return when a response has ended from now on."""
        self._some_ended.clear()
        await self._some_ended.wait()
