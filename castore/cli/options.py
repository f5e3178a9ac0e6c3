"""Options that several commands share, and how their texts are read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from castore.errors import InvalidInputError

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from castore.repository import Repository

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw])|0")

RepositoryUrl = Annotated[
    str,
    typer.Option(
        "--repository",
        "-r",
        envvar="CASTORE_REPOSITORY",
        metavar="URL",
        help="Path or URL of the repository.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document a line on stdout.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
Labels = Annotated[
    list[str] | None, typer.Option("--label", metavar="K=V", help="May be given several times.")
]
Namespaces = Annotated[
    list[str] | None,
    typer.Option("--namespace", "-n", metavar="NAMESPACE", help="May be given several times."),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", min=1, help="Let this many local processes work."),
]
Dask = Annotated[
    str | None,
    typer.Option("--dask", metavar="ADDRESS", help="Let the workers of this Dask scheduler work."),
]
Snapshots = Annotated[list[str], typer.Argument(metavar="SNAPSHOT", show_default=False)]
SinceText = Annotated[
    str | None,
    typer.Option(
        "--since", metavar="AGE|DATE", help="Only snapshots since then: 7d, 12h, 2026-11-30."
    ),
]


def open_repository(url: str) -> Repository:
    """The repository at ``url``; imported here so that help stays quick."""
    from dataclasses import replace

    from castore.repository import Repository

    repository = Repository.open(url)
    repository.patience = replace(repository.patience, say=_say)
    return repository


def _say(text: str) -> None:
    """Why a command waits; people's text goes to stderr."""
    typer.echo(text, err=True)


@contextmanager
def at_work(workers: int | None, dask: str | None) -> Iterator[Executor | None]:
    """Who does a command's work: None is this process. Imported here so that help stays quick."""
    from castore.workers import opened

    if workers is not None and dask is not None:
        raise typer.BadParameter("--workers and --dask: choose one of the two")
    with opened(workers, dask) as executor:
        yield executor


def parse_labels(texts: Sequence[str] | None) -> dict[str, str]:
    """``K=V`` texts as a mapping."""
    labels: dict[str, str] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"label {text!r}: expected KEY=VALUE")
        if labels.setdefault(key, value) != value:
            raise typer.BadParameter(f"label {key!r} is given twice with different values")
    return labels


def parse_duration(text: str) -> float:
    """Seconds in a text such as ``14d``, ``1.5h`` or ``0``."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"{text!r}: expected a number and s, m, h, d or w, such as 14d")
    return float(match[1]) * _UNITS[match[2]] if match[1] else 0.0


@dataclass(frozen=True, slots=True)
class Since:
    """A moment: seconds before the store's now, or microseconds since the epoch."""

    ago: float | None = None
    at: int | None = None

    def moment(self, repository: Repository) -> int | None:
        """Microseconds since the epoch by the store's clock."""
        if self.ago is None:
            return self.at
        return int((repository.backend.now() - self.ago) * 1_000_000)


def parse_since(text: str | None) -> Since:
    """An age such as ``7d``, or an ISO date or time (UTC where it names no zone)."""
    if text is None:
        return Since()
    if _DURATION.fullmatch(text):
        return Since(ago=parse_duration(text))
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: expected an age such as 7d, or a date such as 2026-11-30"
        ) from None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return Since(at=int(date.timestamp() * 1_000_000))


def parse_share(text: str | None) -> float | None:
    """``5%`` or ``0.05`` as a share over 0 and up to 1."""
    if text is None:
        return None
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise typer.BadParameter(f"sample {text!r}: expected a share such as 5% or 0.05")
    return share


def parse_part(text: str | None) -> tuple[int, int] | None:
    """``K/N``: part K, from 1, of N."""
    if text is None:
        return None
    from castore.parts import Part

    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    try:
        part = Part(int(match[1]), int(match[2])) if match else None
    except InvalidInputError as e:
        raise typer.BadParameter(str(e)) from None
    if part is None:
        raise typer.BadParameter(f"part {text!r}: expected K/N, such as 3/16")
    return part.number, part.of


def split_path(text: str) -> tuple[str, str]:
    """``SNAPSHOT:PATH`` taken apart."""
    snapshot, colon, path = text.partition(":")
    if not colon or not path.strip("/"):
        raise typer.BadParameter(f"{text!r}: expected SNAPSHOT:PATH")
    return snapshot, path.strip("/")
