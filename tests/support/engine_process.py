"""A real engine process and the server's end of its socket."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from hillstar.engine.config import EngineConfig
from hillstar.engine.framing import (
    FrameReader,
    decode_from_engine,
    encode_config,
    encode_message,
    frame,
)
from hillstar.engine.messages import Failed, Finish, Frame, FromEngine, Ready, ToEngine

DEADLINE_S = 60.0


class EngineProcess:
    """`python -m hillstar.engine.main` on a tiny model; a context manager that ends it."""

    def __init__(self, model_dir: Path, **changes: object) -> None:
        values: dict[str, object] = {
            "model_dir": model_dir,
            "model_name": "tiny",
            "dtype": "float32",
            "block_size": 8,
            "num_blocks": 64,
            "max_model_len": 256,
            "max_num_seqs": 8,
            "max_batched_tokens": 64,
        }
        self.config = EngineConfig(**{**values, **changes})  # type: ignore[arg-type]
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(DEADLINE_S)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hillstar.engine.main", "--fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self.tokens: dict[str, list[int]] = {}
        self.finishes: dict[str, Finish] = {}
        self.messages: list[FromEngine] = []
        self._reader = FrameReader()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)

    def configure(self) -> None:
        self.socket.sendall(encode_config(self.config))

    def start(self) -> Ready:
        """Configure it and wait until it is loaded."""
        self.configure()
        self.read_until(lambda: isinstance(self.messages[-1], Ready | Failed))
        ready = self.messages[-1]
        assert isinstance(ready, Ready), ready
        return ready

    def send(self, message: ToEngine) -> None:
        self.socket.sendall(encode_message(message))

    def send_payload(self, payload: bytes) -> None:
        """A frame whose content may be anything."""
        self.socket.sendall(frame(payload))

    def read_until(self, condition: Callable[[], bool]) -> None:
        """Take messages in until the condition holds; fails at the end of the stream."""
        while not (self.messages and condition()):
            data = self.socket.recv(1 << 16)
            assert data, "the engine closed its socket"
            for payload in self._reader.feed(data):
                message = decode_from_engine(payload)
                self.messages.append(message)
                if isinstance(message, Frame):
                    self._take(message)

    def read_finish(self, *sequence_ids: str) -> None:
        self.read_until(lambda: all(name in self.finishes for name in sequence_ids))

    def wait_exit(self, timeout_s: float = DEADLINE_S) -> tuple[int, float]:
        """Its exit status and how long that took."""
        started_s = time.monotonic()
        return self.process.wait(timeout_s), time.monotonic() - started_s

    def _take(self, message: Frame) -> None:
        for output in message.outputs:
            tokens = self.tokens.setdefault(output.sequence_id, [])
            tokens += output.token_ids
            if output.finish is not None:
                assert output.sequence_id not in self.finishes, "one finish for each sequence"
                self.finishes[output.sequence_id] = output.finish
