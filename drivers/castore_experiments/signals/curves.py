"""Curves as they are read: rows of all sources united, one value for each point.

Which rows count: those of a run and its ancestors, each ancestor up to the step its child forked
at. Of several values for one point the one of the latest run wins, within a run the last logged.
Nothing is copied between sources, and uniting twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from castore import NotFoundError
from castore_experiments.signals.index import RowSource
from castore_experiments.signals.parquet import codes
from castore_experiments.signals.run import Run, Share, ancestry, newest
from castore_experiments.signals.schema import IDENTITY, arrow_schema, names

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_ROOT = 1 << 32  # more than any number of ancestors: the root that ran last wins
Mask = np.ndarray[Any, np.dtype[np.bool_]]


class Curves:
    """The curves of one or several roots.

    Parameters
    ----------
    sources : sequence of Source or Foreign
        The root's own first, then its siblings.
    live : Log, optional
        Whose rows count before they are in a snapshot; its runs belong to the first source.

    Notes
    -----
    Every call looks for new rows first. Raises what the repository raises; a source of another
    program that cannot be read is left out and says why in its ``warning``.
    """

    def __init__(self, sources: Sequence[RowSource], live: RowSource | None = None):
        self.sources, self.live = tuple(sources), live

    def signals(self, metric: str, hash: str | None = None, run: str | None = None) -> pd.DataFrame:
        """The points of a metric, by step: the documented columns and ``run``.

        Without ``hash`` the curve of the newest run and its ancestors, through all hashes it went
        through; of several roots each one's. With ``hash`` the curve of the newest run that has
        rows of that hash, so that every branch shows whole. With ``run`` the curve as that run
        left it: earlier attempts stay readable.

        Returns
        -------
        DataFrame
            One row for each (experiment_hash, step), steps rising; of rows that have no hash yet
            one for each root and step. Empty for an unknown metric or hash.

        Raises
        ------
        NotFoundError
            There is no run ``run``.
        """
        return self._read("signals", metric, hash, run, None)

    def per_sample(
        self,
        metric: str,
        hash: str | None = None,
        run: str | None = None,
        sample_id: str | None = None,
    ) -> pd.DataFrame:
        """The values of samples behind a metric, as `signals`; one for each sample and point."""
        return self._read("per_sample", metric, hash, run, sample_id)

    def per_instance(
        self,
        metric: str,
        hash: str | None = None,
        run: str | None = None,
        sample_id: str | None = None,
    ) -> pd.DataFrame:
        """As `per_sample`, one for each sample, annotation and point."""
        return self._read("per_instance", metric, hash, run, sample_id)

    def metrics(self, table: str = "signals") -> list[str]:
        """The names of all metrics of a table, sorted."""
        self.refresh()
        return sorted(set().union(*(s.metrics(table) for s in self._all())))

    def hashes(self) -> list[str | None]:
        """All experiment hashes that have rows, sorted; None where rows have none."""
        self.refresh()
        found = set().union(*(h for s in self._all() for h in s.hashes().values()))
        return sorted(found, key=lambda h: (h is not None, h or ""))

    def runs(self) -> list[Run]:
        """All runs, oldest first."""
        self.refresh()
        return sorted(self._runs().values(), key=lambda r: (r.started, r.id))

    def newest_run(self) -> Run | None:
        """The run that started last among those of sources that lead."""
        self.refresh()
        return newest(r for s in self._all() if s.leads for r in s.runs())

    def refresh(self) -> None:
        """Look for new rows in every source."""
        for source in self._all():
            source.refresh()

    # -- within

    def _all(self) -> list[RowSource]:
        """The live one first: rows that it commits meanwhile are then seen twice, never missed."""
        return [*([self.live] if self.live else []), *self.sources]

    def _runs(self) -> dict[str, Run]:
        return {r.id: r for s in self._all() for r in s.runs()}

    def _read(
        self, table: str, metric: str, hash: str | None, run: str | None, sample: str | None
    ) -> pd.DataFrame:
        hashes = None if hash is None else [hash]
        live = [] if self.live is None else self.live.rows(table, metric, hashes)
        live_hashes = {} if self.live is None else self.live.hashes()
        for source in self.sources:
            source.refresh()
        shares = self._shares(hash, run, live_hashes)
        parts = [*live, *(p for s in self.sources for p in s.rows(table, metric, hashes))]
        return _frame(table, _points(table, _joined(table, parts), shares, sample))

    def _shares(
        self, hash: str | None, run: str | None, live: dict[str, set[str | None]]
    ) -> dict[str, Share]:
        """What counts of each run."""
        runs = self._runs()
        if run is not None:
            if run not in runs:
                raise NotFoundError(
                    f"there is no run {run!r}: the newest is {newest(runs.values())}"
                )
            return ancestry(run, runs)
        chosen = []
        for number, source in enumerate(self.sources):
            if source.leads:
                known = source.hashes() if number else _united(source.hashes(), live)
                chosen.append(
                    newest(runs[r] for r, h in known.items() if r in runs and _has(h, hash))
                )
        shares: dict[str, Share] = {}
        by_start = sorted((r for r in chosen if r), key=lambda r: (r.started, r.id))
        for place, found in enumerate(by_start):
            for id, share in ancestry(found.id, runs).items():
                later = Share(share.rank + place * _ROOT, share.last)
                shares[id] = _wider(shares.get(id), later)
        return shares


def _united(
    a: dict[str, set[str | None]], b: dict[str, set[str | None]]
) -> dict[str, set[str | None]]:
    return {r: a.get(r, set()) | b.get(r, set()) for r in [*a, *(r for r in b if r not in a)]}


def _has(hashes: Iterable[str | None], hash: str | None) -> bool:
    return hash is None or hash in hashes


def _wider(known: Share | None, share: Share) -> Share:
    """Two roots that share an ancestor both show their part of it: the larger part counts."""
    if known is None:
        return share
    last = None if known.last is None or share.last is None else max(known.last, share.last)
    return Share(max(known.rank, share.rank), last)


def _joined(table: str, parts: Sequence[pa.Table]) -> pa.Table:
    import pyarrow as pa

    if not parts:
        return arrow_schema(table).empty_table()
    return pa.concat_tables(parts).unify_dictionaries()


def _points(table: str, rows: pa.Table, shares: dict[str, Share], sample: str | None) -> pa.Table:
    """The rows that count, one for each point, in the order they are shown."""
    import pyarrow.compute as pc

    if sample is not None:
        rows = rows.filter(pc.equal(rows["sample_id"], str(sample)))
    rank, mask = _counted(rows, shares)
    rows, rank = rows.filter(mask), rank[mask]
    # What was logged before there was a hash is each root's own, and nobody else's point.
    # Ranks fall from a root's newest run to its ancestors: the division rounds up.
    root = np.where(rows["experiment_hash"].is_null().to_numpy(), -(-rank // _ROOT), 0)
    keys = [root, *(_key(rows[c], c) for c in reversed(IDENTITY[table]))]
    order = np.lexsort((rows["seq"].fill_null(0).to_numpy(), rank, *keys))
    last = np.ones(len(order), np.bool_)
    if len(order) > 1:
        same = np.ones(len(order) - 1, np.bool_)
        for key in keys:
            in_order = key[order]
            same &= in_order[1:] == in_order[:-1]
        last[:-1] = ~same
    return rows.take(order[last])


def _counted(rows: pa.Table, shares: dict[str, Share]) -> tuple[Any, Mask]:
    """The rank of each row's run, and which rows count."""
    index, runs = codes(rows["run"])
    found = [shares.get(r or "") for r in runs]
    rank = np.array([s.rank if s else 0 for s in found], np.int64)
    top = np.iinfo(np.int64).max
    last = np.array(
        [0 if s is None else top if s.last is None else s.last for s in found], np.int64
    )
    known = np.array([s is not None for s in found], np.bool_)
    if not runs:
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    return rank[index], known[index] & (rows["step"].to_numpy() <= last[index])


def _key(column: pa.ChunkedArray, name: str) -> Any:
    """A column as numbers of the same order (words: as text, samples: as they first appear)."""
    if name == "experiment_hash":
        return codes(column)[0]
    if name == "sample_id":
        encoded = column.combine_chunks().dictionary_encode()
        return encoded.indices.to_numpy(zero_copy_only=False)
    return column.to_numpy()


def _frame(table: str, rows: pa.Table) -> pd.DataFrame:
    """The documented columns and ``run``, words as plain text."""
    import pyarrow as pa

    schema = arrow_schema(table)
    wanted = [*names(table), "run"]
    plain = [
        pa.field(
            n, pa.string() if pa.types.is_dictionary(schema.field(n).type) else schema.field(n).type
        )
        for n in wanted
    ]
    frame: pd.DataFrame = rows.select(wanted).cast(pa.schema(plain)).to_pandas()
    return frame
