"""Rows into the repository: one batch, one snapshot; and a writer's batches into fewer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from castore import Draft, MemoryFile, Options, Repository, SnapshotName
from castore_experiments.signals import parquet
from castore_experiments.signals.batch import SUFFIX, Batch, BatchName, Facts
from castore_experiments.signals.index import Source
from castore_experiments.signals.run import Run
from castore_experiments.signals.schema import INT32, TABLES

if TYPE_CHECKING:
    import pyarrow as pa

DRIVER = "experiments"
LISTED = 1 << 20
"""Characters of metric names that facts may take; beyond, readers ask the files."""
MERGE = 8
"""So many batches of a size become one."""
MERGED_ROWS = 1 << 22
"""Rows of the largest merged batch."""
_LEAST = 4  # batches of less than 2**15 rows count as one grade


def publish(
    repository: Repository,
    namespace: str,
    name: BatchName,
    tables: Mapping[str, pa.Table],
    runs: Iterable[Run],
    replaces: Sequence[str] = (),
    source: Mapping[str, Any] | None = None,
) -> SnapshotName:
    """Commit a batch into ``<namespace>.signals``; durable on return."""
    encoded = {t: list(parquet.encode(t, rows)) for t, rows in tables.items()}
    files = [(f, data) for part in encoded.values() for f, data in part]
    facts = Facts(
        tuple(f for f, _ in files),
        tuple(runs),
        _hashes(tables.values()),
        _metrics(tables),
        tuple(replaces),
        any(map(_wide, tables.values())),
        source or {},
    )
    draft = Draft(
        {f.path: MemoryFile(data) for f, data in files},
        driver=DRIVER,
        key=name.key,
        facts=facts.to_json(name),
    )
    # Parquet is packed already; another codec over it gains nothing.
    options = Options(compression="none")
    return repository.commit(draft, namespace=namespace + SUFFIX, options=options).name


def compact(source: Source, writer: str, *, all: bool) -> int:
    """Merge a writer's batches: `MERGE` of about one size, or all small ones; gives how many went.

    Only its own, so only the holder of the writer's lock may call it. The merged snapshot is
    durable, and names those it replaces, before they are forgotten.
    """
    source.refresh()
    mine = [(b, f) for b, f in source.batches() if b.name.writer == writer and not b.name.imported]
    mine.sort(key=lambda p: p[0].name)
    tail = _tail([b for b, _ in mine], all=all)
    if tail < 2:
        return 0
    merged = mine[-tail:]
    tables = {t: rows for t in TABLES if (rows := _united(source, merged, t)) is not None}
    runs = {r.id: r for _, f in merged for r in f.runs}
    name = BatchName(writer, merged[0][0].name.first, merged[-1][0].name.last)
    old = [b.snapshot for b, _ in merged]
    replaced = [n.name for n in old]
    publish(source.repository, source.namespace, name, tables, runs.values(), replaced)
    for snapshot in old:
        source.repository.forget(snapshot)
    return len(old)


def _tail(batches: Sequence[Batch], *, all: bool) -> int:
    """How many of the last batches to merge: all that fit, or from the first of `MERGE` of a grade.

    Each row is rewritten once for each grade, so the whole costs little however long a run is.
    """
    last, total = [], 0
    for batch in reversed(batches):
        total += batch.rows
        if total > MERGED_ROWS:
            break
        last.append(max(batch.rows.bit_length() // 3, _LEAST))
    if all:
        return len(last)
    for grade in sorted(set(last)):
        tail = list(takewhile(grade.__ge__, last))
        if tail.count(grade) >= MERGE:
            return len(tail)
    return 0


def _united(source: Source, merged: Sequence[tuple[Batch, Facts]], table: str) -> pa.Table | None:
    import pyarrow as pa

    parts = [rows for b, f in merged for rows in source.batch_rows(b, f, table)]
    return pa.concat_tables(parts) if parts else None


def _hashes(tables: Iterable[pa.Table]) -> dict[str, tuple[str | None, ...]]:
    """For each run the hashes of its rows."""
    found: dict[str, set[str | None]] = {}
    for rows in tables:
        run, runs = parquet.codes(rows["run"])
        hash, hashes = parquet.codes(rows["experiment_hash"])
        for pair in np.unique(run * max(len(hashes), 1) + hash):
            r, h = divmod(int(pair), max(len(hashes), 1))
            found.setdefault(str(runs[r]), set()).add(hashes[h])
    return {r: tuple(sorted(h, key=lambda x: (x is not None, x or ""))) for r, h in found.items()}


def _metrics(tables: Mapping[str, pa.Table]) -> dict[str, tuple[str, ...]] | None:
    names = {t: parquet.codes(rows["metric_name"])[1] for t, rows in tables.items()}
    if sum(len(n or "") for part in names.values() for n in part) > LISTED:
        return None
    return {t: tuple(str(n) for n in part) for t, part in names.items()}


def _wide(rows: pa.Table) -> bool:
    import pyarrow.compute as pc

    for column in {"step", "annotation_id"} & set(rows.schema.names):
        ends = pc.min_max(rows[column]).as_py()
        if ends["min"] is not None and (ends["min"] < INT32[0] or ends["max"] > INT32[1]):
            return True
    return False
