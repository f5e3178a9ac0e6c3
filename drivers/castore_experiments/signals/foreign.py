"""Curves as the public tool keeps them, as tables of ours: ``loggers.duckdb``, or older JSON.

Columns are taken by name: their order differs between versions, and older files lack some.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from castore_experiments.signals import legacy
from castore_experiments.signals.duckfile import Opened, opened
from castore_experiments.signals.schema import COLUMNS, TABLES, arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa

DATABASE = "loggers.duckdb"
Kind = Literal["duckdb", "json", "none"]


@dataclass(slots=True)
class Found:
    """What a loggers folder holds: the kind of files, its tables, what could not be read.

    Tables have the columns of `arrow_schema`; ``run`` is null and ``sequence`` the row's place.
    """

    kind: Kind
    tables: dict[str, pa.Table]
    warnings: list[str]


def read(folder: Path) -> Found:
    """All rows in a loggers folder; the database where there is one, else JSON files.

    Raises
    ------
    FormatError, CorruptObjectError, BackendError
        As `opened` and `legacy.read`.
    """
    database = folder / DATABASE
    if database.exists():
        with opened(database) as found:
            tables = {t: _rows(found, t) for t in _present(found)}
            return Found("duckdb", tables, found.warnings)
    if legacy.is_there(folder):
        tables, warnings = legacy.read(folder)
        return Found("json", tables, warnings)
    return Found("none", {}, [])


@contextmanager
def database(path: Path) -> Iterator[tuple[Opened, list[str]]]:
    """A database's copy, open, and which of the tables it has."""
    with opened(path) as found:
        yield found, _present(found)


def select(found: Opened, table: str) -> str:
    """SQL for the documented columns of ``table``, missing ones filled in; no views are read."""
    query = "SELECT column_name FROM duckdb_columns() WHERE NOT internal AND table_name = ?"
    have = {r[0] for r in found.connection.execute(query, [table]).fetchall()}
    parts = []
    for c in COLUMNS[table]:
        kind = "BIGINT" if c.name in ("step", "annotation_id") else c.sql
        default = "NULL" if c.missing is None else _literal(c.missing)
        value = f'coalesce("{c.name}", {default})' if c.name in have else default
        parts.append(f"CAST({value} AS {kind}) AS {c.name}")
    return f"SELECT {', '.join(parts)} FROM {table}"


def _rows(found: Opened, table: str) -> pa.Table:
    query = select(found, table) + " ORDER BY seq, rowid"
    return completed(table, found.connection.sql(query).to_arrow_table())


def completed(table: str, rows: pa.Table) -> pa.Table:
    """Rows of the documented columns with ``run`` (null) and ``sequence`` (their place) added.

    Rows without a metric or step, which no curve can have, are left out.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = rows.filter(pc.and_(pc.is_valid(rows["metric_name"]), pc.is_valid(rows["step"])))
    place = np.arange(rows.num_rows)
    rows = rows.append_column("run", pa.nulls(rows.num_rows, pa.string()))
    rows = rows.append_column("sequence", pa.array(place))
    schema = arrow_schema(table)
    columns = []
    for f in schema:
        column = rows[f.name]
        if pa.types.is_dictionary(f.type):
            column = column.cast(pa.string()).dictionary_encode()
        columns.append(column.cast(f.type))
    filled = pa.table(columns, schema=schema)
    if not filled["seq"].null_count:
        return filled
    seq = pc.coalesce(filled["seq"], pa.chunked_array([place]))
    return filled.set_column(schema.get_field_index("seq"), "seq", seq)


def _present(found: Opened) -> list[str]:
    query = "SELECT table_name FROM duckdb_tables() WHERE NOT internal"
    have = {r[0] for r in found.connection.execute(query).fetchall()}
    return [t for t in TABLES if t in have]


def _literal(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)
