"""Another program's curves: into the repository, or read beside it.

An import adds the rows that the namespace does not hold yet, whoever wrote them. Equal rows are
counted: of three in the file and one in the repository two are new. A row's number is made from
its content, so two imports at once, or of two copies, bring in the same rows under the same
numbers, which count once.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castore import CastoreError, Repository
from castore_experiments.signals import foreign
from castore_experiments.signals.batch import BatchName
from castore_experiments.signals.duckfile import wal_of
from castore_experiments.signals.foreign import DATABASE, Found, Kind
from castore_experiments.signals.index import Source
from castore_experiments.signals.parquet import of_curve
from castore_experiments.signals.publish import publish
from castore_experiments.signals.run import Run, newest
from castore_experiments.signals.schema import COLUMNS, TABLES, arrow_schema

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

WRITER = "0" * 16
"""The writer of all imported rows: their numbers come from their content."""
_SETTLED = 2.0  # seconds after which a file's time tells one state of it from the next


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did: rows added, the kind of files found, what could not be read."""

    rows: int
    kind: Kind
    warnings: tuple[str, ...] = ()


def foreign_run(namespace: str) -> str:
    """The run of a namespace's first import: what a resume of such a root has as parent.

    Each later import is a run of its own, a child of the newest run of its time.
    """
    return f"{_importer(namespace)}.0"


def import_signals(
    repository: Repository,
    namespace: str,
    folder: str | os.PathLike[str],
    *,
    source: Source | None = None,
) -> Imported:
    """Bring the rows of a loggers folder into ``<namespace>.signals`` that are not there yet.

    Only copies of the files are read. Again is harmless and adds what the files gained since.
    ``source`` is that of the namespace, where one is at hand: what it knows is not read again.

    Raises
    ------
    FormatError
        A newer DuckDB's file (names both versions), or no such file.
    CorruptObjectError
        A damaged one. Neither the repository nor the file was changed.
    BackendError
        It cannot be read, or the repository not be written.
    """
    folder = Path(folder)
    source = source or Source(repository, namespace)
    source.refresh()
    state = _state(folder / DATABASE)
    if state and any(dict(f.source) == state for _, f in source.batches()):
        return Imported(0, "duckdb")
    found = foreign.read(folder)
    fresh = _fresh(found, source) if found.tables else {}
    if fresh:
        numbers = [t["sequence"].to_numpy() for t in fresh.values()]
        ends = min(int(n.min()) for n in numbers), max(int(n.max()) for n in numbers)
        name = BatchName(WRITER, *ends, imported=True)
        run = _import_run(source)
        fresh = {t: _of_run(rows, t, run.id) for t, rows in fresh.items()}
        publish(repository, namespace, name, fresh, [run], source=state)
    rows = sum(t.num_rows for t in fresh.values())
    return Imported(rows, found.kind, tuple(found.warnings))


@dataclass(eq=False)
class Foreign:
    """The curves in a loggers folder of the public tool, as a source of `Curves`.

    Nothing is imported or written. What cannot be read is left out, and ``warning`` says why.
    """

    folder: Path
    leads: bool = True
    warning: str | None = None
    _found: Found | None = field(default=None, repr=False)
    _state: dict[str, Any] = field(default_factory=dict, repr=False)

    def refresh(self) -> None:
        """Read the files again if they changed."""
        folder = Path(self.folder)
        state = _state(folder / DATABASE)
        if self._found is not None and state and state == self._state:
            return
        try:
            self._found, self.warning = foreign.read(folder), None
            self.warning = "; ".join(self._found.warnings) or None
            self._state = state
        except CastoreError as e:
            self._found, self.warning = Found("none", {}, []), str(e)

    def runs(self) -> list[Run]:
        """One run: the file does not say which rows were logged by which."""
        return [Run(self._run(), None, None, 0)]

    def hashes(self) -> dict[str, set[str | None]]:
        """The hashes of all rows."""
        found = (set(t["experiment_hash"].unique().to_pylist()) for t in self._tables().values())
        hashes: set[str | None] = set().union(*found)
        return {self._run(): hashes} if hashes else {}

    def metrics(self, table: str) -> set[str]:
        """The metrics of a table."""
        rows = self._tables().get(table)
        return set() if rows is None else set(rows["metric_name"].unique().to_pylist())

    def rows(self, table: str, metric: str | None, hashes: Iterable[str] | None) -> list[pa.Table]:
        """The rows of a metric."""
        rows = self._tables().get(table)
        return [] if rows is None else [_of_run(of_curve(rows, metric, hashes), table, self._run())]

    def _tables(self) -> Mapping[str, pa.Table]:
        return self._found.tables if self._found else {}

    def _run(self) -> str:
        return foreign_run(os.path.realpath(self.folder))


def _state(database: Path) -> dict[str, Any]:
    """What tells one state of a database file from another; nothing where that is not sure."""
    try:
        info = os.stat(database)
    except OSError:
        return {}
    if wal_of(database).exists() or time.time() - info.st_mtime < _SETTLED:
        return {}
    return {"file": database.name, "size": info.st_size, "modified": info.st_mtime_ns}


def _importer(namespace: str) -> str:
    return hashlib.sha256(namespace.encode()).hexdigest()[:16]


def _import_run(source: Source) -> Run:
    """The run of an import: it goes on from the newest one, at a step that nobody noted."""
    known = source.runs()
    latest = newest(known)
    importer = _importer(source.namespace)
    number = sum(r.id.startswith(importer) for r in known)
    started = latest.started + 1 if latest else 0
    return Run(f"{importer}.{number}", latest.id if latest else None, None, started)


def _of_run(rows: pa.Table, table: str, run: str) -> pa.Table:
    import pyarrow as pa

    schema = arrow_schema(table)
    column = pa.repeat(pa.scalar(run), rows.num_rows).dictionary_encode()
    at = schema.get_field_index("run")
    return rows.set_column(at, schema.field(at), pa.chunked_array([column]))


def _fresh(found: Found, source: Source) -> dict[str, pa.Table]:
    """The rows that the namespace lacks, numbered by content."""
    import duckdb

    fresh = {}
    with (
        tempfile.TemporaryDirectory(prefix="castore-") as folder,
        duckdb.connect(str(Path(folder) / "scratch.duckdb")) as scratch,
    ):
        for table in TABLES:
            if table in found.tables and found.tables[table].num_rows:
                held = _held(scratch, source, table)
                rows = _missing(scratch, table, found.tables[table], held)
                if rows.num_rows:
                    fresh[table] = rows
    return fresh


def _held(scratch: duckdb.DuckDBPyConnection, source: Source, table: str) -> str:
    """The keys of all rows of the namespace, counted, as a table of ``scratch``."""
    name = f"held_{table}"
    scratch.execute(f"CREATE TABLE {name}_all (imported BOOLEAN, sequence BIGINT, key VARCHAR)")
    for batch, facts in source.batches():
        for rows in source.batch_rows(batch, facts, table):
            scratch.register("rows", rows)
            query = f"SELECT {batch.name.imported}, sequence, {_key(table)} FROM rows"
            scratch.execute(f"INSERT INTO {name}_all {query}")
            scratch.unregister("rows")
    scratch.execute(
        f"CREATE TABLE {name} AS SELECT key, count(*) AS held FROM ("
        f"SELECT key FROM {name}_all WHERE NOT imported UNION ALL SELECT any_value(key)"
        f" FROM {name}_all WHERE imported GROUP BY sequence) GROUP BY key"
    )
    return name


def _missing(scratch: duckdb.DuckDBPyConnection, table: str, rows: pa.Table, held: str) -> pa.Table:
    """The rows of which there are more than ``held``, with numbers made from their content."""
    import pyarrow as pa

    scratch.register("found", rows)
    counted = (
        f"SELECT *, row_number() OVER (PARTITION BY key ORDER BY sequence) AS nth"
        f" FROM (SELECT sequence, {_key(table)} AS key FROM found)"
    )
    new = scratch.sql(
        f"SELECT f.sequence, (md5_number_lower(f.key || '.' || f.nth) >> 4)::BIGINT AS number"
        f" FROM ({counted}) f LEFT JOIN {held} h ON f.key = h.key"
        f" WHERE f.nth > coalesce(h.held, 0) ORDER BY f.sequence"
    ).to_arrow_table()
    scratch.unregister("found")
    chosen = rows.take(new["sequence"])
    at = rows.schema.get_field_index("sequence")
    return chosen.set_column(at, arrow_schema(table).field(at), new["number"].cast(pa.int64()))


def _key(table: str) -> str:
    """SQL for a digest of a row's content, ``seq`` aside: each value with its length before it."""
    parts = []
    for c in COLUMNS[table]:
        if c.name != "seq":
            text = f"CAST({c.name} AS VARCHAR)"
            parts.append(f"coalesce(length({text}) || ':' || {text}, 'N')")
    return f"md5(concat({', '.join(parts)}))"
