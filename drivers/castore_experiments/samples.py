"""The data state behind the DATA segment: sample ids, which are discarded, and their tags.

In columns throughout, so a million samples take a fraction of a second. pandas and PyArrow are
imported with this module; import it where it is needed.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3

from castore import FormatError, InvalidInputError
from castore_experiments import canonical, sample_apply, sample_forms, sample_ids
from castore_experiments.sample_columns import (
    Column,
    Flags,
    Values,
    held,
    holders,
    is_empty,
    take,
)

TAG = "tag:"


@dataclass(frozen=True, eq=False)
class DataState:
    """Samples in the order of their ids, each once.

    Parameters
    ----------
    ids : pyarrow.StringArray
        In order, without repeats.
    discarded : bool array of the same length
    tags : mapping of tag name (without ``tag:``) to marks (bool array) or `Values`
        Sorted by name. A tag that no sample has is kept, for the column, but does not count.

    Two states are equal when their digests are: same ids, discards and tags, whatever the order of
    rows, and however the ids or missing entries were spelled.
    """

    ids: pa.StringArray
    discarded: Flags
    tags: Mapping[str, Column]

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DataState) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())

    @classmethod
    def from_any(cls, data: object) -> DataState:
        """The state that ``data`` holds.

        Parameters
        ----------
        data : DataFrame, mapping, DataState, or callable without arguments that returns one
            A frame has ``sample_id`` as a column or index level, and may have ``discarded`` and
            ``tag:<name>``; of rows with an ``annotation_id`` only those with 0 count. A mapping is
            one of ``{"sample_id": [..], "discarded": [..], "tag:<name>": [..]}``, ``{sample_id:
            {"discarded": bool, "tags": [..], "tag:<name>": ..}}``, and ``{"discarded": {sample_id:
            bool}, "tag": {sample_id: [..]}}`` or with ``"tag": {"tag:<name>": {sample_id: ..}}``.

        Raises
        ------
        InvalidInputError
            None of these; ids that are missing, repeated, or become one text (``7`` and ``"7"``); a
            column that is neither marks nor texts.
        """
        if callable(data):
            data = data()
        if isinstance(data, DataState):
            return data
        return cls.from_columns(sample_forms.columns_of(data))

    @classmethod
    def from_columns(cls, columns: sample_forms.Columns) -> DataState:
        """A state of columns in any order of rows; see `from_any` for what is refused."""
        ids, discarded, tags = columns.ids, columns.discarded, columns.tags
        order = sample_ids.sorting(ids)
        if order is not None:
            ids, discarded = ids.take(pa.array(order)), discarded[order]
            tags = {name: take(column, order) for name, column in tags.items()}
        row = sample_ids.first_repeated(ids)
        if row is not None:
            raise InvalidInputError(_repeated(columns, ids[row].as_py()))
        return cls(ids, discarded, {name: tags[name] for name in sorted(tags)})

    def digest(self) -> str:
        """Full digest of the DATA segment: BLAKE3-256 of the state's columns, 64 hex characters.

        A header (canonical JSON behind its length in 8 bytes) states the number of samples, the
        bytes of their ids, and the tags that some sample has; then come the ids' lengths (32 bits)
        and bytes, a bit a sample for discards and for each mark, and 32 bits a sample for each tag
        with values. Numbers are little-endian. So the header tells where every column ends, and no
        two states give the same bytes.
        """
        lengths, data = sample_ids.parts(self.ids)
        tags = {name: column for name, column in self.tags.items() if not is_empty(column)}
        header = canonical.spell(
            {
                "kind": "castore.data",
                "format": 1,
                "samples": len(self),
                "id_bytes": len(data),
                "tags": [
                    [n, list(c.texts) if isinstance(c, Values) else None] for n, c in tags.items()
                ],
            }
        )
        hasher = blake3(len(header).to_bytes(8, "little") + header)
        hasher.update(lengths.view(np.uint8).data)
        hasher.update(data.data)
        for column in (self.discarded, *tags.values()):
            if isinstance(column, Values):
                hasher.update(column.codes.astype("<i4").view(np.uint8).data)
            else:
                hasher.update(np.packbits(column).data)
        return hasher.hexdigest()

    def to_parquet(self) -> bytes:
        """The documented Parquet file: ``sample_id annotation_id discarded tag:<name>..``.

        The same bytes for equal states and columns under one version of PyArrow (which writes its
        version into the file). Rows are in the order of the ids; tags with values are text.
        """
        columns: dict[str, Any] = {
            "sample_id": self.ids,
            "annotation_id": pa.array(np.zeros(len(self), np.int64)),
            "discarded": pa.array(self.discarded),
        }
        for name, column in self.tags.items():
            if isinstance(column, Values):
                columns[TAG + name] = pa.array(column.objects(), pa.string())
            else:
                columns[TAG + name] = pa.array(column)
        target = io.BytesIO()
        pq.write_table(pa.table(columns), target, compression="zstd", store_schema=False)
        return target.getvalue()

    @classmethod
    def from_parquet(cls, data: bytes, where: str = "data snapshot") -> DataState:
        """The state in a Parquet file of `to_parquet`, or of the public tool.

        Raises
        ------
        FormatError
            Not a Parquet file, damaged, or without usable ids.
        """
        try:
            frame = pq.read_table(pa.BufferReader(data)).to_pandas()
            return cls.from_any(frame)
        except (pa.ArrowException, OSError, InvalidInputError) as e:
            raise FormatError(f"{where}: {e}") from e

    def to_frame(self) -> pd.DataFrame:
        """A new DataFrame indexed by ``sample_id`` and ``annotation_id`` (all 0)."""
        frame = pd.DataFrame({"sample_id": pd.Series(self.ids.to_numpy(zero_copy_only=False))})
        frame["annotation_id"] = 0
        frame["discarded"] = self.discarded
        for name, column in self.tags.items():
            if isinstance(column, Values):
                frame[TAG + name] = pd.Categorical(column.objects())
            else:
                frame[TAG + name] = column
        return frame.set_index(["sample_id", "annotation_id"])

    def tag_lists(self) -> list[tuple[str, ...]]:
        """For each sample the names of the tags it has, sorted."""
        lists: list[list[str]] = [[] for _ in range(len(self))]
        for name, column in self.tags.items():
            for row in np.flatnonzero(holders(column)):
                lists[row].append(name)
        return [tuple(names) for names in lists]

    def tagged(self) -> dict[str, dict[str, bool | str]]:
        """For each tag that some sample has: its value by sample, True where it is a mark."""
        found: dict[str, dict[str, bool | str]] = {}
        for name, column in self.tags.items():
            if not is_empty(column):
                ids = self.ids.filter(pa.array(holders(column))).to_pylist()
                found[name] = dict(zip(ids, held(column), strict=True))
        return found

    def ids_text(self) -> list[str]:
        """The ids, in order."""
        return self.ids.to_pylist()  # type: ignore[no-any-return]

    def apply_to(self, data: object) -> tuple[str, ...]:
        """Bring ``data`` to this state, in place; give the ids of this state that it lacks.

        Guaranteed: afterwards ``DataState.from_any(data)`` agrees with this state on every sample
        both have. Samples that only ``data`` has (they came later) are not discarded and have no
        tags. Tags that this state does not know vanish. Rows, their order, other columns, and rows
        with an ``annotation_id`` other than 0 stay, but for the columns of vanished tags.

        Raises
        ------
        InvalidInputError
            ``data`` is nothing `from_any` reads, or cannot hold a tag of this state.
        """
        while callable(data):
            data = data()
        state = sample_apply.State(self.ids, self.discarded, self.tags)
        return sample_apply.apply(state, data)


def _repeated(columns: sample_forms.Columns, text: str) -> str:
    rows = [i for i, t in enumerate(columns.ids.to_pylist()) if t == text][:2]
    spelled = " and ".join(repr(columns.given[row]) for row in rows)
    return (
        f"sample_id: rows {rows[0]} and {rows[1]} have one id, {text!r} (given as {spelled}): "
        "a sample stands once; annotations of one sample are told apart by annotation_id"
    )
