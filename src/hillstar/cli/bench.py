"""`hillstar bench`: load a running server and print what it did."""

import argparse
import asyncio
import json
import os
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hillstar.cli.options import BENCH, KEY_VARIABLE
from hillstar.cli.reach import require_server
from hillstar.cli.settings import resolve
from hillstar.clients.load import LoadConfig, run_load


def run(arguments: argparse.Namespace) -> int:
    """Run the load; the last line is the report as JSON. 1 if any stream was not as it must be."""
    settings = resolve(BENCH, arguments)
    settings["key"] = settings["key"] or os.environ.get(KEY_VARIABLE)
    config = LoadConfig(**settings)
    require_server(config.url)
    with Progress(
        TextColumn("streams"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    ) as bar:
        task = bar.add_task("streams", total=config.num_requests)
        report = asyncio.run(run_load(config, lambda done: bar.update(task, completed=done)))
    _print_table(report)
    print(json.dumps(report))
    return 1 if report["num_errors"] else 0


def _print_table(report: dict[str, Any]) -> None:
    table = Table(title="hillstar bench", show_header=False, title_justify="left")
    table.add_row("completed", f"{report['num_completed']} of {report['num_requests']}")
    table.add_row("throughput", f"{report['output_tok_s']} output tokens/s")
    table.add_row("requests", f"{report['requests_per_s']} /s")
    for name, label in (("ttft", "time to first token"), ("itl", "inter-token latency")):
        p50, p99 = report[f"{name}_p50_ms"], report[f"{name}_p99_ms"]
        table.add_row(label, f"p50 {p50} ms, p99 {p99} ms")
    table.add_row("prompt tokens found cached", str(report["cached_tokens"]))
    for reason, count in report["errors"].items():
        table.add_row("error", f"{count} x {reason}")
    Console().print(table)
