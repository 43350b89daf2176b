"""What operators and load balancers ask."""

from aiohttp import web

from hillstar.server.auth import require_operator
from hillstar.server.front import Front
from hillstar.server.http import answer
from hillstar.server.metrics import CONTENT_TYPE, is_ready
from hillstar.server.ports import HubStats, Principal


def live() -> web.Response:
    """`GET /health/live`: the process answers."""
    return answer({"status": "ok"})


def ready(front: Front) -> web.Response:
    """`GET /health/ready`: 200 while new work is welcome, else 503 and why not."""
    stats = front.hub.stats()
    welcome = is_ready(stats) and not front.is_draining
    return answer(_state(front, stats), 200 if welcome else 503)


async def metrics(front: Front, principal: Principal, request: web.Request) -> web.StreamResponse:
    """`GET /metrics`: for operators."""
    require_operator(principal)
    body = front.metrics.exposition(front.hub.stats(), front.connections.num_open)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


def _state(front: Front, stats: HubStats) -> dict[str, object]:
    if stats.draining or front.is_draining:
        return {"status": "draining"}
    if not stats.storage_available:
        return {"status": "storage_unavailable"}
    if stats.engine_state == "starting":
        done, total = stats.loading
        return {"status": "loading", "loaded_bytes": done, "total_bytes": total}
    return {"status": stats.engine_state}
