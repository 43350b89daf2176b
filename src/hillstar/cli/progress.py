"""Progress bars on standard error, only where a person looks at it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

ReportProgress = Callable[[int, int], None]
"""(bytes done, bytes in all; 0 = unknown)."""


@contextmanager
def progress_bar(title: str) -> Iterator[ReportProgress]:
    """A bar of bytes on standard error, shown from the first report to the last."""
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
        if not bar.live.is_started and done != total:
            bar.start()
            bar.start_task(task)
        bar.update(task, completed=done, total=total or None)
        if done == total:
            bar.stop()

    try:
        yield show
    finally:
        bar.stop()
