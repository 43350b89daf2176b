"""An event loop beside a program that blocks: sockets stay alive while a person types."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines on a loop of its own; every method blocks the calling thread.

    Ctrl-C interrupts the caller, never the loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="hillstar-client", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        """What `source` yields, as it comes."""
        return _Arrivals(source, self._loop)


class _Arrivals(Iterator[T]):
    """A blocking view of an async iterator. An interrupt leaves it usable."""

    def __init__(self, source: AsyncIterator[T], loop: asyncio.AbstractEventLoop) -> None:
        self._items: queue.SimpleQueue[T | BaseException] = queue.SimpleQueue()
        asyncio.run_coroutine_threadsafe(self._pump(source), loop)

    async def _pump(self, source: AsyncIterator[T]) -> None:
        try:
            async for item in source:
                self._items.put(item)
        except Exception as error:  # it belongs to the reading thread
            self._items.put(error)
        else:
            self._items.put(StopIteration())

    def __next__(self) -> T:
        item = self._items.get()
        if isinstance(item, BaseException):
            raise item
        return item


async def _cancel_others() -> None:
    """End every other task of the running loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
