"""What is refused below HTTP, before any handler sees a request."""

import asyncio
import json
import logging
from urllib.parse import urlsplit

import pytest

from support.server import fake_hub_server

SECRET = b"sk-secret"


async def raw_answer(url: str, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to these bytes on a fresh connection."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(data)
        async with asyncio.timeout(20):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, body
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (SECRET + b"\r\n\r\n", 400),
        (b"GET " + SECRET + b" HTTP/9.9.9\r\n\r\n", 400),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + SECRET + b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 99 + b"\r\n\r\n", 400),
        (b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nExpect: tea\r\n\r\n", 417),
    ],
)
async def test_refusals_below_http_are_typed(
    data: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What is no HTTP is answered by the error object too; nothing of it is quoted or logged."""
    caplog.set_level(logging.DEBUG)
    async with fake_hub_server() as running:
        found, headers, body = await raw_answer(running.url, data)
    assert found == status
    assert headers["server"] == "hillstar"
    assert headers["content-type"].startswith("application/json")
    error = json.loads(body)["error"]
    assert error.keys() == {"type", "code", "message", "param"}
    assert error["code"] == "invalid_http"
    assert SECRET not in body and SECRET.decode() not in caplog.text
