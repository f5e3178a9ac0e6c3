"""What the audits of layouts share: items with one verdict a link, told as table, JSON or picture.

item = Item("run/step_0000100", (Link("checkpoint_sha256", "ok"),), {"step": 100})
show([item])
raise SystemExit(exit_code([item]))
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

from castore import CastoreError

VERDICTS = ("ok", "not-checked", "missing", "unreadable", "mismatch")
"""From the best to the worst."""

SOUND = frozenset(VERDICTS[:2])
"""What is no problem."""

PROBLEMS = 3
"""Exit code: the audit finished and found problems."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Link:
    """One promise and whether it was kept; ``detail`` says what was expected and found."""

    name: str
    verdict: str
    detail: str = ""

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"{self.name}: verdict {self.verdict!r}, expected one of {VERDICTS}")


@dataclass(frozen=True, slots=True)
class Item:
    """One audited thing: its name, its links, and facts that go into JSON and table."""

    name: str
    links: tuple[Link, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """The worst problem; ``ok`` where there is none and some link was checked."""
        return worst(link.verdict for link in self.links if link.verdict != "not-checked")

    @property
    def problems(self) -> tuple[Link, ...]:
        """The links that are neither ok nor left unchecked."""
        return tuple(link for link in self.links if link.verdict not in SOUND)


def worst(verdicts: Iterable[str]) -> str:
    """The worst of the verdicts; ``not-checked`` where there is none at all."""
    return max(verdicts, key=VERDICTS.index, default="not-checked")


def exit_code(items: Iterable[Item]) -> int:
    """0 where every item is sound, else 3."""
    return PROBLEMS if any(item.problems for item in items) else 0


def audited(
    work: Callable[[T], Item], things: Sequence[T], name: Callable[[T], str], workers: int = 4
) -> Iterator[Item]:
    """``work`` on all things in parallel, in their order.

    An error of one is an item with one unreadable link, so that the others get their turn.
    """

    def safe(thing: T) -> Item:
        try:
            return work(thing)
        except (CastoreError, OSError, ValueError, LookupError) as e:
            return Item(name(thing), (Link("readable", "unreadable", str(e)),))

    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(safe, things)


def document(item: Item) -> str:
    """One line of strict JSON."""
    return json.dumps(
        {
            "type": "audit",
            "name": item.name,
            "verdict": item.verdict,
            "links": {link.name: link.verdict for link in item.links},
            "problems": [
                {"link": link.name, "verdict": link.verdict, "detail": link.detail}
                for link in item.problems
            ],
            "facts": dict(item.facts),
        },
        allow_nan=False,
    )


def show(
    items: Sequence[Item],
    columns: Sequence[str] = (),
    as_json: bool = False,
    to: TextIO = sys.stdout,
) -> None:
    """The whole report: JSON, one document a line; or a table with every problem below it.

    ``columns`` names the facts that the table shows.
    """
    if as_json:
        for item in items:
            to.write(document(item) + "\n")
        return
    to.writelines(line + "\n" for line in table(items, columns))
    for item in items:
        for link in item.problems:
            to.write(f"{safe(item.name)}: {link.name}: {link.verdict}: {safe(link.detail)}\n")
    bad = sum(bool(item.problems) for item in items)
    to.write(f"{len(items)} audited, {bad} with problems\n")


def table(items: Sequence[Item], columns: Sequence[str] = ()) -> Iterator[str]:
    """Aligned lines: name, verdict, facts, and how many links have each verdict."""
    head = ["NAME", "VERDICT", *(c.upper() for c in columns), *(v.upper() for v in VERDICTS)]
    rows = [head, *(_row(item, columns) for item in items)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        yield "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()


def _row(item: Item, columns: Sequence[str]) -> list[str]:
    counts = [sum(link.verdict == v for link in item.links) for v in VERDICTS]
    facts = [_cell(item.facts.get(c)) for c in columns]
    return [safe(item.name), item.verdict, *facts, *map(str, counts)]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else safe(str(value))


def safe(text: str) -> str:
    """Nothing that could steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def plot(
    path: str | Path,
    series: Mapping[str, Sequence[tuple[float, float]]],
    x: str,
    y: str,
    marked: Sequence[tuple[float, float]] = (),
) -> None:
    """A picture: one line of (x, y) points a series, ``marked`` points ringed in red.

    Needs matplotlib (an ImportError otherwise); draws without a display.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in series.items():
        axes.plot([p[0] for p in points], [p[1] for p in points], marker=".", label=name)
    if marked:
        axes.plot(
            [p[0] for p in marked],
            [p[1] for p in marked],
            "o",
            mfc="none",
            mec="red",
            ms=10,
            label="problems",
        )
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if series:
        axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(str(path), dpi=120)
