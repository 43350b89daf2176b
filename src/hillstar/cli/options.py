"""The command line's commands and their flags. Imports no heavy module: `--help` is instant."""

import argparse
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from hillstar.cli import values
from hillstar.cli.report import CommandError
from hillstar.cli.settings import Setting, add_settings

_MODEL_HELP = "a Hugging Face folder, a .gguf file or a model's name (default: the built-in model)"

KEY_VARIABLE = "HILLSTAR_API_KEY"
"""The environment variable that `chat` and `bench` take a key from when no flag gives one."""

DATA_DIR = Setting(
    "data-dir",
    values.path,
    None,
    "where models and the journal live (default: $XDG_DATA_HOME/hillstar)",
    "DIR",
)

SERVE = (
    Setting("model", values.text, None, _MODEL_HELP, "MODEL"),
    Setting("host", values.text, "127.0.0.1", "address to listen on; keys are needed beyond it"),
    Setting("port", values.integer(0, 65535), 8040, "port to listen on (8040; 0: any free one)"),
    DATA_DIR,
    Setting(
        "device",
        values.choice("auto", "cpu", "cuda"),
        "auto",
        "auto, cpu or cuda (auto: a CUDA GPU where there is one)",
    ),
    Setting(
        "dtype",
        values.choice("auto", "float32", "bfloat16", "float16"),
        "auto",
        "auto, float32, bfloat16 or float16 (auto: bfloat16 where the hardware multiplies it)",
    ),
    Setting("kv-blocks", values.integer(2, 1 << 31), None, "KV cache size in blocks", "N"),
    Setting(
        "kv-memory",
        values.size_bytes,
        None,
        "KV cache size in bytes, such as 4GiB (default: a share of the free memory, printed)",
        "SIZE",
    ),
    Setting(
        "block-size",
        values.power_of_two(8, 256),
        16,
        "tokens a KV block holds: a power of two from 8 to 256 (16)",
        "N",
    ),
    Setting(
        "max-model-len",
        values.integer(16, 1 << 24),
        None,
        "most tokens of prompt and output of one response (default: the model's context)",
        "N",
    ),
    Setting(
        "max-num-seqs", values.integer(1, 4096), 64, "most sequences in a batch at once (64)", "N"
    ),
    Setting(
        "max-batched-tokens",
        values.integer(8, 1 << 20),
        None,
        "most tokens computed in one step (1024, or max-num-seqs where that is more)",
        "N",
    ),
    Setting(
        "inter-token-target-ms",
        values.integer(0, 60_000),
        100,
        "milliseconds between two tokens of a response while prompts are read beside it, which"
        " then takes longer; 0: as long as it takes (100)",
        "MS",
    ),
    Setting(
        "deterministic",
        values.flag,
        False,
        "a response's tokens do not depend on what else is computed beside it; slower",
    ),
    Setting(
        "no-speculation",
        values.flag,
        False,
        "compute one token of a response at a time; otherwise, on a CPU, tokens that the context"
        " suggests are checked several at once, which never changes them",
    ),
    Setting(
        "api-keys",
        values.path,
        None,
        "file with lines `TENANT KEY [operator]`; without it everybody is tenant `local`",
        "FILE",
    ),
    Setting(
        "allow-origin",
        values.text,
        (),
        "a web origin whose pages may connect, or *; may be given several times",
        "ORIGIN",
        repeat=True,
    ),
    Setting(
        "durability",
        values.choice("process", "power"),
        "process",
        "what a stored token survives: process (its death) or power (its loss) (process)",
    ),
    Setting(
        "max-creates-per-minute",
        values.integer(1, 1 << 31),
        None,
        "most responses a tenant may create in a minute (default: no limit)",
        "N",
    ),
    Setting(
        "drain-timeout",
        values.number(0, 3600),
        30.0,
        "seconds that running responses may go on after SIGTERM (30)",
        "SECONDS",
    ),
    Setting("debug", values.flag, False, "serve an echo socket at /debug/echo"),
    Setting(
        "log-level",
        values.choice("debug", "info", "warning", "error"),
        "info",
        "debug, info, warning or error (info)",
        "LEVEL",
    ),
)

_URL = Setting(
    "url", values.base_url, "http://127.0.0.1:8040", "the server (http://127.0.0.1:8040)", "URL"
)
_KEY = Setting("key", values.text, None, f"API key (default: ${KEY_VARIABLE})", "KEY")

CHAT = (
    _URL,
    _KEY,
    Setting("conversation", values.text, None, "go on with this conversation", "CONV_ID"),
    Setting("instructions", values.text, None, "a system prompt for each turn", "TEXT"),
    Setting("temperature", values.number(0.0, 2.0), None, "0 is greedy (the server's default)"),
    Setting("max-output-tokens", values.integer(1, 1 << 24), None, "most tokens an answer has"),
)

BENCH = (
    _URL,
    _KEY,
    Setting("num-requests", values.integer(1, 10**7), 64, "requests in all (64)", "N"),
    Setting("concurrency", values.integer(1, 10**5), 8, "requests at once (8)", "N"),
    Setting("input-tokens", values.integer(1, 1 << 24), 128, "prompt length, about (128)", "N"),
    Setting("output-tokens", values.integer(1, 1 << 24), 64, "tokens of each answer (64)", "N"),
    Setting("transport", values.choice("ws", "sse"), "ws", "ws or sse (ws)"),
    Setting("seed", values.integer(0, (1 << 31) - 1), 0, "of the prompts (0)", "N"),
)

FETCH = (DATA_DIR,)
SIZE = (
    DATA_DIR,
    *(s for s in SERVE if s.name in ("dtype", "device", "kv-blocks", "kv-memory", "block-size")),
)


class OneLineParser(argparse.ArgumentParser):
    """A parser whose complaints are one line too."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see `{self.prog} --help`)", exit_code=2)


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command; `command` in what it returns names the one that was given."""
    parser = OneLineParser(
        prog="hillstar",
        description="Serves language models to conversations that last.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hillstar {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")

    def command(name: str, summary: str, settings: Sequence[Setting]) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            allow_abbrev=False,
        )
        add_settings(added, settings)
        return added

    serve = command("serve", "serve a model over HTTP and WebSockets", SERVE)
    serve.add_argument("--config", metavar="FILE.toml", help="read settings from a TOML file")
    command("chat", "chat in the terminal with a running server", CHAT)
    command("bench", "load a running server and measure it", BENCH)
    fetch = command("fetch", "fetch and unpack a model ahead of serving it", FETCH)
    fetch.add_argument("--json", action="store_true", help="print folder and name as JSON")
    fetch.add_argument("model", nargs="?", metavar="MODEL", help=_MODEL_HELP)
    size = command("size", "show how much KV memory a model's tokens take", SIZE)
    size.add_argument("model", nargs="?", metavar="MODEL", help=_MODEL_HELP)
    return parser


def _version() -> str:
    try:
        return version("hillstar")
    except PackageNotFoundError:
        return "(not installed)"
