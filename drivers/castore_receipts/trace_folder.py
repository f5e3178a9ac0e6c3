"""Trajectories as a folder of zarr format 3, in one spelling, so that equal traces are equal bytes.

    zarr.json                   an empty group
    trace_<seed>/zarr.json      steps by columns, float64, little-endian, uncompressed
    trace_<seed>/c/<i>/0        whole rows; what the last chunk has beyond the array is zeros

Any zarr reads it. Written and verified without zarr: a verifier needs nothing but NumPy, and what
is spelled differently is refused. Format: https://zarr-specs.readthedocs.io/en/latest/v3/core/.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from castore import FormatError, InvalidInputError
from castore_receipts.arrays import Array
from castore_receipts.traces import MAX_TRACES, seed_of

RULE = "castore-folder/1"
"""How ``validation_sha256`` is computed over a folder: `digest_of_folder`."""

_NODE = "zarr.json"
_CHUNK = 1 << 20
_LARGEST = 1 << 40


def digest_of_folder(files: Mapping[str, bytes]) -> str:
    """SHA-256 over ``castore-folder/1\\n``, then for each file, by its relative path's UTF-8 bytes,
    the line ``<path>\\t<SHA-256 of its bytes>\\n``.
    """
    total = hashlib.sha256(f"{RULE}\n".encode())
    for path in sorted(files, key=str.encode):
        total.update(f"{path}\t{hashlib.sha256(files[path]).hexdigest()}\n".encode())
    return total.hexdigest()


def write_folder(traces: Mapping[str, Array]) -> dict[str, bytes]:
    """The folder's files by relative path; the same bytes for the same traces.

    Raises
    ------
    InvalidInputError
        A trace is no table of numbers.
    """
    files = {_NODE: _spelled({"attributes": {}, "node_type": "group", "zarr_format": 3})}
    for name, trace in traces.items():
        table = np.asarray(trace)
        if table.ndim != 2 or table.dtype.kind not in "fiub":
            raise InvalidInputError(
                f"{name} has shape {table.shape} and dtype {table.dtype}: a trace in a folder has"
                " steps and columns of numbers"
            )
        files |= _array(name, np.ascontiguousarray(table, "<f8"))
    return files


def _array(name: str, table: Array) -> dict[str, bytes]:
    steps, columns = table.shape
    rows = _rows(steps, columns)
    files = {f"{name}/{_NODE}": _spelled(_metadata(steps, columns))}
    for i in range(math.ceil(steps / rows) if columns else 0):
        part = table[i * rows : (i + 1) * rows]
        padding = bytes((rows - len(part)) * columns * 8)
        files[f"{name}/c/{i}/0"] = part.tobytes() + padding
    return files


def _rows(steps: int, columns: int) -> int:
    """Rows of a chunk: at most 1 MiB, and at least one row."""
    return max(1, min(steps, _CHUNK // max(8, columns * 8)))


def _metadata(steps: int, columns: int) -> dict[str, Any]:
    chunk = [_rows(steps, columns), max(1, columns)]
    return {
        "attributes": {},
        "chunk_grid": {"configuration": {"chunk_shape": chunk}, "name": "regular"},
        "chunk_key_encoding": {"configuration": {"separator": "/"}, "name": "default"},
        "codecs": [{"configuration": {"endian": "little"}, "name": "bytes"}],
        "data_type": "float64",
        "fill_value": 0.0,
        "node_type": "array",
        "shape": [steps, columns],
        "zarr_format": 3,
    }


def _spelled(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def read_folder(files: Mapping[str, bytes], where: str) -> dict[str, Array]:
    """The traces of a folder.

    Raises
    ------
    FormatError
        Anything in it is not as `write_folder` spells it: another array, a missing chunk.
    """
    found = {}
    for path in files:
        name, _, rest = path.partition("/")
        if rest == _NODE and seed_of(name) is not None:
            found[name] = _table(files, name, f"{where}/{name[:80]}")
    expected = write_folder(found)
    if expected.keys() != files.keys() or any(expected[p] != files[p] for p in expected):
        odd = sorted(expected.keys() ^ files.keys())
        odd += [p for p in sorted(expected.keys() & files.keys()) if expected[p] != files[p]]
        raise FormatError(f"{where}/{odd[0][:160]} is not what such a folder holds, or is missing")
    return found


def _table(files: Mapping[str, bytes], name: str, where: str) -> Array:
    try:
        steps, columns = json.loads(files[f"{name}/{_NODE}"])["shape"]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise FormatError(f"{where}/{_NODE}: not the metadata of a trace") from e
    counts = all(type(n) is int and 0 <= n < _LARGEST for n in (steps, columns))
    if not counts or steps * columns * 8 > MAX_TRACES:
        raise FormatError(f"{where}: shape {steps!r:.40} by {columns!r:.40} is not read")
    count = math.ceil(steps / _rows(steps, columns)) if columns else 0
    parts = [files.get(f"{name}/c/{i}/0") for i in range(count)]
    content = b"".join(part for part in parts if part is not None)
    if None in parts or len(content) < steps * columns * 8:
        raise FormatError(f"{where}: {steps} by {columns} numbers take more than its chunks hold")
    return np.frombuffer(content, "<f8", steps * columns).reshape(steps, columns)
