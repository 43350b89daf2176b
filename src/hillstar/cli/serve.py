"""`hillstar serve`: settings to configurations, then the server's life in `server.app`."""

import argparse
import logging
import sys
from collections.abc import Mapping
from typing import Any

from hillstar.cli import values
from hillstar.cli.model import PreparedModel, config_file_of, data_dir_of, prepare_model
from hillstar.cli.options import SERVE
from hillstar.cli.progress import progress_bar
from hillstar.cli.report import CommandError
from hillstar.cli.settings import resolve
from hillstar.engine.config import ConfigError, EngineConfig
from hillstar.server.app import EngineFailed, JournalFailed, run_server
from hillstar.server.config import ServerConfig
from hillstar.server.logs import configure_logging

_DEFAULT_BATCHED_TOKENS = 1024


def run(arguments: argparse.Namespace) -> int:
    """Serve until the process is told to end. The settings are checked before any work."""
    settings = resolve(SERVE, arguments, config_file_of(arguments))
    server = server_config(settings)
    model = prepare_model(settings["model"], data_dir_of(settings), settings)
    engine = engine_config(settings, model)
    configure_logging(logging.getLevelNamesMapping()[settings["log_level"].upper()])
    _say(describe(engine, model))
    try:
        with progress_bar("loading weights") as progress:
            run_server(engine, server, on_loading=progress)
    except OSError as error:
        raise CommandError(error.strerror or str(error)) from None
    except (EngineFailed, JournalFailed) as error:
        raise CommandError(str(error)) from None
    return 0


def server_config(settings: Mapping[str, Any]) -> ServerConfig:
    """The server's part of the settings. Raises ConfigError."""
    return ServerConfig(
        data_dir=data_dir_of(settings),
        host=settings["host"],
        port=settings["port"],
        api_keys=settings["api_keys"],
        allow_origins=settings["allow_origin"],
        durability=settings["durability"],
        max_creates_per_minute=settings["max_creates_per_minute"],
        drain_timeout_s=settings["drain_timeout"],
        debug=settings["debug"],
    )


def engine_config(settings: Mapping[str, Any], model: PreparedModel) -> EngineConfig:
    """The engine's part of the settings, completed by what the model says. Raises ConfigError."""
    context = model.config.max_position_embeddings
    max_model_len = settings["max_model_len"] or context
    if max_model_len > context:
        raise ConfigError("max-model-len", max_model_len, f"at most the model's context {context}")
    max_num_seqs = settings["max_num_seqs"]
    num_blocks = settings["kv_blocks"]
    kv_memory = model.kv_memory_bytes(settings, max_num_seqs * max_model_len)
    model.check_kv_fits(settings)
    return EngineConfig(
        model_dir=model.dir,
        model_name=model.name,
        device=model.device,
        dtype=model.dtype,
        block_size=settings["block_size"],
        num_blocks=num_blocks,
        kv_memory_bytes=None if num_blocks else kv_memory,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=settings["max_batched_tokens"]
        or max(_DEFAULT_BATCHED_TOKENS, max_num_seqs),
        deterministic=settings["deterministic"],
        speculation=not settings["no_speculation"],
        inter_token_target_ms=settings["inter_token_target_ms"] or None,
    )


def describe(engine: EngineConfig, model: PreparedModel) -> str:
    """One line: what is about to run, and with how much KV memory."""
    group = model.group(engine.block_size)
    num_blocks = engine.num_blocks or group.blocks_that_fit(engine.kv_memory_bytes or 0)
    return (
        f"{engine.model_name}, {engine.dtype} on {engine.device};"
        f" KV cache {values.format_bytes(num_blocks * group.bytes_per_block)}:"
        f" {num_blocks * engine.block_size:,} tokens in {num_blocks:,} blocks"
    )


def _say(line: str) -> None:
    print(f"hillstar: {line}", file=sys.stderr)
