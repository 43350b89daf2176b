"""`hillstar size`: how much KV memory a model's tokens take, and how many fit here."""

import argparse

from hillstar.cli import values
from hillstar.cli.model import data_dir_of, prepare_model
from hillstar.cli.options import SIZE
from hillstar.cli.settings import resolve
from hillstar.engine.models.size import DTYPE_BYTES


def run(arguments: argparse.Namespace) -> int:
    """Print one line for each KV group."""
    settings = resolve(SIZE, arguments)
    model = prepare_model(arguments.model, data_dir_of(settings), settings)
    group = model.group(settings["block_size"])
    memory = model.kv_memory_bytes(settings, most_tokens=1 << 40)
    print(f"{model.name}: {model.config.architecture}, {model.dtype} on {model.device}")
    print(
        f"KV group {group.name}: 2 x {group.num_layers} layers x {group.num_kv_heads} KV heads"
        f" x {group.head_dim} head dim x {DTYPE_BYTES[group.dtype]} bytes"
    )
    print(f"  a token: {group.bytes_per_token:,} bytes")
    print(f"  a block of {group.block_size} tokens: {group.bytes_per_block:,} bytes")
    print(
        f"  in {values.format_bytes(memory)}: {group.blocks_that_fit(memory):,} blocks,"
        f" {group.tokens_that_fit(memory):,} tokens"
    )
    return 0
