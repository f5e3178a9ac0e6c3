"""Progress bars. A module of its own so that rich is loaded for a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)


@contextmanager
def bar(what: str, total: int | None, objects: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, gone at the end; gives what to tell the bytes, or objects, done to."""
    counted = (TextColumn("{task.completed:,.0f} objects"),)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *(counted if objects else (DownloadColumn(), TransferSpeedColumn())),
        TimeElapsedColumn(),
    )
    # Results go to stdout, which may be a pipe: rich must not redirect it to the terminal.
    with Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
