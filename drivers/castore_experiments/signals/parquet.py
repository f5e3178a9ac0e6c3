"""Rows as Parquet files: sorted by (metric, hash, step, seq), small enough to read whole.

A file has at most `FILE_ROWS` rows in groups of `GROUP_ROWS`, so that a curve of ten thousand
points is one or two groups of a few small files; statistics of each group say what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from castore import FormatError
from castore_experiments.signals.batch import RowsFile
from castore_experiments.signals.schema import arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa

FILE_ROWS = 1 << 18
GROUP_ROWS = 1 << 13
_DELTA = {"step": "DELTA_BINARY_PACKED", "seq": "DELTA_BINARY_PACKED"}
Index = np.ndarray[Any, np.dtype[np.int64]]


def codes(column: pa.ChunkedArray) -> tuple[Index, list[str | None]]:
    """A column of words as ranks in sorted order (None first), and the words by rank."""
    import pyarrow.compute as pc

    column = column.unify_dictionaries().combine_chunks()
    if hasattr(column, "chunks"):  # of no rows
        return np.zeros(0, np.int64), []
    words: list[str | None] = [None, *column.dictionary.to_pylist()]
    index = pc.fill_null(column.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64) + 1
    used = np.flatnonzero(np.bincount(index, minlength=len(words)))
    order = sorted(used.tolist(), key=lambda i: (words[i] is not None, words[i] or ""))
    rank = np.zeros(len(words), np.int64)
    rank[order] = np.arange(len(order))
    return rank[index], [words[i] for i in order]


def ordered(rows: pa.Table) -> pa.Table:
    """The rows by (metric, hash, step), in the order they were logged."""
    rows = rows.unify_dictionaries().combine_chunks()
    metric, _ = codes(rows["metric_name"])
    hash, hashes = codes(rows["experiment_hash"])
    keys = [rows[c].to_numpy() for c in ("seq", "step")]
    order = np.lexsort((*keys, metric * max(len(hashes), 1) + hash))
    return rows.take(order)


def encode(table: str, rows: pa.Table) -> Iterator[tuple[RowsFile, bytes]]:
    """Files of ``rows``, in order: ``<table>/00000.parquet`` and so on."""
    rows = ordered(rows)
    for i, start in enumerate(range(0, rows.num_rows, FILE_ROWS)):
        part = rows.slice(start, FILE_ROWS)
        ends = [
            (part["metric_name"][k].as_py(), part["experiment_hash"][k].as_py()) for k in (0, -1)
        ]
        path = f"{table}/{i:05d}.parquet"
        yield RowsFile(path, part.num_rows, ends[0], ends[1]), _encode(part)


def _encode(rows: pa.Table) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    words = [f.name for f in rows.schema if not pa.types.is_integer(f.type)]
    pq.write_table(
        rows.cast(arrow_schema_of(rows)),
        sink,
        row_group_size=GROUP_ROWS,
        compression="zstd",
        compression_level=1,
        use_dictionary=[w for w in words if pa.types.is_dictionary(rows.schema.field(w).type)],
        column_encoding=_DELTA | {"sequence": "DELTA_BINARY_PACKED"},
    )
    return bytes(sink.getvalue())


def arrow_schema_of(rows: pa.Table) -> pa.Schema:
    """The schema of the table that has ``rows``' columns."""
    table = "signals" if "metric_value" in rows.schema.names else "per_sample"
    return arrow_schema("per_instance" if "annotation_id" in rows.schema.names else table)


def decode(data: bytes, table: str, where: str) -> pa.Table:
    """All rows of a file, or `FormatError`."""
    return _reading(data, where, table, lambda file: file.read())


def decode_curve(
    data: bytes, table: str, where: str, metric: str, hashes: Iterable[str] | None
) -> pa.Table:
    """The rows of ``metric`` (and of some hashes); other groups of the file are not decoded."""

    def read(file: Any) -> Any:
        groups = [g for g in range(file.num_row_groups) if _may_hold(file, g, metric)]
        return file.read_row_groups(groups, use_threads=False)

    return of_curve(_reading(data, where, table, read), metric, hashes)


def of_curve(rows: pa.Table, metric: str | None, hashes: Iterable[str] | None) -> pa.Table:
    """The rows of one metric, and of some hashes where given."""
    import pyarrow.compute as pc

    if metric is not None:
        rows = rows.filter(pc.equal(rows["metric_name"], metric))
    if hashes is not None:
        import pyarrow as pa

        rows = rows.filter(pc.is_in(rows["experiment_hash"], pa.array(hashes, pa.string())))
    return rows


def _may_hold(file: Any, group: int, metric: str) -> bool:
    found = file.metadata.row_group(group).column(0).statistics
    if found is None or not found.has_min_max:
        return True
    return bool(found.min <= metric <= found.max)


def _reading(data: bytes, where: str, table: str, read: Callable[[Any], Any]) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = read(pq.ParquetFile(pa.BufferReader(data)))
        return rows.select(arrow_schema(table).names).cast(arrow_schema(table))
    except (pa.ArrowException, KeyError, OSError) as e:
        raise FormatError(f"{where}: not a Parquet file of {table}: {e}") from e
