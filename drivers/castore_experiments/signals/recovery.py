"""What killed writers left in their local files, into the repository."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from castore import Repository
from castore_experiments.signals import wal
from castore_experiments.signals.batch import SUFFIX, BatchName, parse_key
from castore_experiments.signals.lock import WriterLock
from castore_experiments.signals.publish import publish

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Recovered:
    """Rows of a dead writer brought in, and bytes at the end that were no whole record."""

    writer: str
    rows: int
    lost_bytes: int


def recover(
    repository: Repository, namespace: str, wal_folder: str | os.PathLike[str]
) -> list[Recovered]:
    """Bring in the rows that dead writers of this namespace left.

    Folders of live writers, and of other namespaces or repositories, are not touched.

    Rows that a snapshot has already are left out, by their numbers. Several processes may do
    this at once. A writer that left nothing is not in the list.

    Raises
    ------
    BackendError
        A file cannot be read, or the repository not be written: nothing was removed.
    FormatError
        A file is of a newer format.
    """
    folder, found = Path(wal_folder), []
    for writer in wal.writers(folder):
        lock = WriterLock.take(folder / writer / "lock")
        if lock is None:
            continue
        try:
            contents = wal.read(folder / writer)
            if contents.owner not in (None, wal.Owner(repository.id, namespace)):
                continue
            one = _recover(repository, namespace, writer, contents)
            wal.clear(folder / writer)
        finally:
            lock.release()
        if one.rows or one.lost_bytes:
            found.append(one)
    return found


def _recover(
    repository: Repository, namespace: str, writer: str, contents: wal.Contents
) -> Recovered:
    tables = {}
    last = _last(repository, namespace, writer) if contents.tables else 0
    for table, parts in contents.tables.items():
        rows = _after(parts, last)
        if rows.num_rows:
            tables[table] = rows
    if tables:
        columns = [t["sequence"].to_numpy() for t in tables.values()]
        ends = min(int(c.min()) for c in columns), max(int(c.max()) for c in columns)
        name = BatchName(writer, *ends)
        publish(repository, namespace, name, tables, contents.runs.values())
    return Recovered(writer, sum(t.num_rows for t in tables.values()), contents.lost)


def _last(repository: Repository, namespace: str, writer: str) -> int:
    """The highest number of ``writer`` that a snapshot holds; 0 for none."""
    keys = (parse_key(n.key) for n in repository.snapshots(namespace + SUFFIX))
    return max((k.last for k in keys if k and k.writer == writer and not k.imported), default=0)


def _after(parts: list[pa.Table], last: int) -> pa.Table:
    """Rows with numbers above ``last``, each once."""
    import numpy as np
    import pyarrow as pa

    rows = pa.concat_tables(parts)
    sequence = rows["sequence"].to_numpy()
    _, first = np.unique(sequence, return_index=True)
    return rows.take(first[sequence[first] > last])
