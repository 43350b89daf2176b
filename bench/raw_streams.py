"""A client process that takes as little of the machine as it can: sockets that keep what comes.

    python bench/raw_streams.py --port N --protocol NAME --sockets N [--lanes N] [--turns N]
        --tokens N --text FILE

It connects, says `ready`, and waits for a line. Then each lane of each socket asks for `turns`
responses of `tokens` tokens, one after the other; it says `ended` when all have. Only then is
what came decoded and checked: every stream whole, numbered without gaps, its tokens covered
without gaps where the protocol says them, one terminal event, last, and the text that of FILE.
The last line is what was counted, or the first fault. It leaves when its standard input ends.
"""

import argparse
import asyncio
import base64
import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvloop

TERMINAL = b"response.incomplete"  # of a response that ran to its length
FIN_TEXT, FIN_BINARY, CLOSE = 0x81, 0x82, 0x88
MASKED = 0x80


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every socket asks for."""

    protocol: str  # "" is OpenAI's
    lanes: int
    turns: int
    tokens: int


class RawSocket(asyncio.Protocol):
    """One WebSocket: the handshake, masked frames out, bytes in."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._is_upgraded = False
        self._num_asked = 0
        self._num_ended = 0
        self.upgraded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        key = base64.b64encode(os.urandom(16)).decode()
        offer = f"Sec-WebSocket-Protocol: {self._job.protocol}\r\n" if self._job.protocol else ""
        self._transport.write(
            "GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n"
            f"{offer}\r\n".encode()
        )

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self.upgraded, self.ended):
            if not future.done():
                future.set_exception(ConnectionError("the server hung up"))

    def data_received(self, data: bytes) -> None:
        if not self._is_upgraded:
            head, found, data = (bytes(self.data) + data).partition(b"\r\n\r\n")
            self.data[:] = data if found else head
            if found:
                assert b" 101 " in head.split(b"\r\n")[0], head.decode()
                self._is_upgraded = True
                self.upgraded.set_result(None)
            return
        start = max(0, len(self.data) - len(TERMINAL) + 1)
        self.data += data
        num_ended = self.data.count(TERMINAL, start)
        for _ in range(num_ended):
            self._num_ended += 1
            if self._num_asked < self._job.lanes * self._job.turns:
                self.ask()
        if num_ended and self._num_ended == self._job.lanes * self._job.turns:
            self.ended.set_result(None)

    def ask(self) -> None:
        """Create the next response."""
        request: dict[str, Any] = {
            "type": "response.create",
            "input": "Tell me of the sea.",
            "max_output_tokens": self._job.tokens,
        }
        if self._job.lanes > 1:
            request["stream_id"] = f"lane{self._num_asked % self._job.lanes}"
        self._num_asked += 1
        is_binary = self._job.protocol.endswith("msgpack")
        payload = msgspec.msgpack.encode(request) if is_binary else msgspec.json.encode(request)
        opcode = FIN_BINARY if is_binary else FIN_TEXT
        header = struct.pack(">BBH", opcode, MASKED | 126, len(payload))
        self._transport.write(header + bytes(4) + payload)  # a mask of zeros changes nothing

    def frames(self) -> Iterator[Any]:
        """What came, decoded."""
        data, at = memoryview(self.data), 0
        while at < len(data):
            opcode, length = data[at], data[at + 1]
            at += 2
            if length >= 126:
                size = 2 if length == 126 else 8
                length = int.from_bytes(data[at : at + size], "big")
                at += size
            payload = data[at : at + length]
            at += length
            if opcode == FIN_TEXT:
                yield msgspec.json.decode(payload)
            elif opcode == FIN_BINARY:
                yield msgspec.msgpack.decode(payload)
            else:
                raise AssertionError(f"a frame of opcode {opcode:#x}")


class Checked:
    """One response as it is read back."""

    def __init__(self) -> None:
        self.num_events = 0
        self.num_deltas = 0
        self.num_covered: int | None = 0  # None: the protocol does not say
        self.is_over = False
        self._texts: list[str] = []

    def take(self, event: Any, job: Job, text: str) -> None:
        """The next event. Raises AssertionError."""
        assert not self.is_over, "an event after the terminal one"
        if isinstance(event, list):
            _, _, number, _, _, delta, first_token, num_tokens = event
            event = {"type": "response.output_text.delta", "sequence_number": number}
            event |= {"delta": delta, "first_token": first_token, "num_tokens": num_tokens}
        assert event["sequence_number"] == self.num_events, "events are numbered without gaps"
        self.num_events += 1
        match event["type"]:
            case "response.output_text.delta":
                self.num_deltas += 1
                self._texts.append(event["delta"])
                if "first_token" in event:
                    assert event["first_token"] == self.num_covered, "tokens are missing"
                    self.num_covered = event["first_token"] + event["num_tokens"]
                else:
                    self.num_covered = None
            case "response.completed" | "response.incomplete" | "response.failed":
                self.is_over = True
                response = event["response"]
                assert response["status"] == "incomplete", response
                assert response["usage"]["output_tokens"] == job.tokens, response["usage"]
                said = response["output"][0]["content"][0]["text"]
                assert said == "".join(self._texts), "the deltas do not add up to the text"
                assert text.startswith(said), "not what the engine said"
                assert self.num_covered in (None, job.tokens), "tokens without a delta"


def check(sockets: list[RawSocket], job: Job, text: str) -> dict[str, int]:
    """Read everything back. Raises AssertionError for the first fault."""
    counts = {"responses": 0, "tokens": 0, "deltas": 0, "bytes": 0}
    for socket in sockets:
        responses: dict[Any, Checked] = {}
        counts["bytes"] += len(socket.data)
        for event in socket.frames():
            if isinstance(event, list):
                lane: Any = event[1]
            elif event["type"] == "response.created":
                lane = event.get("stream_id")
                responses[lane] = responses[event.get("hillstar", {}).get("r")] = Checked()
            else:
                lane = event.get("stream_id")
            response = responses[lane]
            response.take(event, job, text)
            if response.is_over:
                counts["responses"] += 1
                counts["tokens"] += job.tokens
                counts["deltas"] += response.num_deltas
    assert counts["responses"] == len(sockets) * job.lanes * job.turns, counts
    return counts


async def run(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    job = Job(
        protocol=options.protocol,
        lanes=options.lanes,
        turns=options.turns,
        tokens=options.tokens,
    )
    sockets: list[RawSocket] = []
    for _ in range(options.sockets):
        _, socket = await loop.create_connection(lambda: RawSocket(job), "127.0.0.1", options.port)
        await socket.upgraded
        sockets.append(socket)
    print("ready", flush=True)
    if not await asyncio.to_thread(sys.stdin.readline):
        return
    for socket in sockets:
        for _ in range(job.lanes):
            socket.ask()
    try:
        async with asyncio.timeout(options.timeout):
            await asyncio.gather(*(socket.ended for socket in sockets))
    except TimeoutError:
        print("late", bytes(sockets[0].data[-2000:]), file=sys.stderr)
        raise
    print("ended", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print(msgspec.json.encode(check(sockets, job, options.text.read_text())).decode(), flush=True)
    await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--protocol", default="", choices=("", "hillstar.v1.msgpack"))
    parser.add_argument("--sockets", type=int, required=True)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--timeout", type=float, default=120.0)
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
