"""Sample ids as text: conversion, order and duplicates, for a million of them at a time.

The order is that of the UTF-8 bytes, which is also that of the code points.
"""

from __future__ import annotations

from typing import Any, cast
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from castore import InvalidInputError

Order = npt.NDArray[np.int64]


def texts(ids: Any, where: str = "sample_id") -> pa.StringArray:
    """Ids as text, in the order given: integers in decimal, text as it is.

    Parameters
    ----------
    ids : sequence, NumPy array, pandas Series or Index, Arrow array
        Text, integers or UUIDs, also mixed.

    Raises
    ------
    InvalidInputError
        An id is missing, of another type, or no text that can be stored; the message says which.
    """
    dtype = str(getattr(ids, "dtype", getattr(ids, "type", "object")))
    if dtype.startswith(("int", "uint")) and dtype[-1].isdigit():
        return _arrow(np.asarray(ids)).cast(pa.string())
    if dtype in ("str", "string", "large_string") or dtype.startswith("string["):
        return _complete(_arrow(ids), where)
    values = list(ids)
    kinds = set(map(type, values))
    if kinds - {str}:
        values = [_text(v, row, where) for row, v in enumerate(values)]
    return _arrow(values)


def _text(value: Any, row: int, where: str) -> str:
    if isinstance(value, str):
        return str.__str__(value)
    number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if number or isinstance(value, UUID):
        return str(value)
    raise InvalidInputError(
        f"{where}: row {row}: an id is text or an integer, found {type(value).__name__} {value!r}"
        if isinstance(value, bool | float | bytes | type(None))
        else f"{where}: row {row}: an id is text or an integer, found {type(value).__qualname__}"
    )


def _arrow(values: Any) -> Any:
    try:
        array = pa.array(values, from_pandas=True) if len(values) else pa.array([], pa.string())
    except (UnicodeEncodeError, pa.ArrowInvalid) as e:
        raise InvalidInputError(f"sample_id: not text that can be stored: {e}") from e
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    return array.cast(pa.string()) if pa.types.is_large_string(array.type) else array


def _complete(array: Any, where: str) -> pa.StringArray:
    if array.null_count:
        row = pc.index(array.is_null(), True).as_py()
        raise InvalidInputError(f"{where}: row {row} has no id")
    return cast(pa.StringArray, array)


def sorting(ids: pa.StringArray) -> Order | None:
    """The rows in the order of their ids; None where they stand in order already."""
    words = _words(ids)
    if words is None:
        order = pc.array_sort_indices(ids).to_numpy().astype(np.int64)
        return None if bool((order[1:] > order[:-1]).all()) else order
    if not words or _ascending(words):
        return None
    return _sorted_rows(words)


def _sorted_rows(words: list[npt.NDArray[np.uint64]]) -> Order:
    """Rows in the order of the words: by the first word, then the rest where that leaves ties."""
    falls = np.count_nonzero(words[0][1:] < words[0][:-1])
    # Nearly in order already, as integers are whose text is sorted: merging the runs is quicker.
    order = np.argsort(words[0], kind="stable" if falls * 1000 < len(words[0]) else "quicksort")
    if len(words) == 1:
        return order
    first = words[0][order]
    same = np.append(first[1:] == first[:-1], False)
    tied = same | np.append(False, same[:-1])
    rows = order[tied]
    order[tied] = rows[np.lexsort([w[rows] for w in reversed(words)])]
    return order


def first_repeated(ids: pa.StringArray) -> int | None:
    """Row of ``ids``, which are in order, whose successor is equal; None if all differ."""
    if len(ids) < 2:
        return None
    same = pc.equal(ids[1:], ids[:-1])
    row = pc.index(same, True).as_py()
    return None if row < 0 else int(row)


def parts(ids: pa.StringArray) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
    """Lengths of the ids in bytes, and all their bytes in a row."""
    _, offsets_buffer, data_buffer = ids.buffers()
    if not len(ids):
        return np.zeros(0, np.uint32), np.zeros(0, np.uint8)
    offsets = np.frombuffer(offsets_buffer, np.int32, len(ids) + 1, ids.offset * 4)
    data = np.frombuffer(data_buffer or b"", np.uint8)
    return np.diff(offsets).astype("<u4"), data[offsets[0] : offsets[-1]]


_WIDEST = 64


def _words(ids: pa.StringArray) -> list[npt.NDArray[np.uint64]] | None:
    """Columns of numbers whose order is that of the ids, constant ones left out.

    None where that does not pay or would not be exact: long ids, or zero bytes within them.
    """
    lengths, data = parts(ids)
    longest = int(lengths.max(initial=0))
    if longest > _WIDEST or not len(ids) or (len(data) and not data.all()):
        return None
    width = -(-max(longest, 1) // 8) * 8
    table = np.zeros((len(ids), width), np.uint8)
    if int(lengths.min()) == longest:
        table[:, :longest] = data.reshape(len(ids), longest)
    else:
        table[np.arange(width) < lengths[:, None]] = data
    columns = table.view(">u8").astype(np.uint64)
    return [np.ascontiguousarray(c) for c in columns.T if bool((c != c[0]).any())]


def _ascending(words: list[npt.NDArray[np.uint64]]) -> bool:
    """Whether the rows are in order, equal neighbours included."""
    tied = np.ones(len(words[0]) - 1, bool)
    for column in words:
        if bool((tied & (column[1:] < column[:-1])).any()):
            return False
        tied &= column[1:] == column[:-1]
    return True
