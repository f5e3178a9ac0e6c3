"""An xarray dataset in a repository: write, append, and open any earlier state."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from castore import Repository
from castore.zarr_view import SnapshotStore


def days(start: str, count: int) -> xr.Dataset:
    time = pd.date_range(start, periods=count)
    return xr.Dataset({"t": (("time", "x"), np.ones((count, 4)))}, {"time": time})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        repository = Repository.init(Path(folder, "store"))
        store = SnapshotStore(repository, "weather")
        days("2026-01-01", 5).to_zarr(store, consolidated=False)
        first = store.commit()
        days("2026-01-06", 2).to_zarr(store, append_dim="time", consolidated=False)
        second = store.commit()
        for name, expected in ((first, 5), (second, 7)):
            then = SnapshotStore(repository, snapshot=name, read_only=True)
            dataset = xr.open_zarr(then, consolidated=False)
            assert dataset.sizes["time"] == expected
            assert float(dataset["t"].sum()) == expected * 4
            print(f"{name}: {expected} days")


if __name__ == "__main__":
    main()
