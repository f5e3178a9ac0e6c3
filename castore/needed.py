"""Who needs what is bad: every snapshot and path, directly or through a chain of bases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from castore.errors import CastoreError
from castore.load import read_tree
from castore.objects import ObjectStore
from castore.snapshot import SnapshotName
from castore.table import NONE, Mask, Table, raw_of


def who_needs(
    store: ObjectStore,
    table: Table,
    trees: Mapping[str, Sequence[SnapshotName]],
    unread: Collection[str],
    bad: Collection[str],
) -> dict[str, list[tuple[str, str]]]:
    """For each bad object all snapshots and paths that need it; what stands on it by ``table``.

    ``trees`` are digests with the snapshots of each, ``unread`` those that cannot be read. A tree
    is needed by its snapshots, with an empty path.
    """
    result: dict[str, list[tuple[str, str]]] = defaultdict(list)
    affected = _affected(table, bad)
    for digest, names in trees.items():
        for b in _bad_below([digest], table, affected, bad):
            result[b] += [(str(n), "") for n in names]
        if digest in unread:
            continue
        try:
            tree = read_tree(store, digest, keep=False)
        except CastoreError:  # it was read before: the store fails now and then
            continue
        for path, file in tree.files():
            for b in _bad_below(file.blobs(), table, affected, bad):
                result[b] += [(str(n), path) for n in names]
    return result


def _affected(table: Table, bad: Collection[str]) -> Mask:
    """The bad objects and all that stands on them."""
    mask = table.mask([p for p in map(table.place, bad) if p != NONE])
    mask[[p for p, base in table.lost.items() if base in bad]] = True
    return table.standing_on(mask)


def _bad_below(
    digests: Sequence[str], table: Table, affected: Mask, bad: Collection[str]
) -> set[str]:
    places = table.places(raw_of(digests))
    if not len(affected):
        return {d for d in digests if d in bad}
    chosen = np.flatnonzero((places == NONE) | affected[places])
    return {b for i in chosen.tolist() for b in table.chain(digests[i]) if b in bad}
