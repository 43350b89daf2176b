"""`hillstar fetch`: bring a model onto this machine, ready to serve."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from hillstar.cli import values
from hillstar.cli.options import FETCH
from hillstar.cli.settings import resolve
from hillstar.engine.models.fetch import ResolvedModel, resolve_model

ReportProgress = Callable[[int, int], None]
"""(bytes done, bytes in all; 0 = unknown)."""


def run(arguments: argparse.Namespace) -> int:
    """Fetch the model and print where it lies."""
    settings = resolve(FETCH, arguments)
    model = fetch_model(arguments.model, settings["data_dir"] or values.default_data_dir())
    print(f"{model.name}: {model.dir}")
    return 0


def fetch_model(name: str | None, data_dir: Path) -> ResolvedModel:
    """The model `name` (None: the built-in one) as a folder, with a progress bar meanwhile."""
    with progress_bar(f"fetching {name or 'the built-in model'}") as progress:
        return resolve_model(name, data_dir / "models", progress)


@contextmanager
def progress_bar(title: str) -> Iterator[ReportProgress]:
    """A bar of bytes on standard error, shown from the first report to the end of the block."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
    task = bar.add_task(title, total=None, start=False)

    def show(done: int, total: int) -> None:
        if not bar.live.is_started:
            bar.start()
            bar.start_task(task)
        bar.update(task, completed=done, total=total or None)

    try:
        yield show
    finally:
        bar.stop()
