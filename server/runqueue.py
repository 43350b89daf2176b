"""Plain callbacks that run soon, on one wake-up of the loop however many there are.

Sessions handle their mail this way, and sockets send this way what one turn of the loop has put
into their outboxes.
"""

import asyncio
from collections import deque
from collections.abc import Callable

MAX_SLICE_S = 0.005  # of the loop's time before other callbacks have theirs
MAX_UNTIMED = 8  # between two looks at the clock


class RunQueue:
    """What is to run, in order of when it was added."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready: deque[Callable[[], bool]] = deque()
        self._scheduled = False

    def add(self, run: Callable[[], bool]) -> None:
        """Have `run` called soon, and again for as long as it returns True."""
        self._ready.append(run)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Run what is ready. One that raises is the loop's to report: the others go on."""
        deadline = self._loop.time() + MAX_SLICE_S
        ready = self._ready
        try:
            while ready:
                for _ in range(min(len(ready), MAX_UNTIMED)):
                    run = ready.popleft()
                    if run():
                        ready.append(run)
                if self._loop.time() >= deadline:
                    break
        finally:
            self._scheduled = bool(ready)
            if ready:
                self._loop.call_soon(self._drain)
