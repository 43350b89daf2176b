"""The HTTP surface: bodies, queries, streams, errors, headers. The Hub behind it is a fake."""

import asyncio
import gzip
import json
import logging
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from hillstar.server.limits import SocketLimits
from hillstar.server.ports import HubStats
from support.fake_hub import refusal
from support.server import Running, fake_hub_server
from support.wait import until


class Client:
    """Requests against one running server."""

    def __init__(self, running: Running[Any], session: aiohttp.ClientSession) -> None:
        self._url = running.url
        self._session = session

    async def __call__(
        self, method: str, path: str, **options: Any
    ) -> tuple[int, Any, aiohttp.ClientResponse]:
        """Status, decoded body and the response itself."""
        async with self._session.request(method, self._url + path, **options) as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if is_json else text, response


def sse(text: str) -> list[dict[str, Any]]:
    """The events of a stream's text, each checked to name its type twice."""
    events = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith(":")]
        if lines:
            event = json.loads(lines[1].removeprefix("data: "))
            assert lines[0] == f"event: {event['type']}"
            events.append(event)
    return events


async def test_create_answers_with_the_finished_object() -> None:
    """A plain POST returns the response once it has ended."""
    async with fake_hub_server() as running, aiohttp.ClientSession() as session:
        call = Client(running, session)
        status, body, answer = await call("POST", "/v1/responses", json={"input": "hello"})
        assert (status, body["status"]) == (200, "completed")
        assert body["output"][0]["content"][0]["text"] == "hello"
        assert answer.headers["x-request-id"].startswith("req_")
        assert (await call("GET", f"/v1/responses/{body['id']}"))[1] == body


async def test_a_background_create_answers_at_once() -> None:
    """`background: true` returns the running response; a disconnect does not touch it."""
    async with fake_hub_server() as running, aiohttp.ClientSession() as session:
        call = Client(running, session)
        running.hub.hold_after = 0
        _, body, _ = await call("POST", "/v1/responses", json={"input": "hi", "background": True})
        assert body["status"] == "in_progress"
        assert not running.hub.responses[body["id"]].scopes
        running.hub.go.set()
        await until(running.hub.responses[body["id"]].done.is_set)
        assert (await call("GET", f"/v1/responses/{body['id']}"))[1]["status"] == "completed"


async def test_a_stream_is_the_events_in_order() -> None:
    """`stream: true` answers with every event as SSE; a GET repeats them from any number."""
    async with fake_hub_server() as running, aiohttp.ClientSession() as session:
        call = Client(running, session)
        _, text, answer = await call("POST", "/v1/responses", json={"input": "hey", "stream": True})
        events = sse(text)
        assert answer.content_type == "text/event-stream"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed"
        path = f"/v1/responses/{events[0]['response']['id']}?stream=true"
        assert sse((await call("GET", path))[1]) == events
        assert sse((await call("GET", f"{path}&starting_after=4"))[1]) == events[5:]
        assert sse((await call("GET", f"{path}&starting_after=999"))[1]) == []


async def test_a_stream_of_a_response_that_is_lost_ends_with_an_error() -> None:
    """A response that will have no terminal event ends its stream with an `error` event."""
    async with fake_hub_server() as running, aiohttp.ClientSession() as session:
        call = Client(running, session)
        running.hub.hold_after = 1
        body = {"input": "abc", "stream": True}
        asking = asyncio.create_task(call("POST", "/v1/responses", json=body))
        await until(lambda: any(response.log for response in running.hub.responses.values()))
        (response,) = running.hub.responses.values()
        response.lose()
        events = sse((await asking)[1])
        assert events[-1]["type"] == "error"
        assert events[-1]["sequence_number"] == len(events) - 1


async def test_a_silent_stream_carries_comments() -> None:
    """While nothing happens a stream sends comments, so that nobody on the way gives up."""
    limits = SocketLimits(heartbeat_s=0.04, close_timeout_s=0.5)
    async with fake_hub_server(limits) as running, aiohttp.ClientSession() as session:
        running.hub.hold_after = 0
        body = {"input": "hi", "stream": True}
        async with session.post(f"{running.url}/v1/responses", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b":"):
                    break
            running.hub.go.set()
            assert b"response.completed" in await answer.read()


async def test_cancel_delete_and_items() -> None:
    """A response can be cancelled, its input listed, and deleted; then it is unknown."""
    async with fake_hub_server() as running, aiohttp.ClientSession() as session:
        call = Client(running, session)
        running.hub.hold_after = 1
        _, body, _ = await call("POST", "/v1/responses", json={"input": "ab", "background": True})
        path = f"/v1/responses/{body['id']}"
        assert (await call("POST", f"{path}/cancel"))[1]["status"] == "cancelled"
        items = (await call("GET", f"{path}/input_items"))[1]
        assert (items["object"], len(items["data"]), items["has_more"]) == ("list", 1, False)
        deleted = (await call("DELETE", path))[1]
        assert deleted == {"id": body["id"], "object": "response", "deleted": True}
        for method, tail in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            status, error, _ = await call(method, path + tail)
            assert (status, error["error"]["code"]) == (404, "response_not_found")


async def test_input_items_come_in_pages() -> None:
    """`limit`, `order` and `after` page through the items; newest first unless asked."""
    async with fake_hub_server() as running, aiohttp.ClientSession() as session:
        call = Client(running, session)
        messages = [{"role": "user", "content": str(number)} for number in range(5)]
        _, body, _ = await call("POST", "/v1/responses", json={"input": messages})
        path = f"/v1/responses/{body['id']}/input_items"

        async def texts(query: str) -> tuple[str, bool]:
            page = (await call("GET", path + query))[1]
            return "".join(item["text"] for item in page["data"]), page["has_more"]

        assert await texts("") == ("43210", False)
        assert await texts("?order=asc&limit=2") == ("01", True)
        assert await texts("?order=asc&limit=2&after=msg_3") == ("4", False)
        status, error, _ = await call("GET", f"{path}?after=msg_none")
        assert (status, error["error"]["param"]) == (400, "after")


async def test_conversations_live_and_die() -> None:
    """A conversation is created with metadata, read, continued and deleted."""
    async with fake_hub_server() as running, aiohttp.ClientSession() as session:
        call = Client(running, session)
        _, made, _ = await call("POST", "/v1/conversations", json={"metadata": {"a": "b"}})
        path = f"/v1/conversations/{made['id']}"
        assert (await call("GET", path))[1] == made
        turn = {"input": "x", "conversation": made["id"]}
        _, body, _ = await call("POST", "/v1/responses", json=turn)
        assert body["conversation"] == {"id": made["id"]}
        _, deleted, _ = await call("DELETE", path)
        assert deleted == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
        assert (await call("GET", path))[0] == 404
        assert (await call("POST", "/v1/conversations"))[0] == 200
        for wrong in ({"items": "x"}, {"metadata": {"a": 1}}, {"colour": "red"}, {"items": [7]}):
            assert (await call("POST", "/v1/conversations", json=wrong))[0] == 400


async def test_models_are_listed() -> None:
    """The served model is listed and found by name; another one is unknown."""
    async with fake_hub_server() as running, aiohttp.ClientSession() as session:
        call = Client(running, session)
        listed = (await call("GET", "/v1/models"))[1]
        assert [model["id"] for model in listed["data"]] == ["fake"]
        assert (await call("GET", "/v1/models/fake"))[1] == listed["data"][0]
        status, error, _ = await call("GET", "/v1/models/org/other")
        assert (status, error["error"]["code"]) == (404, "model_not_found")


JSON_TYPE = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "code"),
    [
        ("GET", "/", {}, 404, "not_found"),
        ("GET", "/v1/nothing", {}, 404, "not_found"),
        ("PUT", "/v1/responses", {}, 405, "method_not_allowed"),
        ("GET", "/v1/responses", {}, 426, "upgrade_required"),
        ("POST", "/v1/responses", {"data": b"{}"}, 415, "unsupported_media_type"),
        ("POST", "/v1/responses", {"data": b"", "headers": JSON_TYPE}, 400, "invalid_json"),
        ("POST", "/v1/responses", {"data": b"{", "headers": JSON_TYPE}, 400, "invalid_json"),
        ("POST", "/v1/responses", {"data": b"\xff", "headers": JSON_TYPE}, 400, "invalid_json"),
        ("POST", "/v1/responses", {"json": []}, 400, "invalid_type"),
        ("POST", "/v1/responses", {"json": {"input": "x", "spin": 1}}, 400, "unknown_parameter"),
        ("POST", "/v1/responses", {"json": {"input": "x" * 5000}}, 413, "request_too_large"),
        ("GET", "/v1/responses/resp_x", {}, 404, "response_not_found"),
        ("GET", "/v1/responses/resp_x?stream=yes", {}, 400, "invalid_value"),
        ("GET", "/v1/responses/resp_x?stream=true&starting_after=-1", {}, 400, "invalid_value"),
        ("GET", "/v1/responses/resp_x?starting_after=1", {}, 400, "invalid_value"),
        ("GET", "/v1/responses/resp_x?colour=red", {}, 400, "unknown_parameter"),
        ("GET", "/v1/responses/resp_x?stream=true", {}, 404, "response_not_found"),
        ("GET", "/v1/responses/resp_x/input_items?limit=0", {}, 400, "invalid_value"),
        ("GET", "/v1/responses/resp_x/input_items?limit=1e2", {}, 400, "invalid_value"),
        ("GET", "/v1/responses/resp_x/input_items?order=up", {}, 400, "invalid_value"),
        ("GET", "/v1/conversations/conv_x", {}, 404, "conversation_not_found"),
        ("GET", "/v1/models", {"headers": {"Origin": "http://evil"}}, 403, "origin_not_allowed"),
    ],
)
async def test_errors_are_typed(
    method: str, path: str, options: dict[str, Any], status: int, code: str
) -> None:
    """Whatever is wrong, the answer is OpenAI's error object with a code and an id."""
    async with (
        fake_hub_server(max_frame_bytes=4096) as running,
        aiohttp.ClientSession() as session,
    ):
        found, body, answer = await Client(running, session)(method, path, **options)
    assert (found, body["error"]["code"]) == (status, code)
    assert body["error"].keys() == {"type", "code", "message", "param"}
    assert answer.headers["x-request-id"]


async def test_a_decompression_bomb_is_too_large() -> None:
    """A body is measured as it unpacks: a small gzip of something huge is answered 413."""
    bomb = gzip.compress(b" " * (64 << 20))
    headers = JSON_TYPE | {"Content-Encoding": "gzip"}
    async with fake_hub_server() as running, aiohttp.ClientSession() as session:
        call = Client(running, session)
        status, body, _ = await call("POST", "/v1/responses", data=bomb, headers=headers)
        assert (status, body["error"]["code"]) == (413, "request_too_large")
        packed = gzip.compress(b'{"input":"small"}')
        status, body, _ = await call("POST", "/v1/responses", data=packed, headers=headers)
        assert (status, body["status"]) == (200, "completed")


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_does_not_unpack_is_refused(encoding: str) -> None:
    """A body in another encoding than its header says is the sender's fault, not the server's."""
    headers = JSON_TYPE | {"Content-Encoding": encoding}
    async with fake_hub_server() as running, aiohttp.ClientSession() as session:
        status, body, _ = await Client(running, session)(
            "POST", "/v1/responses", data=b'{"input":"plain"}', headers=headers
        )
    assert (status, body["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b'Transfer-Encoding: chunked\r\n\r\n2\r\n{"my secret is out',
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer my secret\0\r\n\r\n",
    ],
    ids=["body", "key"],
)
async def test_malformed_http_is_not_quoted_in_the_log(
    request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes that are no HTTP may hold a prompt or a key: the log names the fault, nothing else."""
    caplog.set_level(logging.DEBUG)
    async with fake_hub_server() as running:
        url = urlsplit(running.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(request_bytes)
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.0 400 ")
    assert "BadHttpMessage" in caplog.text
    assert "secret" not in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_retryable_errors_say_when() -> None:
    """A refusal of the Hub keeps its status and carries Retry-After, streamed or not."""
    async with fake_hub_server() as running, aiohttp.ClientSession() as session:
        running.hub.fail_with = refusal()
        for stream in (False, True):
            status, body, answer = await Client(running, session)(
                "POST", "/v1/responses", json={"input": "x", "stream": stream}
            )
            assert (status, body["error"]["code"]) == (503, "server_overloaded")
            assert answer.headers["retry-after"] == "2"
        assert not running.front.peers
        running.hub.fail_with = RuntimeError("boom")
        status, body, _ = await Client(running, session)(
            "POST", "/v1/responses", json={"input": "x"}
        )
        assert (status, body["error"]["code"]) == (500, "internal_error")
        assert "boom" not in body["error"]["message"]


async def test_bodies_that_do_not_arrive_time_out() -> None:
    """A body that stops coming is answered 408; it does not hold a handler for ever."""
    limits = SocketLimits(body_timeout_s=0.05, close_timeout_s=0.5)
    async with fake_hub_server(limits) as running:
        host, port = running.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(head + b"Content-Length: 100\r\n\r\n{")
        async with asyncio.timeout(10):
            assert b" 408 " in await reader.readline()
        writer.close()


async def test_the_clients_request_id_is_kept() -> None:
    """A well-formed `x-request-id` comes back; any other is replaced."""
    async with fake_hub_server() as running, aiohttp.ClientSession() as session:
        call = Client(running, session)
        for given, kept in (("trace-1", True), ("no spaces", False), ("x" * 200, False)):
            headers = {"X-Request-Id": given}
            _, _, answer = await call("GET", "/health/live", headers=headers)
            assert (answer.headers["x-request-id"] == given) is kept


async def test_listed_origins_get_cors_headers() -> None:
    """A page on the allow-list may ask, after a preflight; one that is not gets 403."""
    origin = "https://chat.example.org"
    async with (
        fake_hub_server(allow_origins=(origin,)) as running,
        aiohttp.ClientSession() as session,
    ):
        call = Client(running, session)
        status, _, answer = await call("OPTIONS", "/v1/responses", headers={"Origin": origin})
        assert status == 204
        assert answer.headers["access-control-allow-origin"] == origin
        assert "authorization" in answer.headers["access-control-allow-headers"]
        body = {"input": "x", "stream": True}
        _, _, answer = await call("POST", "/v1/responses", json=body, headers={"Origin": origin})
        assert answer.headers["access-control-allow-origin"] == origin
        status, _, answer = await call("OPTIONS", "/v1/responses", headers={"Origin": "http://e"})
        assert status == 403
        assert "access-control-allow-origin" not in answer.headers


async def test_tenants_see_only_what_is_theirs(tmp_path: Path) -> None:
    """Somebody else's response is unknown; metrics are for operators; health is for everybody."""
    keys = tmp_path / "keys"
    keys.write_text("a ka\nb kb\nops ko operator\n")
    async with fake_hub_server(api_keys=keys) as running, aiohttp.ClientSession() as session:
        call = Client(running, session)

        def key(value: str) -> dict[str, str]:
            return {"Authorization": f"Bearer {value}"}

        body = {"input": "x"}
        status, error, answer = await call("POST", "/v1/responses", json=body)
        assert (status, error["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        _, made, _ = await call("POST", "/v1/responses", json=body, headers=key("ka"))
        path = f"/v1/responses/{made['id']}"
        assert (await call("GET", path, headers=key("ka")))[0] == 200
        assert (await call("GET", path, headers=key("kb")))[0] == 404
        assert (await call("GET", "/metrics"))[0] == 401
        assert (await call("GET", "/metrics", headers=key("ka")))[0] == 403
        assert (await call("GET", "/metrics", headers=key("ko")))[0] == 200
        assert (await call("GET", "/health/live"))[0] == 200


@pytest.mark.parametrize(
    ("stats", "status", "word"),
    [
        (HubStats(engine_state="ready"), 200, "ready"),
        (HubStats(engine_state="starting", loading=(1, 4)), 503, "loading"),
        (HubStats(engine_state="down"), 503, "down"),
        (HubStats(engine_state="failed"), 503, "failed"),
        (HubStats(engine_state="ready", storage_available=False), 503, "storage_unavailable"),
        (HubStats(engine_state="ready", draining=True), 503, "draining"),
    ],
)
async def test_readiness_says_why_not(stats: HubStats, status: int, word: str) -> None:
    """`/health/ready` is 200 exactly while new work is welcome; `/health/live` always is."""
    async with fake_hub_server() as running, aiohttp.ClientSession() as session:
        call = Client(running, session)
        running.hub.state = stats
        found, body, _ = await call("GET", "/health/ready")
        assert (found, body["status"]) == (status, word)
        assert (await call("GET", "/health/live"))[0] == 200


async def test_a_leaving_server_ends_what_waits() -> None:
    """When the server leaves, streams end with a retryable error and waiting POSTs get 503."""
    async with fake_hub_server() as running, aiohttp.ClientSession() as session:
        call = Client(running, session)
        running.hub.hold_after = 0
        body = {"input": "x"}
        plain = asyncio.create_task(call("POST", "/v1/responses", json=body))
        stream = asyncio.create_task(call("POST", "/v1/responses", json=body | {"stream": True}))
        await until(lambda: len(running.hub.responses) == 2)
        await running.server.drain()
        status, error, _ = await plain
        assert (status, error["error"]["code"]) == (503, "server_draining")
        last = sse((await stream)[1])[-1]
        assert (last["type"], last["code"]) == ("error", "server_draining")
        assert (await call("GET", "/health/ready"))[0] == 503
        assert "disconnected" not in [name for name, _ in running.hub.calls]
