"""A batch: the rows of one writer with sequence numbers ``first`` to ``last``, one snapshot. Pure.

The snapshot's key says all that is needed to choose among snapshots without reading them:
``w<writer>.<first>.<last>`` for rows a `Log` took, ``i<writer>.<first>.<last>`` for imported ones.
Of two batches of one ``w`` writer where one's range holds the other's, only the wider counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from castore import FormatError, SnapshotName
from castore_experiments.signals.run import Run

FORMAT = 1
SUFFIX = ".signals"
_KEY = re.compile(
    r"(?P<kind>[wi])(?P<writer>[0-9a-f]{16})\.(?P<first>[0-9]{1,19})\.(?P<last>[0-9]{1,19})"
)


@dataclass(frozen=True, slots=True, order=True)
class BatchName:
    """What a snapshot's key says. ``imported`` batches have numbers derived from content."""

    writer: str
    first: int
    last: int
    imported: bool = False

    @property
    def key(self) -> str:
        return f"{'i' if self.imported else 'w'}{self.writer}.{self.first}.{self.last}"

    def within(self, other: BatchName) -> bool:
        """Whether ``other`` has every row of this one."""
        same = self.writer == other.writer and not (self.imported or other.imported)
        return same and other.first <= self.first and self.last <= other.last


def parse_key(key: str) -> BatchName | None:
    """The batch that a snapshot's key names; None for anything else."""
    m = _KEY.fullmatch(key)
    if m is None or int(m["first"]) > int(m["last"]):
        return None
    return BatchName(m["writer"], int(m["first"]), int(m["last"]), m["kind"] == "i")


@dataclass(frozen=True, slots=True)
class RowsFile:
    """One Parquet file: its path, its rows, its first and last (metric, hash) in order."""

    path: str
    rows: int
    first: tuple[str, str | None]
    last: tuple[str, str | None]

    @property
    def table(self) -> str:
        return self.path.partition("/")[0]

    def may_hold(self, metric: str | None, hash: str | None) -> bool:
        """Whether rows of ``metric`` (and ``hash``, where given) can be in it."""
        if metric is None:
            return True
        if hash is None:
            return self.first[0] <= metric <= self.last[0]
        return sort_key(*self.first) <= (metric, True, hash) <= sort_key(*self.last)


def sort_key(metric: str, hash: str | None) -> tuple[str, bool, str]:
    """The order of curves in a file: by metric, then hash, rows without a hash first."""
    return (metric, hash is not None, hash or "")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a batch's snapshot records.

    ``runs`` those of its writer so far; ``hashes`` which experiment hashes each run has rows of;
    ``metrics`` names for each table (None: too many to list, the files say); ``replaces`` the
    snapshots it was made from; ``wide`` whether a step or annotation needs more than 32 bits;
    ``source`` what was imported.
    """

    files: tuple[RowsFile, ...]
    runs: tuple[Run, ...]
    hashes: Mapping[str, tuple[str | None, ...]]
    metrics: Mapping[str, tuple[str, ...]] | None
    replaces: tuple[str, ...] = ()
    wide: bool = False
    source: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self, name: BatchName) -> dict[str, Any]:
        """The snapshot's facts, finite JSON."""
        return {
            "signals": FORMAT,
            "writer": name.writer,
            "first": name.first,
            "last": name.last,
            "files": [[f.path, f.rows, list(f.first), list(f.last)] for f in self.files],
            "runs": [r.to_json() for r in self.runs],
            "hashes": {r: list(h) for r, h in self.hashes.items()},
            "metrics": self.metrics and {t: list(m) for t, m in self.metrics.items()},
            "replaces": list(self.replaces),
            "wide": self.wide,
            "source": dict(self.source),
        }

    @staticmethod
    def from_json(body: Mapping[str, Any], name: BatchName, where: str) -> Facts:
        """The facts in ``body``; `FormatError` for another format, or another batch's facts."""
        if body.get("signals") != FORMAT:
            raise FormatError(
                f"{where}: curves of format {body.get('signals')!r}, this castore reads {FORMAT}:"
                " upgrade castore"
            )
        if (body.get("writer"), body.get("first"), body.get("last")) != (
            name.writer,
            name.first,
            name.last,
        ):
            raise FormatError(f"{where}: its facts are of another batch than its key says")
        try:
            metrics = body["metrics"]
            return Facts(
                tuple(RowsFile(p, n, (a[0], a[1]), (b[0], b[1])) for p, n, a, b in body["files"]),
                tuple(Run.from_json(r, where) for r in body["runs"]),
                {r: tuple(h) for r, h in body["hashes"].items()},
                None if metrics is None else {t: tuple(m) for t, m in metrics.items()},
                tuple(body["replaces"]),
                bool(body["wide"]),
                body["source"],
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
            raise FormatError(f"{where}: malformed facts of a batch: {e!r}") from e


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that counts: rows with ``sequence > after`` (earlier ones are in another batch)."""

    snapshot: SnapshotName
    name: BatchName
    after: int = 0

    @property
    def rows(self) -> int:
        """How many sequence numbers it adds (for ``w`` writers)."""
        return self.name.last - max(self.after, self.name.first - 1)


def counting(snapshots: Iterable[SnapshotName]) -> list[Batch]:
    """The batches that count, so that no row counts twice; oldest snapshot first.

    Equal or contained ranges of one writer count once (the newest of the widest); where two
    overlap in part, the later one counts from where the earlier ends.
    """
    parsed = [(n, s) for s in snapshots if (n := parse_key(s.key)) is not None]
    chosen = [Batch(s, n) for n, s in parsed if n.imported]
    native = sorted(
        ((n, s) for n, s in parsed if not n.imported),
        key=lambda p: (p[0].writer, p[0].first, -p[0].last, -p[1].time, p[1].namespace),
    )
    writer, covered = "", -1
    for name, snapshot in native:
        if name.writer != writer:
            writer, covered = name.writer, -1
        if name.last > covered:
            chosen.append(Batch(snapshot, name, covered))
            covered = name.last
    return sorted(chosen, key=lambda b: (b.snapshot.time, b.snapshot))
