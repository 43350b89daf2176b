"""What an engine writes to stderr goes to our log, line by line."""

import asyncio
import logging
from typing import cast

MAX_LOG_LINE = 8192
LAST_WORDS_S = 1.0  # for what an engine has written, once it is gone

log = logging.getLogger(__name__)


class EngineLog(asyncio.Protocol):
    """The reading end of one engine's stderr, a Unix socket."""

    def __init__(self) -> None:
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._rest = b""

    async def close(self) -> None:
        """The engine is gone: read to the end and stop. What it has started, a compiler say, may
        live on and hold the other end open: that is not waited for."""
        if self._transport is None:
            return
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self._ended
        except TimeoutError:
            log.info("something that the engine has started lives on")
        finally:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LOG_LINE:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            _log_line(line)

    def connection_lost(self, exc: Exception | None) -> None:
        _log_line(self._rest)
        if not self._ended.done():
            self._ended.set_result(None)


def _log_line(line: bytes) -> None:
    if line.strip():
        log.info("engine: %s", line[:MAX_LOG_LINE].decode("utf-8", "replace").rstrip())
