"""Waiting for a condition without naming a duration."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Let the loop run until `condition` holds; TimeoutError if it never does."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - any state may be asked for, not only events
            await asyncio.sleep(0.001)
