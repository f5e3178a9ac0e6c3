"""All roots in one database, and a database against the repository."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from castore_experiments.signals.curves import Curves
from castore_experiments.signals.fill import (
    State,
    attached,
    batches_of,
    each_once,
    in_place,
    insert,
    insert_rows,
    started,
    unseen,
)
from castore_experiments.signals.foreign import completed, database, select
from castore_experiments.signals.imports import Foreign
from castore_experiments.signals.index import Source
from castore_experiments.signals.schema import TABLES, create_table, names

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa


def export_merged(curves: Curves, out: str | os.PathLike[str]) -> int:
    """Write one database of all rows of all sources, each row once; gives how many.

    Rows that came from other programs' files count once where they are equal, ``seq`` aside.

    Raises
    ------
    BackendError
        ``out`` cannot be written: what was there stays.
    """
    curves.refresh()
    batches = [b for s in curves.sources if isinstance(s, Source) for b in batches_of(s)]
    foreign = [s for s in curves.sources if isinstance(s, Foreign)]
    wide = any(f.wide for _, _, f in batches)
    wide = wide or any(
        _is_wide(rows) for s in foreign for t in TABLES for rows in s.rows(t, None, None)
    )
    state = State(wide=wide)
    with in_place(Path(out)) as temporary, attached(temporary) as connection:
        for table in TABLES:
            connection.execute(create_table(table, "d.", wide))
        native = [b for b in batches if not b[1].name.imported]
        rows = insert(connection, unseen(native, state), state, started(curves))
        for table in TABLES:
            imported = (
                part
                for source, batch, facts in batches
                if batch.name.imported
                for part in source.batch_rows(batch, facts, table)
            )
            others = (part for source in foreign for part in source.rows(table, None, None))
            for part in chain(imported, others):
                rows += _add_missing(connection, part, table, state)
    return rows


def compare(curves: Curves, path: str | os.PathLike[str]) -> list[str]:
    """What differs between a database and the snapshots; nothing when they agree.

    ``seq`` aside, rows are compared with all columns, and counted.

    Raises
    ------
    FormatError, CorruptObjectError, BackendError
        The database cannot be read.
    """
    import duckdb

    curves.refresh()
    differences = []
    with database(Path(path)) as (found, present), duckdb.connect() as connection:
        for table in TABLES:
            columns = ", ".join(n for n in names(table) if n != "seq")
            connection.execute(create_table(table, "ours_", True))
            _fill(connection, curves, f"ours_{table}", table)
            connection.execute(create_table(table, "theirs_", True))
            if table in present:
                theirs = found.connection.sql(select(found, table)).to_arrow_table()
                insert_rows(connection, f"theirs_{table}", table, completed(table, theirs))
            for a, b, what in (("ours", "theirs", "lacks"), ("theirs", "ours", "has besides")):
                left, right = (f"SELECT {columns} FROM {x}_{table}" for x in (a, b))
                count = _count(connection, f"SELECT count(*) FROM ({left} EXCEPT ALL {right})")
                if count:
                    differences.append(f"{path}: table {table} {what} {count} rows")
    return differences


def _fill(connection: duckdb.DuckDBPyConnection, curves: Curves, target: str, table: str) -> None:
    batches = [b for s in curves.sources if isinstance(s, Source) for b in batches_of(s)]
    for source, batch, facts in unseen(batches, State()):
        for rows in each_once(connection, source, batch, facts, table):
            insert_rows(connection, target, table, rows)


def _add_missing(
    connection: duckdb.DuckDBPyConnection, rows: pa.Table, table: str, state: State
) -> int:
    """Add the rows that are not there yet, ``seq`` aside; equal ones once."""
    columns = ", ".join(n for n in names(table) if n != "seq")
    connection.register("rows", rows)
    query = (
        f"SELECT *, {state.next} + row_number() OVER () FROM"
        f" (SELECT {columns} FROM rows EXCEPT SELECT {columns} FROM d.{table})"
    )
    added = _count(connection, f"INSERT INTO d.{table} {query}")
    connection.unregister("rows")
    state.next += added
    return added


def _count(connection: duckdb.DuckDBPyConnection, query: str) -> int:
    """The one number that a query gives."""
    found = connection.execute(query).fetchone()
    return int(found[0]) if found else 0


def _is_wide(rows: pa.Table) -> bool:
    steps = rows["step"].to_numpy()
    return bool(len(steps) and (steps.max() >= 1 << 31 or steps.min() < -(1 << 31)))
