"""The shapes in which callers hold their samples, each brought to columns.

See `samples.DataState.from_any` for the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from castore import InvalidInputError
from castore_experiments import sample_ids
from castore_experiments.sample_columns import Column, Flags, column, flags

TAG = "tag:"
LISTS = ("tags", "tag")


class Form(Enum):
    """The shape of a mapping."""

    COLUMNS = "{'sample_id': [..], ..}"
    STATE = "{'discarded': {..}, 'tag': {..}}"
    SAMPLES = "{sample_id: {..}}"


@dataclass(frozen=True, eq=False)
class Columns:
    """Samples in the caller's order: ids as text, and ``given``, as the caller spelled them."""

    given: Sequence[Any]
    ids: pa.StringArray
    discarded: Flags
    tags: Mapping[str, Column]


def columns_of(data: object) -> Columns:
    """The columns of a DataFrame or mapping; InvalidInputError for anything else."""
    if isinstance(data, pd.DataFrame):
        return _of_frame(data)
    form = form_of(data)
    assert isinstance(data, Mapping)
    if form is Form.COLUMNS:
        return _of_frame(_frame(data))
    return _of_samples(by_sample(data) if form is Form.STATE else data)


def form_of(data: object) -> Form:
    """Which shape the mapping ``data`` has; InvalidInputError if it has none."""
    if isinstance(data, Mapping):
        if "sample_id" in data and not isinstance(data["sample_id"], Mapping):
            return Form.COLUMNS
        inner = all(isinstance(v, Mapping) for v in data.values())
        if inner and data and set(data) <= {"discarded", "tag"}:
            return Form.STATE
        if inner:
            return Form.SAMPLES
    raise InvalidInputError(
        f"data: expected a DataFrame or a mapping, found {type(data).__qualname__} or other keys: "
        f"a mapping is one of {', '.join(form.value for form in Form)}"
    )


def _frame(data: Mapping[str, Any]) -> pd.DataFrame:
    wanted = {k: v for k, v in data.items() if is_state(k)}
    lengths = {k: len(v) for k, v in wanted.items()}
    if len(set(lengths.values())) > 1:
        raise InvalidInputError(f"data: columns of unequal length: {lengths}")
    # Objects, so that pandas does not turn integers beside None into floats.
    return pd.DataFrame({k: _series(v) for k, v in wanted.items()})


def _series(values: Any) -> pd.Series[Any]:
    if isinstance(values, pd.Series):
        return values.reset_index(drop=True)
    typed = hasattr(values, "dtype")
    return pd.Series(values) if typed else pd.Series(list(values), dtype=object)


def is_state(name: object) -> bool:
    """Whether a column of this name belongs to the data state or tells which rows do."""
    return isinstance(name, str) and (
        name in ("sample_id", "annotation_id", "discarded") or name.startswith(TAG)
    )


def field(frame: pd.DataFrame, name: str) -> Any:
    """A column or index level; None if there is none."""
    if name in frame.columns:
        return frame[name]
    return frame.index.get_level_values(name) if name in frame.index.names else None


def counted(frame: pd.DataFrame) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Rows with ``annotation_id`` 0; None where all rows count."""
    annotations = field(frame, "annotation_id")
    if annotations is None:
        return None
    try:
        mine = np.asarray(pd.to_numeric(annotations) == 0, dtype=bool)
    except (TypeError, ValueError) as e:
        raise InvalidInputError(f"annotation_id: expected whole numbers: {e}") from e
    return None if bool(mine.all()) else np.flatnonzero(mine)


def frame_ids(frame: pd.DataFrame) -> Any:
    """What the frame has as sample ids, all rows."""
    if list(frame.columns[frame.columns.duplicated()]):
        twice = list(frame.columns[frame.columns.duplicated()])
        raise InvalidInputError(f"data: columns stand twice: {twice}")
    ids = field(frame, "sample_id")
    if ids is None:
        raise InvalidInputError(
            f"data: no sample_id among columns {list(frame.columns)} and index levels "
            f"{list(frame.index.names)}: name the column or level of the ids sample_id"
        )
    return ids


def _of_frame(frame: pd.DataFrame) -> Columns:
    ids, rows = frame_ids(frame), counted(frame)
    if rows is not None:
        ids = ids.take(rows)
        frame = frame.iloc[rows]
    names = [c for c in frame.columns if isinstance(c, str) and c.startswith(TAG)]
    has_discards = "discarded" in frame.columns
    return Columns(
        _Given(ids),
        sample_ids.texts(ids),
        flags(frame["discarded"], "discarded") if has_discards else np.zeros(len(frame), bool),
        {name.removeprefix(TAG): column(frame[name], name) for name in names},
    )


class _Given(Sequence[Any]):
    """Rows of a Series or Index by position, without copying them all."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, row: Any) -> Any:
        return getattr(self._values, "iloc", self._values)[row]


def by_sample(data: Mapping[str, Mapping[Any, Any]]) -> dict[Any, dict[str, Any]]:
    """``{"discarded": {..}, "tag": {..}}`` turned to one entry for each sample."""
    entries: dict[Any, dict[str, Any]] = {
        i: {"discarded": out} for i, out in data.get("discarded", {}).items()
    }
    for key, value in data.get("tag", {}).items():
        if isinstance(value, Mapping):
            for i, held in value.items():
                entries.setdefault(i, {})[TAG + str(key).removeprefix(TAG)] = held
        else:
            entries.setdefault(key, {})["tags"] = value
    return entries


def _of_samples(entries: Mapping[Any, Mapping[str, Any]]) -> Columns:
    tags: dict[str, list[Any]] = {}
    discarded: list[Any] = []
    for row, (i, entry) in enumerate(entries.items()):
        discarded.append(entry.get("discarded"))
        for name, value in tags_of(i, entry).items():
            tags.setdefault(name, [None] * len(entries))[row] = value
    return Columns(
        list(entries),
        sample_ids.texts(list(entries)),
        flags(np.array(discarded, dtype=object), "discarded"),
        {name: column(_objects(values), TAG + name) for name, values in tags.items()},
    )


def _objects(values: list[Any]) -> np.ndarray[Any, np.dtype[np.object_]]:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def tags_of(sample: object, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The tags in one sample's entry: names in a list, and ``tag:<name>`` keys."""
    found = {k.removeprefix(TAG): v for k, v in entry.items() if str(k).startswith(TAG)}
    for key in LISTS:
        names = entry.get(key) or ()
        if not isinstance(names, Sequence | Set) or isinstance(names, str):
            raise InvalidInputError(f"data: sample {sample!r}: {key}: expected a list of names")
        odd = [n for n in names if not isinstance(n, str)]
        if odd:
            raise InvalidInputError(f"data: sample {sample!r}: {key}: {odd[0]!r} is no name")
        found.update(dict.fromkeys(names, True))
    return found
