"""Who asks, and from which page: API keys to principals, and the check of `Origin`.

Keys are compared as SHA-256 digests in constant time; neither a key nor a digest is ever logged.
"""

import hashlib
import hmac
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from hillstar.engine.config import ConfigError
from hillstar.server.config import is_loopback
from hillstar.server.errors import ApiError, invalid_api_key
from hillstar.server.ports import Principal

LOCAL = Principal("local", operator=True)
"""Everybody, where no keys are configured (the server then listens on loopback alone)."""

KEY_PROTOCOL_PREFIX = "hillstar-key."
"""Browsers cannot set headers on an upgrade: the key travels as a subprotocol never selected."""


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: bytes
    principal: Principal


class KeyRing:
    """The API keys of one file. `reload` replaces them all at once, or keeps the old ones."""

    def __init__(self, path: Path | None) -> None:
        """Read `path`; None: no keys, everybody is `LOCAL`. Raises ConfigError."""
        self._path = path
        self._entries: tuple[_Entry, ...] | None = None
        self.reload()

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return self._entries is not None

    def reload(self) -> None:
        """Read the file again. Raises ConfigError, naming the line, and changes nothing then."""
        if self._path is not None:
            self._entries = _read(self._path)

    def authenticate(self, headers: Mapping[str, str]) -> Principal:
        """The principal of a request's headers. Raises ApiError 401."""
        if self._entries is None:
            return LOCAL
        key = _bearer(headers.get("Authorization", "")) or _protocol_key(
            headers.get("Sec-WebSocket-Protocol", "")
        )
        if key is None:
            raise invalid_api_key()
        digest = _digest(key)
        found: Principal | None = None
        for entry in self._entries:  # all of them: the time says nothing about the position
            if hmac.compare_digest(entry.digest, digest):
                found = entry.principal
        if found is None:
            raise invalid_api_key()
        return found


def require_operator(principal: Principal) -> None:
    """Raises ApiError 403 unless the principal may see the whole server."""
    if not principal.operator:
        raise ApiError(403, "operator_required", "This needs the key of an operator.")


def subprotocols(header: str) -> list[str]:
    """The subprotocols a client offers, without the one that carries a key."""
    offered = (part.strip() for part in header.split(","))
    return [name for name in offered if name and not name.startswith(KEY_PROTOCOL_PREFIX)]


class OriginPolicy:
    """Which web pages may talk to the server: its own, and those on the allow-list."""

    def __init__(self, allowed: tuple[str, ...], *, loopback_only: bool) -> None:
        """`loopback_only`: no keys are asked, so a page is our own only under a loopback name.

        Otherwise a foreign name made to resolve to 127.0.0.1 (DNS rebinding) would pass: its
        page sends that name as Origin and as Host.
        """
        self._any = "*" in allowed
        self._allowed = frozenset(origin.lower() for origin in allowed)
        self._loopback_only = loopback_only

    def allows(self, origin: str | None, host: str) -> bool:
        """Whether a page of `origin` may ask the server reached as `host` (the Host header).

        A request without Origin comes from no page. `null` (a sandboxed page, a file) is a
        stranger unless everybody is allowed.
        """
        if origin is None or self._any or origin.lower() in self._allowed:
            return True
        try:
            parts = urlsplit(origin)
            name = parts.hostname or ""
        except ValueError:
            return False
        if self._loopback_only and not is_loopback(name):
            return False
        return bool(host) and parts.netloc.lower() == host.lower()

    def check(self, origin: str | None, host: str) -> None:
        """Raises ApiError 403 where `allows` says no."""
        if not self.allows(origin, host):
            raise ApiError(
                403, "origin_not_allowed", f"Pages of {origin!r} may not use this server."
            )


def _bearer(header: str) -> str | None:
    scheme, _, key = header.partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def _protocol_key(header: str) -> str | None:
    for part in header.split(","):
        name = part.strip()
        if name.startswith(KEY_PROTOCOL_PREFIX):
            return name.removeprefix(KEY_PROTOCOL_PREFIX) or None
    return None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _read(path: Path) -> tuple[_Entry, ...]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("api_keys", str(path), f"a readable text file ({error})") from error
    entries: dict[bytes, _Entry] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = list(itertools.takewhile(lambda word: not word.startswith("#"), line.split()))
        if not words:
            continue
        if len(words) not in (2, 3) or words[2:] not in ([], ["operator"]):
            raise ConfigError(
                "api_keys", f"{path}:{number}", "lines of the form TENANT KEY [operator]"
            )
        digest = _digest(words[1])
        if digest in entries:
            raise ConfigError("api_keys", f"{path}:{number}", "each key once")
        entries[digest] = _Entry(digest, Principal(words[0], operator=len(words) == 3))
    if not entries:
        raise ConfigError("api_keys", str(path), "a file with at least one key")
    return tuple(entries.values())
