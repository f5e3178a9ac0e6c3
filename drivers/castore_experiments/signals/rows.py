"""Rows that were logged and are not yet a table: kept as columns, numbered as they come.

A mapping of thousands of samples is two arrays, a plain point six numbers appended to columns. So
a call takes the same short time always, and turning columns into a table copies memory and holds
up no other thread.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from castore_experiments.signals.schema import COLUMNS, arrow_schema, word
from castore_experiments.signals.values import Floats

if TYPE_CHECKING:
    import pyarrow as pa

Longs = np.ndarray[Any, np.dtype[np.int64]]
Point: TypeAlias = tuple[str, str | None, int, float, int]
"""Metric, hash, step, value, timestamp."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one call: columns of equal length under one metric, hash and step."""

    metric: str
    hash: str | None
    step: int
    ids: pa.Array
    values: Floats
    annotations: Longs | None = None


@dataclass(slots=True)
class Points:
    """Points without the columns that most points do not have."""

    metrics: dict[str | None, int] = field(default_factory=dict)
    hashes: dict[str | None, int] = field(default_factory=dict)
    runs: dict[str | None, int] = field(default_factory=dict)
    codes: tuple[array[int], array[int], array[int]] = field(
        default_factory=lambda: (array("i"), array("i"), array("i"))
    )
    longs: tuple[array[int], array[int], array[int]] = field(
        default_factory=lambda: (array("q"), array("q"), array("q"))
    )
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, point: Point, run: str, number: int) -> None:
        """One point more."""
        metric, hash, step, value, timestamp = point
        metric_codes, hash_codes, run_codes = self.codes
        metric_codes.append(self.metrics.setdefault(metric, len(self.metrics)))
        hash_codes.append(self.hashes.setdefault(hash, len(self.hashes)))
        run_codes.append(self.runs.setdefault(run, len(self.runs)))
        steps, timestamps, numbers = self.longs
        steps.append(step)
        timestamps.append(timestamp)
        numbers.append(number)
        self.values.append(value)

    def table(self) -> pa.Table:
        """All of them, with the other columns as `schema.Column.missing` says."""
        import pyarrow as pa

        words = zip(self.codes, (self.metrics, self.hashes, self.runs), strict=True)
        metric, hash, run = (_words(codes, list(names)) for codes, names in words)
        step, timestamp, number = (np.frombuffer(x, np.int64) for x in self.longs)
        given = {
            "metric_name": metric,
            "experiment_hash": hash,
            "step": step,
            "metric_value": np.frombuffer(self.values, np.float64),
            "timestamp": timestamp,
            "seq": number,
            "run": run,
            "sequence": number,
        }
        default = {c.name: c.missing for c in COLUMNS["signals"]}
        schema = arrow_schema("signals")
        columns = [
            _array(given[f.name], f.type)
            if f.name in given
            else _constant(default[f.name], f.type, len(step))
            for f in schema
        ]
        return pa.table(columns, schema=schema)


@dataclass(slots=True)
class Rows:
    """What was logged since the last drain. Not safe for threads: the caller holds its lock."""

    first: int
    run: str
    next: int = 0
    _points: Points = field(default_factory=Points)
    _rich: list[tuple[Any, ...]] = field(default_factory=list)
    _blocks: dict[str, list[tuple[str, int, Block]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.next = self.first

    def add_point(self, point: Point, extra: tuple[Any, ...] | None) -> None:
        """One row of ``signals``; ``extra`` has the columns after ``timestamp`` but ``seq``."""
        if extra is None:
            self._points.add(point, self.run, self.next)
        else:
            self._rich.append((*point, *extra, self.next, self.run, self.next))
        self.next += 1

    def add_block(self, table: str, block: Block) -> None:
        """Rows of ``per_sample`` or ``per_instance``."""
        if len(block.values):
            self._blocks.setdefault(table, []).append((self.run, self.next, block))
            self.next += len(block.values)

    def tables(self) -> dict[str, pa.Table]:
        """All rows as tables; those without rows are left out."""
        import pyarrow as pa

        parts = []
        if self._points.values:
            parts.append(self._points.table())
        if self._rich:
            parts.append(_rich(self._rich))
        found = {t: _blocks(t, blocks) for t, blocks in self._blocks.items()}
        if parts:
            found["signals"] = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
        return found


def _rich(rows: list[tuple[Any, ...]]) -> pa.Table:
    import pyarrow as pa

    schema = arrow_schema("signals")
    columns = []
    for f, values in zip(schema, zip(*rows, strict=True), strict=True):
        if pa.types.is_dictionary(f.type):
            columns.append(pa.array(values, pa.string()).dictionary_encode())
        else:
            columns.append(pa.array(values, f.type))
    return pa.table(columns, schema=schema)


def _words(codes: array[int], names: list[str | None]) -> pa.Array:
    """A column of words by their codes; the code of None is null."""
    import pyarrow as pa

    index = np.frombuffer(codes, np.int32)
    mask = index == names.index(None) if None in names else None
    named = pa.array(["" if n is None else n for n in names], pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(index, mask=mask), named)


def _constant(value: Any, type: Any, count: int) -> pa.Array:
    import pyarrow as pa

    if value is None:
        return pa.nulls(count, type)
    if pa.types.is_dictionary(type):
        index = pa.array(np.zeros(count, np.int32))
        return pa.DictionaryArray.from_arrays(index, pa.array([value], pa.string()))
    return pa.repeat(pa.scalar(value, type), count)


def _blocks(table: str, found: list[tuple[str, int, Block]]) -> pa.Table:
    import pyarrow as pa

    blocks = [b for _, _, b in found]
    lengths = np.array([len(b.values) for b in blocks], np.int64)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    sequence = np.arange(lengths.sum()) - starts + np.repeat([n for _, n, _ in found], lengths)
    columns = {
        "metric_name": _repeated([b.metric for b in blocks], lengths),
        "experiment_hash": _repeated([b.hash for b in blocks], lengths),
        "run": _repeated([r for r, _, _ in found], lengths),
        "sample_id": pa.concat_arrays([b.ids for b in blocks]),
        "step": np.repeat(np.array([b.step for b in blocks], np.int64), lengths),
        "value": np.concatenate([b.values for b in blocks]),
        "seq": sequence,
        "sequence": sequence,
    }
    if table == "per_instance":
        columns["annotation_id"] = np.concatenate([b.annotations for b in blocks])
    schema = arrow_schema(table)
    arrays = [_array(columns[f.name], f.type) for f in schema]
    return pa.table(arrays, schema=schema)


def _array(values: Any, type: Any) -> pa.Array:
    """An Arrow column; numpy's NaN stays NaN and does not become null."""
    import pyarrow as pa

    return pa.array(values, type, from_pandas=False) if isinstance(values, np.ndarray) else values


def _repeated(words: list[Any], lengths: Longs) -> pa.Array:
    import pyarrow as pa

    encoded = pa.array(words, pa.string()).dictionary_encode()
    if encoded.null_count:
        return encoded.take(pa.array(np.repeat(np.arange(len(words)), lengths)))
    index = np.repeat(encoded.indices.to_numpy(), lengths).astype(np.int32)
    return pa.DictionaryArray.from_arrays(pa.array(index), encoded.dictionary).cast(word())
