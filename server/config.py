"""The server's configuration: one frozen value, validated when it is built.

Built once at the entry point (the CLI or an embedding program) beside the `EngineConfig`.
Nothing below the entry point reads the environment.
"""

import dataclasses
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, get_args
from urllib.parse import urlsplit

from hillstar.engine.config import ConfigError

Durability = Literal["process", "power"]
"""What a stored token survives. process: the death of the server. power: the loss of power."""

MAX_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything the server process needs to know besides the engine's configuration."""

    data_dir: Path  # journal, engine socket, caches; locked by one server at a time
    host: str = "127.0.0.1"
    port: int = 8040  # 0: any free one, printed at the start
    api_keys: Path | None = None  # lines `TENANT KEY [operator]`; required off loopback
    allow_origins: tuple[str, ...] = ()  # `https://chat.example.org`, or `*`
    durability: Durability = "process"
    max_connections: int = 10_000  # sockets, streams and creates that wait for their response
    max_frame_bytes: int = 16 << 20  # one socket frame or one request body
    max_creates_per_minute: int | None = None  # of one tenant; None: as many as it likes
    drain_timeout_s: float = 30.0  # how long running responses may finish after SIGTERM
    debug: bool = False  # adds the socket /debug/echo

    def __post_init__(self) -> None:
        if not 0 <= self.port <= MAX_PORT:
            raise ConfigError("port", self.port, f"an integer from 0 to {MAX_PORT}")
        if not self.host:
            raise ConfigError("host", self.host, "a host name or an IP address")
        if self.api_keys is None and not is_loopback(self.host):
            raise ConfigError(
                "host", self.host, "a loopback address, or api_keys: other hosts can reach it"
            )
        for origin in self.allow_origins:
            if origin != "*" and not _is_origin(origin):
                raise ConfigError(
                    "allow_origins", origin, "'*' or scheme://host[:port] without a path"
                )
        if self.durability not in get_args(Durability):
            raise ConfigError("durability", self.durability, "'process' or 'power'")
        if not 1 <= self.max_connections <= 1 << 20:
            raise ConfigError("max_connections", self.max_connections, "from 1 to 1048576")
        if not 1 << 10 <= self.max_frame_bytes <= 1 << 30:
            raise ConfigError("max_frame_bytes", self.max_frame_bytes, "from 1024 to 1073741824")
        if self.max_creates_per_minute is not None and self.max_creates_per_minute < 1:
            raise ConfigError(
                "max_creates_per_minute", self.max_creates_per_minute, "at least 1, or none"
            )
        if not 0 <= self.drain_timeout_s <= 3600:
            raise ConfigError("drain_timeout_s", self.drain_timeout_s, "from 0 to 3600 seconds")

    def replace(self, **changes: object) -> Self:
        """A copy with `changes`, validated again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        return False
    return bool(parts.scheme and parts.hostname) and text == f"{parts.scheme}://{parts.netloc}"
