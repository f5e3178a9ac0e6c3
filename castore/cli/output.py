"""What commands print: documents for programs, lines for people, progress for a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import typer

Progress = Callable[[int], None]


class Output:
    """Where one command's words go.

    Results go to stdout: documents, one a line, with ``--json``; lines of text without. Everything
    else is for people and goes to stderr, and only without ``--json``.
    """

    def __init__(self, as_json: bool):
        self.as_json = as_json

    def document(self, kind: str, /, **fields: Any) -> None:
        """One result for a program; without ``--json`` nothing."""
        if self.as_json:
            typer.echo(json.dumps({"type": kind, **fields}))

    def line(self, text: str) -> None:
        """One result for people or a pipe; with ``--json`` nothing."""
        if not self.as_json:
            typer.echo(text)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Rows under aligned columns; numbers (``>`` before the heading) to the right."""
        if not self.as_json:
            for text in aligned(head, rows):
                typer.echo(text)

    def note(self, text: str) -> None:
        """A word to people."""
        if not self.as_json:
            typer.echo(text, err=True)

    @contextmanager
    def progress(
        self, what: str, total: int | None = None, *, objects: bool = False
    ) -> Iterator[Progress]:
        """A bar with bytes and rate, or objects, while the block runs; on a terminal only."""
        if not sys.stderr.isatty():
            yield lambda _: None
            return
        from castore.cli.progress import bar

        with bar(what, total, objects) as advance:
            yield advance


def error_document(name: str, message: str, code: int) -> str:
    """The document a failed command ends with."""
    return json.dumps({"type": "error", "error": name, "message": message, "exit_code": code})


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table; nothing is cut, whatever the width of the terminal."""
    table = [[h.lstrip(">") for h in head], *([printable(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    for row in table:
        cells = [
            cell.rjust(width) if title.startswith(">") else cell.ljust(width)
            for cell, width, title in zip(row, widths, head, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def printable(text: str) -> str:
    """``text`` with everything that could steer a terminal shown as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(count: int) -> str:
    """Bytes for people, in powers of 1000."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"


def plural(count: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def utc(microseconds: int) -> str:
    """A moment for people, UTC to the second."""
    return f"{_moment(microseconds):%Y-%m-%d %H:%M:%S}"


def iso(microseconds: int) -> str:
    """A moment for programs: ISO 8601, UTC, microseconds."""
    return f"{_moment(microseconds):%Y-%m-%dT%H:%M:%S.%fZ}"


def _moment(microseconds: int) -> datetime:
    return datetime.fromtimestamp(microseconds // 1_000_000, UTC).replace(
        microsecond=microseconds % 1_000_000
    )
