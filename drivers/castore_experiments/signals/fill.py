"""Batches into a DuckDB file: which are not in it yet, their order, their numbers."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from castore import BackendError, CastoreError
from castore_experiments.signals.batch import Batch, Facts
from castore_experiments.signals.curves import Curves
from castore_experiments.signals.duckfile import wal_of
from castore_experiments.signals.index import Source
from castore_experiments.signals.parquet import codes
from castore_experiments.signals.schema import TABLES, names
from castore_experiments.signals.wal import sync_folder

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

STORAGE = "v1.0.0"
"""The DuckDB storage version: what DuckDB 1.0 and everything since opens."""
_ODD = frozenset("?\\")  # in a path DuckDB reads them as something else: it works on a copy then


@dataclass(slots=True)
class State:
    """What is in the file: kept beside it, believed only if the file is the one it tells of.

    ``sent``: of a root on S3, whether the file has arrived there.
    """

    identity: list[int] = field(default_factory=list)
    sent: bool = True
    rows: int = 0
    wide: bool = False
    next: int = 0
    bases: dict[str, int] = field(default_factory=dict)
    covered: dict[str, int] = field(default_factory=dict)
    imported: list[str] = field(default_factory=list)


def batches_of(source: Source) -> Iterator[tuple[Source, Batch, Facts]]:
    return ((source, b, f) for b, f in source.batches())


def started(curves: Curves) -> dict[str, int]:
    """When each run began."""
    return {r.id: r.started for s in curves.sources for r in s.runs()}


def unseen(
    batches: Iterable[tuple[Source, Batch, Facts]], state: State
) -> list[tuple[Source, Batch, Facts]]:
    """What is not in the file yet, each batch from where the file's rows of its writer end.

    Notes in ``state`` that it will be.
    """
    chosen = []
    for source, batch, facts in sorted(
        batches, key=lambda b: (b[1].name.first, b[1].snapshot.time)
    ):
        name = batch.name
        if name.imported:
            if batch.snapshot.name not in state.imported:
                state.imported.append(batch.snapshot.name)
                chosen.append((source, batch, facts))
        elif name.last > (after := max(batch.after, state.covered.get(name.writer, -1))):
            state.covered[name.writer] = name.last
            chosen.append((source, Batch(batch.snapshot, name, after), facts))
    return sorted(chosen, key=lambda b: (not b[1].name.imported, b[1].snapshot.time))


def insert(
    connection: duckdb.DuckDBPyConnection,
    batches: Sequence[tuple[Source, Batch, Facts]],
    state: State,
    order: dict[str, int],
) -> int:
    """Add batches to the attached database; gives how many rows."""
    _number(batches, state, order)
    added = 0
    for source, batch, facts in batches:
        for table in TABLES:
            for rows in each_once(connection, source, batch, facts, table):
                numbered = rows if batch.name.imported else _renumbered(rows, state.bases)
                added += insert_rows(connection, f"d.{table}", table, numbered)
    return added


def _number(
    batches: Sequence[tuple[Source, Batch, Facts]], state: State, order: dict[str, int]
) -> None:
    """Choose for each writer's runs what to add to their rows' numbers, so that all rise.

    Imported rows keep the numbers they came with; everything else comes after those.
    """
    for source, batch, facts in batches:
        if batch.name.imported:
            for table in TABLES:
                for rows in source.batch_rows(batch, facts, table):
                    state.next = max(state.next, int(rows["seq"].to_numpy().max(initial=0)) + 1)
    spans: dict[str, tuple[int, int]] = {}
    for _, batch, facts in batches:
        if not batch.name.imported:
            for run in facts.hashes:
                low, high = spans.get(run, (batch.name.first, batch.name.last))
                spans[run] = min(low, batch.name.first), max(high, batch.name.last)
    for run in sorted(spans, key=lambda r: (order.get(r, 0), r)):
        first, last = spans[run]
        state.bases.setdefault(run, max(state.next - first, 0))
        state.next = max(state.next, state.bases[run] + last + 1)


def each_once(
    connection: duckdb.DuckDBPyConnection, source: Source, batch: Batch, facts: Facts, table: str
) -> Iterator[pa.Table]:
    """The rows of a batch that count; imported ones that an earlier import brought are left out."""
    if not batch.name.imported:
        yield from source.batch_rows(batch, facts, table)
        return
    seen = f"seen_{table}"
    connection.execute(f"CREATE TEMP TABLE IF NOT EXISTS {seen} (sequence BIGINT)")
    for rows in source.batch_rows(batch, facts, table):
        connection.register("rows", rows)
        new = connection.sql(
            f"SELECT sequence FROM rows ANTI JOIN {seen} USING (sequence)"
        ).to_arrow_table()
        connection.execute(f"INSERT INTO {seen} SELECT sequence FROM rows")
        connection.unregister("rows")
        yield rows.filter(np.isin(rows["sequence"].to_numpy(), new["sequence"].to_numpy()))


def _renumbered(rows: pa.Table, bases: dict[str, int]) -> pa.Table:
    import pyarrow as pa

    index, runs = codes(rows["run"])
    base = np.array([bases.get(r or "", 0) for r in runs], np.int64)
    seq = rows["sequence"].to_numpy() + base[index] if runs else rows["sequence"].to_numpy()
    return rows.set_column(rows.schema.get_field_index("seq"), "seq", pa.array(seq))


def insert_rows(
    connection: duckdb.DuckDBPyConnection, target: str, table: str, rows: pa.Table
) -> int:
    columns = ", ".join(names(table))
    connection.register("rows", rows)
    connection.execute(f"INSERT INTO {target} ({columns}) SELECT {columns} FROM rows")
    connection.unregister("rows")
    return int(rows.num_rows)


@contextmanager
def attached(path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection with ``path`` attached as ``d``; written out and let go afterwards."""
    if set(str(path)) & _ODD:
        with tempfile.TemporaryDirectory(prefix="castore-") as folder:
            plain = Path(folder) / "plain.duckdb"
            if path.exists():
                shutil.copyfile(path, plain)
            with attached(plain) as connection:
                yield connection
            shutil.copyfile(plain, path)
        return
    import duckdb

    quoted = str(path).replace("'", "''")
    try:
        with duckdb.connect() as connection:
            connection.execute(f"ATTACH '{quoted}' AS d (STORAGE_VERSION '{STORAGE}')")
            yield connection
            connection.execute("CHECKPOINT d")
            connection.execute("DETACH d")
    except duckdb.Error as e:
        raise BackendError(f"{path} cannot be written: {str(e).splitlines()[0]}") from e


@contextmanager
def in_place(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to; durable and under ``path`` afterwards, or gone."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb") as f:
            os.fsync(f.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as e:
        if isinstance(e, CastoreError):
            raise
        raise BackendError(f"{path} cannot be written: {e.strerror}") from e
    finally:
        for left in (temporary, wal_of(temporary)):
            with suppress(OSError):
                left.unlink()
