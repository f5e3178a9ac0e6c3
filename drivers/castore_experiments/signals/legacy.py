"""Curves from before the database: ``loggers.json``, or ``loggers.partNNNN.json.zst``.

``loggers.json`` is ``{"loggers": {name: payload}}``. ``loggers.manifest.json`` lists ``chunks``,
Zstandard files of lines ``{"logger_name": name, "payload": part of a payload}``; parts of one
logger are merged key by key. A payload has

- ``signal_history``: a list of points (``metric_name``, ``metric_value``, ``experiment_hash``,
  ``model_age`` for the step), or the same nested ``{metric: {hash: {step: point or points}}}``;
- ``signal_history_per_sample``: ``{metric: {hash: X}}``, X either columns (``sample_ids``,
  ``steps``, ``values``) or a list of points with ``sample_id``; or, older, ``{metric: {sample:
  point}}`` without hashes;
- ``signal_history_per_instance``: ``{metric: {hash: columns}}`` with ``annotation_ids``.

These spellings are those that the public tool (2.0.3) still reads; no file of an earlier version
was at hand. What has another shape is counted in a warning and left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castore import BackendError, FormatError
from castore_experiments.signals.schema import COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa

JSON, MANIFEST, PARTS = "loggers.json", "loggers.manifest.json", "loggers.part*.json.zst"
LARGEST = 4 << 30
"""Bytes that a packed part may unpack to."""


def is_there(folder: Path) -> bool:
    """Whether a folder has any such file."""
    return (folder / JSON).exists() or bool(_parts(folder))


def read(folder: Path) -> tuple[dict[str, pa.Table], list[str]]:
    """All rows, and warnings over what has an unknown shape.

    Raises
    ------
    FormatError
        Not JSON, or a part that the manifest names is missing or cannot be unpacked.
    """
    from castore_experiments.signals.foreign import completed

    rows: dict[str, list[dict[str, Any]]] = {}
    odd = 0
    for payload in _payloads(folder):
        for table, row in _rows(payload):
            if row is None:
                odd += 1
            else:
                rows.setdefault(table, []).append(row)
    warnings = [f"{folder}: {odd} entries of an unknown shape were left out"] if odd else []
    return {t: completed(t, _table(t, found)) for t, found in rows.items()}, warnings


def _payloads(folder: Path) -> list[dict[str, Any]]:
    """One payload for each logger."""
    parts = _parts(folder)
    if not parts:
        loggers = _parsed(_bytes(folder / JSON), folder / JSON).get("loggers")
        return [p for p in loggers.values() if isinstance(p, dict)] if loggers else []
    merged: dict[str, dict[str, Any]] = {}
    for path in parts:
        for line in _unpacked(path).splitlines():
            if line.strip():
                record = _parsed(line, path)
                if isinstance(record.get("payload"), dict):
                    _merge(merged.setdefault(str(record.get("logger_name")), {}), record["payload"])
    return list(merged.values())


def _parts(folder: Path) -> list[Path]:
    manifest = folder / MANIFEST
    if manifest.exists():
        named = _parsed(_bytes(manifest), manifest).get("chunks") or []
        if any("/" in str(n) or str(n) in ("", "..") for n in named):
            raise FormatError(f"{manifest}: names {named!r}, expected files beside it")
        if named:
            return [folder / str(n) for n in named]
    return sorted(folder.glob(PARTS))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise FormatError(f"{path} is missing, but the manifest beside it names it") from None
    except OSError as e:
        raise BackendError(f"{path} cannot be read: {e.strerror}") from e


def _parsed(data: bytes, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{path}: not JSON: {e}") from e
    if not isinstance(found, dict):
        raise FormatError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


def _unpacked(path: Path) -> bytes:
    import pyarrow as pa

    try:
        with pa.CompressedInputStream(pa.BufferReader(_bytes(path)), "zstd") as stream:
            data = bytes(stream.read(LARGEST))
    except (pa.ArrowException, OSError) as e:
        raise FormatError(f"{path}: not a Zstandard file: {e}") from e
    if len(data) == LARGEST:
        raise FormatError(f"{path}: unpacks to {LARGEST} bytes or more")
    return data


def _merge(into: dict[str, Any], part: dict[str, Any]) -> None:
    for key, value in part.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        elif isinstance(value, list) and isinstance(into.get(key), list):
            into[key] = [*into[key], *value]
        else:
            into[key] = value


def _rows(payload: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Each row of a payload with its table; None for what has an unknown shape."""
    for metric, hash, step, point in _points(payload.get("signal_history") or []):
        yield "signals", _row("signals", point, metric, hash, step)
    for metric, hash, found in _nested(payload.get("signal_history_per_sample")):
        if isinstance(found, list):
            for point in found:
                yield "per_sample", _row("per_sample", point, metric, hash, None)
        elif isinstance(found, dict) and "steps" not in found:
            yield "per_sample", _row("per_sample", {"sample_id": hash} | found, metric, None, None)
        else:
            yield from (("per_sample", r) for r in _columns("per_sample", metric, hash, found))
    for metric, hash, found in _nested(payload.get("signal_history_per_instance")):
        yield from (("per_instance", r) for r in _columns("per_instance", metric, hash, found))


def _points(history: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    if isinstance(history, list):
        for point in history:
            yield None, None, None, point
        return
    for metric, hash, steps in _nested(history):
        for step, found in steps.items() if isinstance(steps, dict) else ():
            for point in found if isinstance(found, list) else [found]:
                yield metric, hash, step, point


def _nested(found: Any) -> Iterator[tuple[str, Any, Any]]:
    for metric, inner in found.items() if isinstance(found, dict) else ():
        for hash, value in inner.items() if isinstance(inner, dict) else ():
            yield metric, None if hash in ("null", "None", "") else hash, value


def _columns(table: str, metric: str, hash: Any, found: Any) -> Iterator[dict[str, Any] | None]:
    try:
        rest = [found["annotation_ids"]] if table == "per_instance" else []
        rows = list(zip(found["sample_ids"], found["steps"], found["values"], *rest, strict=True))
    except (TypeError, KeyError, ValueError):
        yield None
        return
    for sample, step, value, *annotation in rows:
        point = {"sample_id": sample, "metric_value": value}
        if annotation:
            point["annotation_id"] = annotation[0]
        yield _row(table, point, metric, hash, step)


def _row(table: str, point: Any, metric: Any, hash: Any, step: Any) -> dict[str, Any] | None:
    if not isinstance(point, dict):
        return None
    found = dict(point)
    found["metric_name"] = metric if metric is not None else found.get("metric_name")
    found["experiment_hash"] = hash if metric is not None else found.get("experiment_hash")
    found["step"] = step if step is not None else found.get("model_age")
    found["value"] = found.get("metric_value")
    try:
        return {c.name: _value(c.sql, found.get(c.name), c.missing) for c in COLUMNS[table]}
    except (TypeError, ValueError):
        return None


def _value(sql: str, value: Any, missing: Any) -> Any:
    """A value as its column has it."""
    if value is None or (missing == "" and not value):
        return missing
    if sql == "VARCHAR":
        return (
            value if isinstance(value, str) else json.dumps(value) if _deep(value) else str(value)
        )
    if sql == "BOOLEAN":
        return bool(value)
    return int(value) if sql in ("INTEGER", "BIGINT") else float(value)


def _deep(value: Any) -> bool:
    return isinstance(value, list | dict)


def _table(table: str, rows: list[dict[str, Any]]) -> pa.Table:
    import pyarrow as pa

    plain = {"word": pa.string(), "string": pa.string(), "int64": pa.int64(), "int32": pa.int32()}
    plain |= {"double": pa.float64(), "float": pa.float32(), "bool": pa.bool_()}
    schema = pa.schema([(c.name, plain[c.arrow]) for c in COLUMNS[table]])
    good = [r for r in rows if r["metric_name"] and r["step"] is not None]
    try:
        return pa.Table.from_pylist(good, schema=schema)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as e:
        raise FormatError(f"a number or text in the older curves cannot be stored: {e}") from e
