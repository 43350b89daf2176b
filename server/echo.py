"""`/debug/echo` (with `--debug` alone): a plain echo through the real socket's settings.

It shows what the network, a proxy or a client makes of frames, with nothing else behind it.
"""

import asyncio

from aiohttp import WSMsgType, web

from hillstar.server.front import Front, forgive_cancellation
from hillstar.server.handshake import check_handshake
from hillstar.server.outbox import Outbox
from hillstar.server.ports import Principal
from hillstar.server.socket import (
    CLOSE_OK,
    CLOSE_TOO_SLOW,
    Socket,
    SocketSink,
    bound_send_buffer,
    frame,
    linger,
)


async def echo_socket(
    front: Front, principal: Principal, request: web.Request
) -> web.StreamResponse:
    """Send every text and binary frame back."""
    check_handshake(request)
    with front.connections:
        socket = Socket(front.limits, front.config.max_frame_bytes)
        writer = await socket.prepare(request)
        bound_send_buffer(request)
        outbox = Outbox(SocketSink(socket, request, writer), front.limits, front.departures)

        async def write() -> None:
            code = CLOSE_OK if await outbox.run() else CLOSE_TOO_SLOW
            await socket.close(code=code, drain=False)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(write())
            try:
                await _read(socket, outbox)
            except asyncio.CancelledError:
                forgive_cancellation()  # the connection was lost
            outbox.finish()
        await linger(request, front.limits.close_timeout_s)
    return socket


async def _read(socket: Socket, outbox: Outbox) -> None:
    while True:
        message = await socket.receive()
        if message.type is WSMsgType.TEXT:
            outbox.put(frame(WSMsgType.TEXT, message.data.encode()))
        elif message.type is WSMsgType.BINARY:
            outbox.put(frame(WSMsgType.BINARY, message.data))
        elif message.type is WSMsgType.PING:
            outbox.put(frame(WSMsgType.PONG, bytes(message.data)))
        elif message.type is not WSMsgType.PONG:
            return
