"""What a namespace holds of curves: batches known by their facts, files fetched when needed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from castore import (
    File,
    FormatError,
    Repository,
    Snapshot,
    SnapshotName,
    SnapshotNotFoundError,
    Tree,
)
from castore_experiments.signals import parquet
from castore_experiments.signals.batch import SUFFIX, Batch, Facts, RowsFile, counting
from castore_experiments.signals.run import Run

if TYPE_CHECKING:
    import pyarrow as pa

CACHE = 128 << 20
_TRIES = 5


class RowSource(Protocol):
    """Rows of curves: a namespace, a live `Log`, or another program's files."""

    leads: bool
    """Whether its newest run is shown by default; others serve as ancestors only."""

    def refresh(self) -> None:
        """Look for new rows; everything below is as of the last refresh."""

    def runs(self) -> list[Run]:
        """The runs it knows."""

    def hashes(self) -> dict[str, set[str | None]]:
        """For each run that has rows: the experiment hashes of its rows."""

    def metrics(self, table: str) -> set[str]:
        """The metrics of a table."""

    def rows(self, table: str, metric: str | None, hashes: Iterable[str] | None) -> list[pa.Table]:
        """The rows of a metric (None: of all), of some hashes where given."""


@dataclass(eq=False)
class Source:
    """The curves of an experiment: namespace ``<namespace>.signals`` of a repository.

    Nothing is read before `refresh`; each batch's facts are read once, its files when a curve
    needs them, kept within ``cache`` bytes. Safe for threads. ``leads=False`` for a namespace
    that only serves as ancestor, such as the one a copied root came from.
    """

    repository: Repository
    namespace: str
    leads: bool = True
    cache: int = CACHE
    _facts: dict[SnapshotName, Facts] = field(default_factory=dict, repr=False)
    _documents: dict[SnapshotName, Snapshot] = field(default_factory=dict, repr=False)
    _trees: dict[SnapshotName, Tree] = field(default_factory=dict, repr=False)
    _batches: list[Batch] = field(default_factory=list, repr=False)
    _files: OrderedDict[str, bytes] = field(default_factory=OrderedDict, repr=False)
    _cached: int = field(default=0, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @property
    def space(self) -> str:
        """The namespace of the snapshots."""
        return self.namespace + SUFFIX

    def refresh(self) -> None:
        """List the batches; one that a compaction replaced meanwhile is no error."""
        with self._lock:
            for last in (False,) * (_TRIES - 1) + (True,):
                batches = counting(self.repository.snapshots(self.space))
                try:
                    facts = {b.snapshot: self._facts_of(b) for b in batches}
                except SnapshotNotFoundError:
                    if last:
                        raise
                    continue
                self._batches, self._facts = batches, facts
                self._trees = {n: t for n, t in self._trees.items() if n in facts}
                self._documents = {n: d for n, d in self._documents.items() if n in facts}
                return

    def batches(self) -> list[tuple[Batch, Facts]]:
        """The batches that count, oldest first."""
        with self._lock:
            return [(b, self._facts[b.snapshot]) for b in self._batches]

    def runs(self) -> list[Run]:
        found = {r.id: r for _, facts in self.batches() for r in facts.runs}
        return list(found.values())

    def hashes(self) -> dict[str, set[str | None]]:
        found: dict[str, set[str | None]] = {}
        for _, facts in self.batches():
            for run, hashes in facts.hashes.items():
                found.setdefault(run, set()).update(hashes)
        return found

    def metrics(self, table: str) -> set[str]:
        found: set[str] = set()
        for batch, facts in self.batches():
            if facts.metrics is not None:
                found.update(facts.metrics.get(table, ()))
            else:
                for rows in self.batch_rows(batch, facts, table):
                    found.update(rows["metric_name"].unique().to_pylist())
        return found

    def rows(self, table: str, metric: str | None, hashes: Iterable[str] | None) -> list[pa.Table]:
        wanted = None if hashes is None else list(hashes)
        return [
            self._part(batch, file, metric, wanted)
            for batch, facts in self.batches()
            for file in facts.files
            if file.table == table and _may_hold(file, metric, wanted)
        ]

    def batch_rows(self, batch: Batch, facts: Facts, table: str) -> Iterator[pa.Table]:
        """All rows of a table that count in a batch, a file at a time; nothing is kept."""
        for file in facts.files:
            if file.table == table:
                data, where = self._bytes(batch, file, keep=False)
                yield _counting(parquet.decode(data, table, where), batch)

    def _part(
        self, batch: Batch, file: RowsFile, metric: str | None, hashes: list[str] | None
    ) -> pa.Table:
        data, where = self._bytes(batch, file, keep=True)
        if metric is None:
            found = parquet.of_curve(parquet.decode(data, file.table, where), None, hashes)
        else:
            found = parquet.decode_curve(data, file.table, where, metric, hashes)
        return _counting(found, batch)

    def _facts_of(self, batch: Batch) -> Facts:
        known = self._facts.get(batch.snapshot)
        if known is not None:
            return known
        document = self.repository.snapshot(batch.snapshot)
        facts = Facts.from_json(document.facts, batch.name, str(batch.snapshot))
        self._documents[batch.snapshot] = replace(document, facts={})
        self._facts[batch.snapshot] = facts  # at once: a refresh that fails goes on here
        return facts

    def _bytes(self, batch: Batch, file: RowsFile, *, keep: bool) -> tuple[bytes, str]:
        """A file's content, verified, and where it is."""
        where = f"{batch.snapshot}:{file.path}"
        with self._lock:
            entry = self._tree(batch).entries.get(file.path)
            if not isinstance(entry, File):
                raise FormatError(f"{where}: the facts name a file that the tree does not have")
            data = self._files.get(entry.sha256)
            if data is not None:
                self._files.move_to_end(entry.sha256)
                return data, where
        data = b"".join(self.repository.read_file(entry))
        if keep:
            self._keep(entry.sha256, data)
        return data, where

    def _tree(self, batch: Batch) -> Tree:
        """A batch's tree, found through the document that `refresh` read."""
        tree = self._trees.get(batch.snapshot)
        if tree is None:
            tree = self.repository.tree(self._documents[batch.snapshot])
            self._trees[batch.snapshot] = tree
        return tree

    def _keep(self, sha256: str, data: bytes) -> None:
        with self._lock:
            if sha256 in self._files or len(data) > self.cache:
                return
            self._files[sha256] = data
            self._cached += len(data)
            while self._cached > self.cache:
                self._cached -= len(self._files.popitem(last=False)[1])


def _may_hold(file: RowsFile, metric: str | None, hashes: list[str] | None) -> bool:
    if hashes is None:
        return file.may_hold(metric, None)
    return any(file.may_hold(metric, h) for h in hashes)


def _counting(rows: pa.Table, batch: Batch) -> pa.Table:
    """The rows that are not in an earlier batch of the writer."""
    import pyarrow.compute as pc

    if batch.name.imported or batch.after < batch.name.first:
        return rows
    return rows.filter(pc.greater(rows["sequence"], batch.after))
