"""Background work with an owner: nothing is started that nobody ends."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Tasks:
    """The running tasks of one owner, ended with it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(
        self, work: Coroutine[Any, Any, None], failed: Callable[[BaseException], None]
    ) -> None:
        """Run `work`; `failed` is called with what it raises, unless it was cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                failed(error)

        task.add_done_callback(done)

    async def close(self) -> None:
        """Cancel what still runs and wait for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
