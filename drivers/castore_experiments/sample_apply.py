"""Bring a caller's samples back to a state, in place, whatever their shape."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from castore import InvalidInputError
from castore_experiments import sample_ids
from castore_experiments.sample_columns import (
    Column,
    Flags,
    Rows,
    Values,
    held,
    holders,
    is_empty,
    take,
)
from castore_experiments.sample_forms import (
    LISTS,
    TAG,
    Form,
    by_sample,
    columns_of,
    counted,
    form_of,
    frame_ids,
)


@dataclass(frozen=True, eq=False)
class State:
    """The columns of a `samples.DataState`."""

    ids: pa.StringArray
    discarded: Flags
    tags: Mapping[str, Column]

    def of_rows(self, rows: Rows) -> State:
        """The state of other rows; -1 stands for a sample that the state does not know."""
        tags = {name: take(column, rows) for name, column in self.tags.items()}
        known = np.append(self.discarded, False)[rows]
        return State(self.ids, known.astype(bool), tags)


def apply(state: State, data: object) -> tuple[str, ...]:
    """See `samples.DataState.apply_to`."""
    columns_of(data)  # refuses what could not be read back, before anything is changed
    if isinstance(data, pd.DataFrame):
        rows, absent = _rows(state, frame_ids(data), counted(data))
        _to_frame(state.of_rows(rows), data, counted(data))
        return absent
    form = form_of(data)
    if not isinstance(data, MutableMapping):
        raise InvalidInputError(f"data: {type(data).__qualname__} cannot be changed in place")
    if form is Form.COLUMNS:
        return _to_columns(state, data)
    entries = by_sample(data) if form is Form.STATE else data
    rows, absent = _rows(state, list(entries), None)
    (_to_mappings if form is Form.STATE else _to_samples)(state.of_rows(rows), data, list(entries))
    return absent


def _rows(state: State, ids: Any, mine: Rows | None) -> tuple[Rows, tuple[str, ...]]:
    """Where each of the caller's samples stands in the state (-1: nowhere), and who is absent."""
    texts = sample_ids.texts(ids if mine is None else ids.take(mine))
    found = pc.index_in(texts, value_set=state.ids)
    rows = found.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    here = np.zeros(len(state.ids), bool)
    here[rows[rows >= 0]] = True
    return rows, tuple(state.ids.filter(pa.array(~here)).to_pylist())


def _to_frame(state: State, frame: pd.DataFrame, mine: Rows | None) -> None:
    """Set the state's columns; ``mine`` are the rows that count, None for all."""
    names = [c for c in frame.columns if isinstance(c, str) and c.startswith(TAG)]
    for old in names:
        if old.removeprefix(TAG) not in state.tags:
            del frame[old]
    if "discarded" in frame.columns or state.discarded.any():
        _set(frame, "discarded", state.discarded, mine)
    for name, column in state.tags.items():
        if TAG + name in frame.columns or not is_empty(column):
            _set(frame, TAG + name, column, mine)


def _set(frame: pd.DataFrame, name: str, column: Column, mine: Rows | None) -> None:
    old = frame[name] if name in frame.columns else None
    values = column.objects() if isinstance(column, Values) else column
    if mine is not None:
        whole = np.full(len(frame), None if isinstance(column, Values) else False, dtype=object)
        if old is not None:
            whole[:] = old.astype(object).to_numpy()
        whole[mine] = values
        values = whole
    frame[name] = _like(values, old, isinstance(column, Values))


def _like(values: Any, old: pd.Series[Any] | None, texts: bool) -> Any:
    """``values`` as the type the column had, where that can hold them."""
    dtype = None if old is None else old.dtype
    if not texts:
        if isinstance(dtype, pd.BooleanDtype):
            return pd.array(values, dtype="boolean")
        plain = all(isinstance(v, bool) for v in values) if values.dtype == object else True
        return values.astype(bool) if plain else values
    if dtype is None or isinstance(dtype, pd.CategoricalDtype):
        known = [] if dtype is None else list(dtype.categories)
        new = sorted({v for v in values if isinstance(v, str)} - set(known))
        ordered = dtype is not None and bool(dtype.ordered)
        return pd.Categorical(values, categories=[*known, *new], ordered=ordered)
    return pd.array(values, dtype=dtype) if isinstance(dtype, pd.StringDtype) else values


def _to_columns(state: State, data: MutableMapping[Any, Any]) -> tuple[str, ...]:
    kept = {k: list(data[k]) for k in ("sample_id", "annotation_id") if k in data}
    mine = counted(pd.DataFrame(kept))
    ids = pd.Series(list(data["sample_id"]), dtype=object)
    rows, absent = _rows(state, ids, mine)
    frame = pd.DataFrame({k: list(v) for k, v in data.items() if str(k)[:4] == TAG}, dtype=object)
    frame = frame.set_axis(range(len(ids))) if len(frame.columns) else pd.DataFrame(index=ids.index)
    if "discarded" in data:
        frame["discarded"] = pd.Series(list(data["discarded"]), dtype=object)
    _to_frame(state.of_rows(rows), frame, mine)
    for key in [k for k in data if str(k).startswith(TAG) and k not in frame.columns]:
        del data[key]
    for key in frame.columns:
        _replace(data, key, frame[key].astype(object).where(frame[key].notna(), None).tolist())
    return absent


def _replace(data: MutableMapping[Any, Any], key: str, values: list[Any]) -> None:
    """Put ``values`` into the list or array that stands under ``key``, or a new list there."""
    old = data.get(key)
    fits = isinstance(old, np.ndarray) and old.dtype.kind in "bO"
    if isinstance(old, list) or fits:
        data[key][:] = values
    else:
        data[key] = values


def _tags_of_rows(state: State) -> list[dict[str, Any]]:
    """For each row its tags: True, or the text of a tag with values."""
    found: list[dict[str, Any]] = [{} for _ in state.discarded]
    for name, column in state.tags.items():
        for row, value in zip(np.flatnonzero(holders(column)), held(column), strict=True):
            found[row][name] = value
    return found


def _names_only(tags: Mapping[str, Any], sample: object) -> list[str]:
    valued = [name for name, value in tags.items() if value is not True]
    if valued:
        raise InvalidInputError(
            f"data: sample {sample!r}: tag {valued[0]!r} has the value {tags[valued[0]]!r}, which "
            "a list of names cannot hold: keep such tags under a key tag:<name>"
        )
    return sorted(tags)


def _to_samples(state: State, data: MutableMapping[Any, Any], keys: Sequence[Any]) -> None:
    """``{sample_id: {"discarded": .., "tags": [..], "tag:<name>": ..}}``."""
    for key, out, tags in zip(keys, state.discarded.tolist(), _tags_of_rows(state), strict=True):
        entry = data[key]
        if out or "discarded" in entry:
            entry["discarded"] = out
        lists = [k for k in LISTS if k in entry]
        for old in [k for k in entry if str(k).startswith(TAG)]:
            if str(old).removeprefix(TAG) not in tags:
                del entry[old]
        listed = {n: v for n, v in tags.items() if lists and v is True and TAG + n not in entry}
        entry.update({TAG + n: v for n, v in tags.items() if n not in listed})
        for name in lists:
            entry[name] = sorted(listed) if name == lists[0] else []


def _to_mappings(state: State, data: MutableMapping[Any, Any], keys: Sequence[Any]) -> None:
    """``{"discarded": {sample_id: bool}, "tag": {..}}``, with tags by sample or by name."""
    rows = _tags_of_rows(state)
    tagged = data.setdefault("tag", {})
    by_name = bool(tagged) and all(isinstance(v, Mapping) for v in tagged.values())
    lists = {} if by_name else {k: _names_only(t, k) for k, t in zip(keys, rows, strict=True)}
    data.setdefault("discarded", {}).update(zip(keys, state.discarded.tolist(), strict=True))
    if by_name:
        _by_name(tagged, keys, rows, set(state.tags))
        return
    tagged.clear()
    tagged.update({key: names for key, names in lists.items() if names})


def _by_name(
    tagged: MutableMapping[Any, Any],
    keys: Sequence[Any],
    rows: Sequence[Mapping[str, Any]],
    known: set[str],
) -> None:
    spelled = {str(k).removeprefix(TAG): k for k in tagged}
    for name in spelled.keys() - known:
        del tagged[spelled[name]]
    for name in sorted({name for tags in rows for name in tags} | (spelled.keys() & known)):
        now = {k: tags[name] for k, tags in zip(keys, rows, strict=True) if name in tags}
        column = tagged.setdefault(spelled.get(name, TAG + name), {})
        marks = all(v is True for v in now.values())
        column.clear()
        column.update({k: now.get(k, False) for k in keys} if marks else now)
