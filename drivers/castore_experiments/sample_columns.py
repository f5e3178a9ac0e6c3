"""Discards and tags as columns: what callers hold, brought to two exact kinds.

A tag is either *marks* (which samples have it) or *values* (a text for some samples). Missing
entries (None, NaN, NA) are "not discarded" and "no tag".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from castore import InvalidInputError

Flags: TypeAlias = npt.NDArray[np.bool_]
_FLAGS = (bool, int, float, np.bool_, np.number)
Rows: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Values:
    """A tag that has a text for some samples: ``texts[codes[row]]``, none where the code is -1.

    ``texts`` are sorted, distinct and all in use.
    """

    texts: tuple[str, ...]
    codes: npt.NDArray[np.int32]

    def take(self, rows: Rows) -> Values:
        """The same tag for other rows; -1 stands for a sample without it."""
        codes = np.where(rows < 0, -1, np.append(self.codes, np.int32(-1))[rows])
        return _values(self.texts, codes)

    def objects(self) -> npt.NDArray[np.object_]:
        """Texts, None where there is none."""
        return np.array([*self.texts, None], dtype=object)[self.codes]


Column: TypeAlias = Flags | Values


def take(column: Column, rows: Rows) -> Column:
    """``column`` for other rows; row -1 stands for a sample without it."""
    if isinstance(column, Values):
        return column.take(rows)
    return np.append(column, False)[rows]


def is_empty(column: Column) -> bool:
    """Whether no sample has the tag."""
    return not column.texts if isinstance(column, Values) else not bool(column.any())


def holders(column: Column) -> Flags:
    """Which samples have the tag."""
    return column.codes >= 0 if isinstance(column, Values) else column


def held(column: Column) -> list[bool | str]:
    """The tag's value for each sample that has it, in order: True where it is a mark."""
    if isinstance(column, Values):
        return column.objects()[column.codes >= 0].tolist()  # type: ignore[no-any-return]
    return [True] * int(column.sum())


def flags(values: Any, name: str) -> Flags:
    """Booleans of a column of booleans, zeros and ones; missing entries are False.

    Raises
    ------
    InvalidInputError
        Anything else stands in it; the message names the column and the value.
    """
    array = _array(values)
    if array.dtype == np.bool_:
        return np.array(array, dtype=bool)
    missing = np.asarray(pd.isna(array))
    known = array[~missing]
    odd = [v for v in known.tolist() if not (isinstance(v, _FLAGS) and v in (0, 1))]
    if len(odd):
        raise InvalidInputError(f"{name}: expected true or false, found {odd[0]!r}")
    result = np.zeros(len(array), bool)
    result[~missing] = known.astype(bool)
    return result


def column(values: Any, name: str) -> Column:
    """A tag's column, of marks or of texts, whichever it holds.

    Raises
    ------
    InvalidInputError
        Numbers other than 0 and 1, a mixture of texts and marks, or other objects.
    """
    if isinstance(getattr(values, "dtype", None), pd.CategoricalDtype):
        return _categories(values, name)
    if isinstance(getattr(values, "dtype", None), pd.StringDtype):
        return _texts(values.to_numpy(dtype=object, na_value=None), name)
    array = _array(values)
    if array.dtype.kind == "U":
        array = array.astype(object)
    if array.dtype == object and any(isinstance(v, str) for v in array):
        return _texts(array, name)
    return flags(array, name)


def _array(values: Any) -> npt.NDArray[Any]:
    if hasattr(values, "to_numpy"):
        return values.to_numpy()  # type: ignore[no-any-return]
    return values if isinstance(values, np.ndarray) else np.asarray(values, dtype=object)


def _categories(values: Any, name: str) -> Column:
    series = pd.Series(values)
    names = list(series.cat.categories)
    if not all(isinstance(n, str) for n in names):
        return column(series.astype(object), name)
    return _values(tuple(map(str, names)), series.cat.codes.to_numpy().astype(np.int32))


def _texts(array: Any, name: str) -> Values:
    missing = pd.isna(array)
    odd = [v for v in array[~missing] if not isinstance(v, str)]
    if odd:
        raise InvalidInputError(f"{name}: texts and other values are mixed, such as {odd[0]!r}")
    codes, uniques = pd.factorize(array)
    return _values(tuple(map(str, uniques)), codes.astype(np.int32))


def _values(texts: tuple[str, ...], codes: npt.NDArray[np.int32]) -> Values:
    """Values with only the texts in use, sorted."""
    used = np.zeros(len(texts) + 1, bool)
    used[codes] = True
    kept = sorted((i for i in range(len(texts)) if used[i]), key=lambda i: texts[i])
    renamed = np.full(len(texts) + 1, -1, np.int32)
    renamed[kept] = np.arange(len(kept), dtype=np.int32)
    return Values(tuple(texts[i] for i in kept), renamed[codes])
