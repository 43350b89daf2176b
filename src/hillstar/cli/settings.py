"""Settings as data: one table serves the command line and the configuration file.

A `Setting` knows its name, how its text is read and its default. `resolve` merges: a flag wins
over the file, the file over the default. Names are the flags' without the dashes in front;
in a file `kv-memory` and `kv_memory` are the same.
"""

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hillstar.cli import values
from hillstar.engine.config import ConfigError


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `default` is a value, not text; `repeat` collects a tuple of values."""

    name: str
    parse: values.Parser[Any]
    default: Any
    help: str
    metavar: str | None = None
    repeat: bool = False

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def is_flag(self) -> bool:
        return self.parse is values.flag

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Declare the flag. Absent from the parsed arguments unless it was given."""
        option = f"--{self.name}"
        shown = self.help.replace("%", "%%")
        if self.is_flag:
            parser.add_argument(
                option, action="store_const", const="true", default=argparse.SUPPRESS, help=shown
            )
            return
        parser.add_argument(
            option,
            action="append" if self.repeat else "store",
            default=argparse.SUPPRESS,
            metavar=self.metavar or self.key.upper(),
            help=shown,
        )

    def read(self, given: object) -> Any:
        """The value of what a flag (text) or a file (text, number, truth value, list) gave."""
        if self.repeat:
            items = given if isinstance(given, list) else [given]
            return tuple(self.parse(self.name, _as_text(self.name, item)) for item in items)
        return self.parse(self.name, _as_text(self.name, given))


def add_settings(parser: argparse.ArgumentParser, settings: Sequence[Setting]) -> None:
    """Declare every setting as a flag of `parser`."""
    for setting in settings:
        setting.add_to(parser)


def resolve(
    settings: Sequence[Setting], arguments: argparse.Namespace, file: Path | None = None
) -> dict[str, Any]:
    """Every setting's value by key: from the flags, else from `file`, else its default.

    Raises `ConfigError` for a wrong value, an unknown name in the file or an unreadable file.
    """
    from_file = read_file(file, settings) if file else {}
    merged: dict[str, Any] = {}
    for setting in settings:
        given = getattr(arguments, setting.key, None)
        if given is None:
            given = from_file.get(setting.key)
        merged[setting.key] = setting.default if given is None else setting.read(given)
    return merged


def read_file(file: Path, settings: Sequence[Setting]) -> Mapping[str, object]:
    """The top-level table of a TOML file, keys normalised; unknown keys are refused by name."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError("config", str(file), f"a readable TOML file ({reason})") from None
    known = {setting.key: setting for setting in settings}
    for name in table:
        if name.replace("-", "_") not in known:
            expected = ", ".join(setting.name for setting in settings)
            raise ConfigError(f"config {file}", name, f"one of the settings {expected}")
    return {name.replace("-", "_"): value for name, value in table.items()}


def _as_text(name: str, given: object) -> str:
    if isinstance(given, bool):
        return "true" if given else "false"
    if isinstance(given, str | int | float):
        return str(given)
    raise ConfigError(name, given, "a single value")
