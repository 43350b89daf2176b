"""Text to values: how each kind of setting is read, on the command line and in a file alike.

Every parser takes (field, text) and raises `ConfigError` naming the field, the text as it was
written and what is expected.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hillstar.engine.config import ConfigError

T = TypeVar("T")

Parser = Callable[[str, str], T]
"""(field, text) -> value, or `ConfigError`."""

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def text(field: str, value: str) -> str:
    """Any text but the empty one."""
    if not value.strip():
        raise ConfigError(field, value, "some text")
    return value


def path(field: str, value: str) -> Path:
    """A path; `~` is the home directory."""
    return Path(text(field, value)).expanduser()


def integer(low: int, high: int) -> Parser[int]:
    """A parser of integers from `low` to `high`, both included."""

    def parse(field: str, value: str) -> int:
        try:
            result = int(value)
        except ValueError:
            result = low - 1
        if not low <= result <= high:
            raise ConfigError(field, value, f"an integer from {low} to {high}")
        return result

    return parse


def power_of_two(low: int, high: int) -> Parser[int]:
    """A parser of powers of two from `low` to `high`, both included."""

    def parse(field: str, value: str) -> int:
        result = int(value) if value.isascii() and value.isdecimal() else 0
        if not low <= result <= high or result & (result - 1):
            raise ConfigError(field, value, f"a power of two from {low} to {high}")
        return result

    return parse


def number(low: float, high: float) -> Parser[float]:
    """A parser of numbers from `low` to `high`, both included."""

    def parse(field: str, value: str) -> float:
        try:
            result = float(value)
        except ValueError:
            result = low - 1
        if not low <= result <= high:
            raise ConfigError(field, value, f"a number from {low:g} to {high:g}")
        return result

    return parse


def choice(*allowed: str) -> Parser[str]:
    """A parser that takes one of `allowed`."""

    def parse(field: str, value: str) -> str:
        if value not in allowed:
            raise ConfigError(field, value, f"one of {', '.join(allowed)}")
        return value

    return parse


def flag(field: str, value: str) -> bool:
    """`true` or `false`."""
    if value not in ("true", "false"):
        raise ConfigError(field, value, "true or false")
    return value == "true"


def size_bytes(field: str, value: str) -> int:
    """A size such as `4GiB`, `512MiB`, `1.5GB` or plain bytes."""
    match = _SIZE.fullmatch(value.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    num_bytes = int(float(match[1]) * unit) if match and unit else 0
    if not 1 << 16 <= num_bytes <= 1 << 50:
        raise ConfigError(field, value, "a size from 64KiB to 1024TiB, such as 4GiB or 512MiB")
    return num_bytes


def base_url(field: str, value: str) -> str:
    """The address of a server, without a trailing slash."""
    if not re.fullmatch(r"https?://[^/\s?#@]+/?", value):
        raise ConfigError(field, value, "an address such as http://127.0.0.1:8040")
    return value.rstrip("/")


def format_bytes(num_bytes: float) -> str:
    """`num_bytes` for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def default_data_dir() -> Path:
    """Where models and the journal live unless told otherwise (XDG base directories)."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "hillstar"
