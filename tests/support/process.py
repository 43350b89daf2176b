"""A real Hillstar in its own processes: started, killed and restarted by tests."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Self

import aiohttp

START_DEADLINE_S = 120


def free_port() -> int:
    """A TCP port that was free a moment ago on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RealServer:
    """`hillstar serve` on one data directory, across kills.

    Options are those of the command line; `log` holds what all its lives wrote.
    """

    def __init__(self, data_dir: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.data_dir = data_dir
        self.log = data_dir.parent / f"{data_dir.name}.log"
        self._options = options
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start and wait until it answers ready."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "hillstar",
                "serve",
                "--port",
                str(self.port),
                "--data-dir",
                str(self.data_dir),
                *self._options,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        await self.wait_ready()

    async def wait_ready(self) -> None:
        """Return when /health/ready says 200; fail with the log when the server died."""
        async with asyncio.timeout(START_DEADLINE_S), aiohttp.ClientSession() as http:
            while True:
                if self._process is not None and self._process.returncode is not None:
                    raise AssertionError(f"the server ended:\n{self.log.read_text()[-4000:]}")
                try:
                    async with http.get(f"{self.url}/health/ready") as reply:
                        if reply.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)  # polls a condition with a deadline

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def engine_pid(self) -> int:
        """The engine process: the child of the server titled `hillstar-engine`."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                stat = (entry / "stat").read_text()
                title = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            parent = int(stat.rpartition(")")[2].split()[1])
            if parent == self.pid and title.startswith(b"hillstar-engine"):
                return int(entry.name)
        raise AssertionError(f"no engine below {self.pid}")

    def kill_engine(self) -> None:
        os.kill(self.engine_pid(), signal.SIGKILL)

    async def kill(self) -> None:
        """`kill -9` of the server; its engine ends by itself."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> int:
        """SIGTERM, as an operator would; the exit code."""
        return await self._end(signal.SIGTERM)

    async def _end(self, number: int) -> int:
        assert self._process is not None
        if self._process.returncode is None:
            os.kill(self.pid, number)
        code = await asyncio.wait_for(self._process.wait(), 60)
        self._process = None
        return code

    async def metrics(self) -> dict[str, float]:
        """`/metrics` as sample name with labels -> value."""
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/metrics") as reply:
            text = await reply.text()
        samples = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None:
            await self._end(signal.SIGKILL)
