"""The three tables of curves: names, order and types of their columns. No I/O.

The documented columns are those of ``loggers.duckdb``, in its order (the public tool inserts by
position). A Parquet file has them and two more: ``run``, the attempt a row belongs to, and
``sequence``, its number within its writer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

TABLES = ("signals", "per_sample", "per_instance")
INT32 = (-(1 << 31), (1 << 31) - 1)
INT64 = (-(1 << 63), (1 << 63) - 1)


@dataclass(frozen=True, slots=True)
class Column:
    """A documented column: its SQL type, its Arrow type, and what stands in for a missing one."""

    name: str
    sql: str
    arrow: str
    missing: Any = None


_KEY = (
    Column("metric_name", "VARCHAR", "word"),
    Column("experiment_hash", "VARCHAR", "word"),
)
_STEP = Column("step", "INTEGER", "int64")
_SAMPLE = Column("sample_id", "VARCHAR", "string")
_VALUE = (Column("value", "REAL", "float"), Column("seq", "BIGINT", "int64"))

COLUMNS: dict[str, tuple[Column, ...]] = {
    "signals": (
        *_KEY,
        _STEP,
        Column("metric_value", "DOUBLE", "double"),
        Column("timestamp", "BIGINT", "int64"),
        Column("audit_mode", "BOOLEAN", "bool", False),
        Column("is_evaluation_marker", "BOOLEAN", "bool", False),
        Column("split_name", "VARCHAR", "word", ""),
        Column("evaluation_tags", "VARCHAR", "word", "[]"),
        Column("point_note", "VARCHAR", "word", ""),
        Column("outliers", "VARCHAR", "string", ""),
        Column("outlier_count", "INTEGER", "int32", 0),
        Column("sample_count", "INTEGER", "int32", 0),
        Column("trend_value", "DOUBLE", "double"),
        Column("trend_margin", "DOUBLE", "double"),
        Column("value_min", "DOUBLE", "double"),
        Column("value_max", "DOUBLE", "double"),
        Column("seq", "BIGINT", "int64"),
    ),
    "per_sample": (*_KEY, _SAMPLE, _STEP, *_VALUE),
    "per_instance": (*_KEY, _SAMPLE, Column("annotation_id", "INTEGER", "int64"), _STEP, *_VALUE),
}

IDENTITY: dict[str, tuple[str, ...]] = {
    "signals": ("step", "experiment_hash"),
    "per_sample": ("step", "experiment_hash", "sample_id"),
    "per_instance": ("step", "experiment_hash", "sample_id", "annotation_id"),
}
"""What tells two points of one metric apart, in the order they are shown."""


def names(table: str) -> list[str]:
    """The documented columns of ``table``, in the order of the database."""
    return [c.name for c in COLUMNS[table]]


def word() -> pa.DataType:
    """The Arrow type of text that repeats: dictionary of int32 to string."""
    import pyarrow as pa

    return pa.dictionary(pa.int32(), pa.string())


def arrow_schema(table: str) -> pa.Schema:
    """The schema of ``table``'s Parquet files: the documented columns, ``run``, ``sequence``."""
    import pyarrow as pa

    plain = {
        "word": word(),
        "string": pa.string(),
        "int64": pa.int64(),
        "int32": pa.int32(),
        "double": pa.float64(),
        "float": pa.float32(),
        "bool": pa.bool_(),
    }
    fields = [(c.name, plain[c.arrow]) for c in COLUMNS[table]]
    return pa.schema([*fields, ("run", word()), ("sequence", pa.int64())])


def create_table(table: str, prefix: str = "", wide: bool = False) -> str:
    """The SQL that makes ``table``; ``wide`` has BIGINT steps and annotations.

    The documented INTEGER holds steps below 2**31; a database with one beyond that gets BIGINT,
    which the public tool reads and extends all the same.
    """
    columns = ", ".join(
        f"{c.name} {'BIGINT' if wide and c.name in ('step', 'annotation_id') else c.sql}"
        for c in COLUMNS[table]
    )
    return f"CREATE TABLE {prefix}{table} ({columns})"
