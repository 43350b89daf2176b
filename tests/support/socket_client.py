"""A thin client for socket tests: frames as dictionaries, waits with a deadline."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from aiohttp import WSMsgType

WAIT_S = 10.0


class SocketClient:
    """One socket, JSON unless `binary`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, *, binary: bool = False) -> None:
        self.socket = socket
        self._binary = binary

    async def send(self, kind: str, **fields: Any) -> None:
        frame = {"type": kind, **fields}
        if self._binary:
            await self.socket.send_bytes(msgspec.msgpack.encode(frame))
        else:
            await self.socket.send_str(msgspec.json.encode(frame).decode())

    async def receive(self) -> Any:
        """The next frame's value; a close is an AssertionError that shows its code."""
        message = await self.socket.receive(WAIT_S)
        if message.type is WSMsgType.TEXT:
            return msgspec.json.decode(message.data)
        assert message.type is WSMsgType.BINARY, f"closed: {message} {self.socket.close_code}"
        return msgspec.msgpack.decode(message.data)

    async def until(self, *kinds: str) -> list[Any]:
        """Frames up to the first whose type is among `kinds`, that one included."""
        frames = []
        while True:
            frames.append(await self.receive())
            if isinstance(frames[-1], dict) and frames[-1]["type"] in kinds:
                return frames

    async def response(self, **fields: Any) -> list[dict[str, Any]]:
        """Create a response and return all its events."""
        await self.send("response.create", **fields)
        return await self.until("response.completed", "response.incomplete", "response.failed")

    async def close_code(self) -> int | None:
        """Read to the end; the code the server closed with."""
        async with asyncio.timeout(WAIT_S):
            async for _ in self.socket:
                pass
        return self.socket.close_code


@asynccontextmanager
async def connect(
    url: str, protocol: str | None = None, headers: Mapping[str, str] | None = None, **options: Any
) -> AsyncIterator[SocketClient]:
    """A socket under `protocol`."""
    protocols = () if protocol is None else (protocol,)
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(url, protocols=protocols, headers=headers, **options) as socket,
    ):
        yield SocketClient(socket, binary=protocol == "hillstar.v1.msgpack")


def text_of(frames: list[dict[str, Any]]) -> str:
    """The deltas of JSON events, joined."""
    return "".join(f["delta"] for f in frames if f["type"] == "response.output_text.delta")
