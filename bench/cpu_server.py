"""What the server costs beside the engine: processor time, memory, and time added to a token.

    python bench/cpu_server.py [--out bench/results/cpu-server.json] [--only PART …]

* streams: 256 streams over WebSockets while a scripted engine says a token to each every 20 ms,
  journal on. Processor time of the server process (user and system, all its threads, whatever it
  does from the first create to the last end) over the tokens delivered. One socket a stream in
  both protocols, and 16 sockets of 16 lanes. `steady` leaves out what a response costs once: the
  difference between long and short streams.
* connections: resident memory for an idle WebSocket.
* sessions: resident memory for a conversation of one turn, while its actor idles in memory and
  when it was passivated.
* b1: one stream of the default model, bf16, a token a step (no drafts): the time of a token
  through the server and a socket over that in the engine's loop alone, in turn; and the server's
  processor time over the latter, which bounds what it adds and does not depend on what else runs
  on the machine.

Every stream is checked (`raw_streams`); a run with a fault has no figures.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from ceilings import ceilings, python_loop_ns
from common import finish, report
from hillstar.cli.values import default_data_dir
from hillstar.engine.models.fetch import resolve_model
from stage import Child, Stage

SEED = 20261129
NUM_STREAMS, PACE_S = 256, 0.02
NUM_SHORT, NUM_LONG = 64, 512  # tokens a stream
NUM_CONNECTIONS = 2000
NUM_SESSIONS, SESSION_SOCKETS = 5000, 50
NUM_B1 = 128  # tokens
PROMPT = "Tell me of the sea."
PASSAGE = (
    "The sea covers most of the world, and most of what lives in it has never been seen. Near the "
    "coast, where rivers bring their sand, the water is warm and green; further out it turns blue "
    "and then, below the reach of any light, black. Currents carry heat from one side of an ocean "
    "to the other over hundreds of years. Sailors knew only its surface: winds, waves, the smell "
    "of land before it could be seen, 2,000 miles of nothing between two harbours. "
)


def streams(stage: Stage, repeats: int) -> dict[str, Any]:
    """Microseconds of the server's processor time for a streamed token."""
    figures: dict[str, Any] = {}
    for name, protocol, num_sockets, lanes in (
        ("msgpack", "hillstar.v1.msgpack", NUM_STREAMS, 1),
        ("openai", "", NUM_STREAMS, 1),
        ("lanes", "hillstar.v1.msgpack", NUM_STREAMS // 16, 16),
    ):
        used: dict[int, list[tuple[float, int]]] = {NUM_SHORT: [], NUM_LONG: []}
        speeds: list[float] = []
        with stage.server(engine=stage.scripted(NUM_STREAMS, PACE_S)) as served:
            for repeat in range(repeats + 1):
                speeds.append(python_loop_ns())
                for num_tokens, results in used.items():
                    if repeat == 0 and num_tokens == NUM_LONG:
                        continue  # one short run warms up
                    with stage.clients(
                        served, 2, protocol=protocol, sockets=num_sockets // 2, lanes=lanes,
                        tokens=num_tokens,
                    ) as clients:  # fmt: skip
                        before_s = served.cpu_s()
                        stage.run(clients)
                        cpu_s = served.cpu_s() - before_s
                        delivered = stage.check(clients)
                    if repeat:
                        results.append((cpu_s, delivered))
        whole = [1e6 * cpu_s / tokens for cpu_s, tokens in used[NUM_LONG]]
        steady = [
            1e6 * (long_s - short_s) / (many - few)
            for (long_s, many), (short_s, few) in zip(used[NUM_LONG], used[NUM_SHORT], strict=True)
        ]
        figures[f"python_loop_ns_at_{name}"] = speeds
        figures[f"us_per_token_{name}"] = round(statistics.median(whole), 2)
        figures[f"us_per_token_{name}_range"] = [round(min(whole), 2), round(max(whole), 2)]
        figures[f"us_per_token_{name}_steady"] = round(statistics.median(steady), 2)
        print(name, [round(value, 1) for value in whole], [round(value, 1) for value in steady])
    return figures


def connections(stage: Stage, repeats: int) -> dict[str, Any]:
    """Resident bytes for an idle WebSocket."""
    grown = []
    for _ in range(repeats):
        with (
            stage.server(engine=stage.scripted(1, 0.0)) as served,
            stage.clients(served, 1, sockets=200),
        ):
            before = served.rss_bytes()
            with stage.clients(served, 2, sockets=NUM_CONNECTIONS // 2):
                grown.append((served.rss_bytes() - before) / NUM_CONNECTIONS)
    print("connections", [round(value) for value in grown])
    return {"bytes_per_connection": round(statistics.median(grown))}


def sessions(stage: Stage, repeats: int) -> dict[str, Any]:
    """Resident bytes for a conversation of one turn."""
    figures: dict[str, Any] = {}
    for name, idle_timeout_s in (("idle", 300.0), ("passivated", 0.5)):
        grown = []
        for _ in range(repeats):
            options = ("--idle-timeout", str(idle_timeout_s))
            with stage.server(*options, engine=stage.scripted(1, 0.0)) as served:
                sizes = []
                for turns in (10, NUM_SESSIONS // SESSION_SOCKETS):  # the first warms up
                    with stage.clients(served, 1, sockets=SESSION_SOCKETS, turns=turns) as clients:
                        stage.run(clients)
                        stage.check(clients)
                    if name == "passivated":
                        _wait_for(lambda: served.num_awake() == 0)
                    sizes.append(served.rss_bytes())
                grown.append((sizes[1] - sizes[0]) / NUM_SESSIONS)
        figures[f"bytes_per_{name}_session"] = round(statistics.median(grown))
        print(name, "sessions", [round(value) for value in grown])
    return figures


def b1(stage: Stage, repeats: int) -> dict[str, Any]:
    """The time of a token at batch 1 through everything, and in the engine's loop alone."""
    through: list[float] = []
    alone: list[float] = []
    cpu: list[float] = []
    loop = Child("engine_alone.py", str(stage.model), PROMPT, str(NUM_B1))
    try:
        with stage.server(engine=[]) as served:
            for repeat in range(repeats + 1):
                loop.tell()
                expected, alone_s = json.loads(loop.hear())
                before_s = served.cpu_s()
                text, through_s = asyncio.run(_generate(served.url))
                cpu_s = served.cpu_s() - before_s
                assert text == expected, "the server said something else than the loop"
                if repeat:
                    cpu.append(cpu_s / NUM_B1)
                    alone.append(alone_s / (NUM_B1 - 1))
                    through.append(through_s / (NUM_B1 - 1))
                    stage.num_checked += 1
                    stage.num_tokens_checked += NUM_B1
    finally:
        loop.close()
    ratios = [a / b for a, b in zip(through, alone, strict=True)]
    print("b1", [round(value, 3) for value in ratios])
    return {
        "b1_server_ms_per_token": round(1000 * statistics.median(through), 3),
        "b1_loop_ms_per_token": round(1000 * statistics.median(alone), 3),
        "b1_ratio": round(statistics.median(ratios), 3),
        "b1_server_cpu_ms_per_token": round(1000 * statistics.median(cpu), 3),
        "b1_server_cpu_share": round(statistics.median(cpu) / statistics.median(alone), 4),
    }


async def _generate(url: str) -> tuple[str, float]:
    """A greedy answer over a socket, and the seconds from its first token to its end."""
    request = {"type": "response.create", "input": PROMPT, "max_output_tokens": NUM_B1}
    request |= {"temperature": 0, "hillstar": {"ignore_eos": True}}
    texts: list[str] = []
    first_s = 0.0
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{url}/v1/responses", protocols=("hillstar.v1.json",)) as websocket,
    ):
        await websocket.send_json(request)
        async for message in websocket:
            event = message.json()
            if event["type"] == "response.output_text.delta":
                first_s = first_s or time.perf_counter()
                texts.append(event["delta"])
            elif event["type"] == "response.incomplete":
                return "".join(texts), time.perf_counter() - first_s
    raise RuntimeError("the server hung up")


def _wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError("it did not come true")
        time.sleep(0.2)


PARTS = {"streams": streams, "b1": b1, "connections": connections, "sessions": sessions}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="result file to write")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    model = resolve_model(None, default_data_dir() / "models").dir
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder), model, PASSAGE, NUM_LONG)
        figures: dict[str, Any] = {}
        limits = ceilings()
        print("ceilings", limits)
        for name in options.only:
            figures |= PARTS[name](stage, options.repeats)
        checked = {"streams": stage.num_checked, "tokens": stage.num_tokens_checked}
    result = report(
        SEED, ceilings=limits, checked=checked, num_streams=NUM_STREAMS, pace_s=PACE_S, **figures
    )
    finish(result, options.out)


if __name__ == "__main__":
    main()
