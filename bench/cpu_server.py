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
* b1: one stream of the default model, bf16: the time of a token through the server and a socket
  over that in the engine's loop alone, in turn; and the server's processor time over the
  latter, which bounds what it adds and does not depend on what else runs on the machine.

Every stream is checked (`raw_streams`); a run with a fault has no figures.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from common import finish, report
from hillstar.cli.values import default_data_dir
from hillstar.engine.messages import pack_ids
from hillstar.engine.models.fetch import resolve_model
from hillstar.server.text import Tokenizer

SEED = 20261129
BENCH = Path(__file__).parent
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
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Child:
    """A Python process that is told lines, tells lines, and leaves when its input ends."""

    def __init__(self, script: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(BENCH / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"OMP_WAIT_POLICY": "passive"} | os.environ,  # as the server gives its engine
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: str = "") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        """The next line. Raises RuntimeError when there is none."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended: {self._process.wait()}")
        return line.strip()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Served:
    """A server process and what it uses."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.url = child.hear()
        self.port = self.url.rpartition(":")[2]

    def cpu_s(self) -> float:
        """User and system time of all its threads; the engine is another process."""
        fields = Path(f"/proc/{self._child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S

    def rss_bytes(self) -> int:
        for line in Path(f"/proc/{self._child.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
        raise RuntimeError("a process without memory")

    def num_awake(self) -> int:
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith('hillstar_sessions{state="awake"}'):
                    return int(float(line.split()[1]))
        raise RuntimeError("no such metric")


@dataclass
class Stage:
    """Where everything runs, and how many streams were read back without a fault."""

    folder: Path
    model: Path
    num_checked: int = 0
    num_tokens_checked: int = 0
    _num_servers: int = field(default=0)

    def __post_init__(self) -> None:
        tokenizer = Tokenizer(self.model)
        token_ids = tokenizer.encode(PASSAGE)
        rounds = 1 + NUM_LONG // len(token_ids)
        (self.folder / "tokens").write_bytes(pack_ids(token_ids))
        (self.folder / "text").write_text(tokenizer.decode(token_ids) * rounds)

    @contextmanager
    def server(self, *options: str, engine: list[str]) -> Iterator[Served]:
        """A server on a fresh data directory."""
        self._num_servers += 1
        data_dir = self.folder / f"data{self._num_servers}"
        child = Child(
            "served.py", "--model", str(self.model), "--data-dir", str(data_dir), *options, *engine
        )
        try:
            yield Served(child)
        finally:
            child.close()

    def scripted(self, gather: int, pace_s: float) -> list[str]:
        """The command of a scripted engine."""
        command = [sys.executable, str(BENCH / "scripted_engine.py")]
        command += ["--tokens", str(self.folder / "tokens")]
        return [*command, "--gather", str(gather), "--pace", str(pace_s)]

    @contextmanager
    def clients(self, served: Served, number: int, **options: object) -> Iterator[list[Child]]:
        """Client processes whose sockets are connected."""
        arguments = ["--port", served.port, "--text", str(self.folder / "text")]
        for name, value in options.items():
            arguments += [f"--{name}", str(value)]
        with ExitStack() as stack:
            clients = []
            for _ in range(number):
                client = Child("raw_streams.py", *arguments)
                stack.callback(client.close)
                clients.append(client)
            for client in clients:
                assert client.hear() == "ready"
            yield clients

    def run(self, clients: list[Child]) -> None:
        """Have them ask for their streams and wait for the last end."""
        for client in clients:
            client.tell()
        for client in clients:
            assert client.hear() == "ended"

    def check(self, clients: list[Child]) -> int:
        """Have them read back what came; the number of tokens. Raises where one found a fault."""
        for client in clients:
            client.tell()
        counts = [json.loads(client.hear()) for client in clients]
        num_tokens: int = sum(count["tokens"] for count in counts)
        self.num_checked += sum(count["responses"] for count in counts)
        self.num_tokens_checked += num_tokens
        return num_tokens


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
                speeds.append(ceilings()["python_loop_ns"])
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
        expected = json.loads(loop.hear())
        with stage.server(engine=[]) as served:
            for repeat in range(repeats + 1):
                loop.tell()
                alone_s = float(loop.hear())
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


def ceilings() -> dict[str, float]:
    """What the machine gives at the moment, in processor time: one turn of an empty Python loop
    and a bare send on loopback. On a shared machine the figures rise and fall with the first."""

    def loop() -> None:
        total = 0
        for number in range(100_000):
            total += number

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sender,
        listener.accept()[0] as receiver,
    ):

        def send() -> None:
            for _ in range(1000):
                sender.send(bytes(40))
            receiver.recv(1 << 20)

        return {
            "python_loop_ns": round(_cpu_s(loop) * 1e9 / 100_000, 1),
            "bare_send_us": round(_cpu_s(send) * 1e6 / 1000, 2),
        }


def _cpu_s(run: Callable[[], None]) -> float:
    """The median processor time of a run."""
    times = []
    for _ in range(7):
        began_s = time.process_time()
        run()
        times.append(time.process_time() - began_s)
    return statistics.median(times)


PARTS = {"streams": streams, "connections": connections, "sessions": sessions, "b1": b1}


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
        stage = Stage(Path(folder), model)
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
