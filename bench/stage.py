"""Processes of a benchmark of the server, and what they use: servers, their clients, their engines.

Everything runs on one machine: the server in a process of its own, so that its processor time and
memory are its own, clients that take as little as they can (`raw_streams`), and mostly an engine
that computes nothing (`scripted_engine`). Clients and such engines stay off the server's core: they
are elsewhere in a deployment, and would empty the caches that its processor time depends on.
"""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hillstar.engine.messages import pack_ids
from hillstar.server.text import Tokenizer

BENCH = Path(__file__).parent
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
CORES = sorted(os.sched_getaffinity(0))
SERVER_CORES, OTHER_CORES = CORES[:1], CORES[1:] or CORES


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

    def keep_to(self, cores: list[int]) -> None:
        """Run on these cores only, threads and children that it starts from now on too."""
        os.sched_setaffinity(self.pid, cores)

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
    passage: str  # what a scripted engine says, over and over
    num_tokens: int  # the most that a stream asks for
    num_checked: int = 0
    num_tokens_checked: int = 0
    _num_servers: int = field(default=0)

    def __post_init__(self) -> None:
        tokenizer = Tokenizer(self.model)
        token_ids = tokenizer.encode(self.passage)
        rounds = 1 + self.num_tokens // len(token_ids)
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
        if engine:  # the real one computes on all cores
            child.keep_to(SERVER_CORES)
        try:
            yield Served(child)
        finally:
            child.close()

    def scripted(self, gather: int, pace_s: float) -> list[str]:
        """The command of a scripted engine."""
        command = [sys.executable, str(BENCH / "scripted_engine.py")]
        command += ["--tokens", str(self.folder / "tokens")]
        command += ["--cores", *map(str, OTHER_CORES)]
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
                client.keep_to(OTHER_CORES)
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
