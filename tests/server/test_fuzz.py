"""Anything may arrive: the answer is typed, the server lives, nothing piles up."""

import json
import random
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import WSMsgType

from support.server import Running, fake_engine_server, fake_hub_server
from support.socket_client import connect
from support.wait import until

WORDS = (
    *("type", "response.create", "response.cancel", "hillstar.resume", "hillstar.ack", "input"),
    *("hillstar.hint", "stream_id", "response_id", "previous_response_id", "conversation", "user"),
    *("model", "hillstar", "temperature", "role", "content", "max_output_tokens", "", "\x00", "é"),
    *("metadata", "stop", "store", "generate", "include", "tools", "instructions", "typing"),
)
HOSTILE = (
    b"",
    b"\x00",
    b"null",
    b"[]",
    b'""',
    b"{",
    b"[" * 100_000,
    b'{"type":' * 5000,
    b'{"type":"response.create","input":"\\ud800"}',
    b'{"type":"response.create","input":[{"role":"user","content":[[]]}]}',
    b'{"type":"response.create","max_output_tokens":1e400}',
    b'{"type":"response.create","input":"x","temperature":NaN}',
    b'{"type":"response.create","input":"x","stream_id":"' + b"a" * 300 + b'"}',
    b'{"type":{"$ref":1}}',
)


def value(rng: random.Random, depth: int = 0) -> Any:
    """A random JSON value, rich in words that mean something."""
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind == 1:
        return rng.choice((0, -1, 1, 1.5, 2**31, -(2**63), 1e308, 0.1))
    if kind < 6:
        return rng.choice(WORDS)
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(WORDS): value(rng, depth + 1) for _ in range(rng.randrange(6))}


def frame(rng: random.Random) -> Any:
    """A frame that often gets past the first checks."""
    body = value(rng)
    if isinstance(body, dict) and rng.random() < 0.8:
        body["type"] = rng.choice(WORDS[1:6])
        if rng.random() < 0.5:
            body["input"] = "x"
            body["max_output_tokens"] = 2
    return body


def mangled(rng: random.Random, data: bytes) -> bytes:
    """The data with some bytes changed, cut or doubled."""
    out = bytearray(data)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(3):
            case 0:
                out[at:at] = rng.randbytes(rng.randrange(1, 4))
            case 1:
                del out[at : at + rng.randrange(1, 8)]
            case _:
                out[at:at] = out[: rng.randrange(16)]
    return bytes(out)


async def still_serves(running: Running[Any], protocol: str | None) -> None:
    """A fresh socket gets a whole response, and everything that was open is gone."""
    async with connect(running.socket_url, protocol) as client:
        frames = await client.response(input="alive", max_output_tokens=4)
        assert frames[-1]["type"] in ("response.completed", "response.incomplete")
    await until(lambda: running.front.connections.num_open == 0 and not running.front.peers)


@pytest.mark.parametrize("protocol", [None, "hillstar.v1.json", "hillstar.v1.msgpack"])
async def test_random_frames_are_answered_or_refused(tmp_path: Path, protocol: str | None) -> None:
    """Whatever a socket gets it answers with events or typed errors, and lives on."""
    rng = random.Random(f"frames {protocol}")
    encode = msgspec.msgpack.encode if protocol == "hillstar.v1.msgpack" else msgspec.json.encode
    async with fake_engine_server(tmp_path) as running:
        for _ in range(20):
            async with connect(running.socket_url, protocol) as client:
                for _ in range(20):
                    data = mangled(rng, encode(frame(rng)))
                    if protocol == "hillstar.v1.msgpack" or rng.random() < 0.1:
                        await client.socket.send_bytes(data)
                    else:
                        await client.socket.send_str(data.decode("utf-8", "replace"))
                await client.send("no.such.event", stream_id="end")
                while True:
                    answer = await client.receive()
                    if isinstance(answer, dict) and answer["type"] == "error":
                        assert answer["error"]["code"]
                        assert 400 <= answer["status"] < 500, answer
                        if answer.get("stream_id") == "end":
                            break
        await still_serves(running, protocol)


@pytest.mark.parametrize("data", HOSTILE)
async def test_hostile_frames_and_bodies_are_refused(data: bytes) -> None:
    """Known attacks on parsers answer 4xx with a code, on the socket and over HTTP."""
    async with fake_hub_server() as running, connect(running.socket_url) as client:
        await client.socket.send_str(data.decode())
        answer = await client.receive()
        assert (answer["type"], 400 <= answer["status"] < 500) == ("error", True)
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{running.url}/v1/responses",
                data=data,
                headers={"Content-Type": "application/json"},
            ) as response,
        ):
            assert 400 <= response.status < 500
            assert (await response.json())["error"]["code"]
        await client.socket.close()
        await still_serves(running, None)


async def test_random_bodies_and_queries_are_answered_or_refused(tmp_path: Path) -> None:
    """Whatever HTTP gets, the answer is 2xx or a typed 4xx; never 5xx."""
    rng = random.Random("bodies")
    headers = {"Content-Type": "application/json"}
    async with fake_engine_server(tmp_path) as running, aiohttp.ClientSession() as session:
        for _ in range(300):
            method = rng.choice(("GET", "POST", "DELETE"))
            path = rng.choice(("/v1/responses", "/v1/conversations", "/v1/models", "/nothing"))
            if rng.random() < 0.5:
                path += "/" + rng.choice(WORDS).replace("\x00", "%00")
            query = {rng.choice(WORDS): rng.choice(WORDS) for _ in range(rng.randrange(3))}
            data = mangled(rng, json.dumps(frame(rng)).encode()) if method == "POST" else None
            async with session.request(
                method, running.url + path, params=query, data=data, headers=headers
            ) as answer:
                body = await answer.read()
                assert answer.status < 500, (method, path, query, data, body)
                if answer.status >= 400:
                    assert json.loads(body)["error"]["code"]
        await still_serves(running, None)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"\xc1\x80\x00\x00\x00\x00", 1002),  # a compressed frame, which was not negotiated
        (b"\x83\x80\x00\x00\x00\x00", 1002),  # an unknown opcode
        (b"\x81\x82\x00\x00\x00\x00\xff\xff", 1007),  # text that is no UTF-8
        (b"\x82\xff\x7f\xff\xff\xff\xff\xff\xff\xff\x00\x00\x00\x00", 1009),  # 2**63 bytes
        (b"\x88\x81\x00\x00\x00\x00\x00", 1002),  # a close frame of one byte
    ],
)
async def test_broken_framing_closes_with_its_code(raw: bytes, code: int) -> None:
    """A frame against RFC 6455 closes that socket with the right code and no other."""
    async with fake_hub_server() as running, connect(running.socket_url) as other:
        async with connect(running.socket_url) as client:
            transport = client.socket._response.connection.transport  # type: ignore[union-attr]
            transport.write(raw)
            message = await client.socket.receive(10)
            assert (message.type, message.data) == (WSMsgType.CLOSE, code)
        assert (await other.response(input="x"))[-1]["type"] == "response.completed"
