"""A zarr store whose commits are snapshots: history, deduplicated chunks, two writers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import zarr

from castore import AlreadyExistsError, Repository
from castore.zarr_view import SnapshotStore


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        repository = Repository.init(Path(folder, "store"))
        store = SnapshotStore(repository, "losses")
        losses = zarr.open_group(store, mode="w").create_array(
            "loss", shape=(1000, 8), chunks=(100, 8), dtype="f4", fill_value=np.nan
        )
        losses[:200] = np.random.default_rng(0).random((200, 8))
        first = store.commit(labels={"epoch": "1"})
        losses[200:300] = 0.5
        second = store.commit(labels={"epoch": "2"})

        # Every commit stays readable, and what did not change is stored once.
        for name, known in ((first, 200), (second, 300)):
            then = SnapshotStore(repository, snapshot=name, read_only=True)
            values = zarr.open_group(then, mode="r")["loss"][:]
            assert np.isfinite(values).sum() == known * 8
            print(f"{name}: {known} rows")

        # Two writers stand on one snapshot: the second commit is refused, and loses nothing.
        mine, theirs = SnapshotStore(repository, "losses"), SnapshotStore(repository, "losses")
        zarr.open_group(theirs, mode="a")["loss"][300] = 1
        zarr.open_group(mine, mode="a")["loss"][400] = 2
        theirs.commit()
        try:
            mine.commit()
        except AlreadyExistsError as e:
            print(e)
        assert zarr.open_group(mine, mode="r")["loss"][400, 0] == 2


if __name__ == "__main__":
    main()
