"""pandas: Parquet and CSV files of a snapshot, read by their URL."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from castore import Repository

with TemporaryDirectory() as folder:
    run, store = Path(folder, "run"), Path(folder, "store")
    run.mkdir()
    losses = pd.DataFrame({"step": range(100), "loss": [1 / (i + 1) for i in range(100)]})
    losses.to_parquet(run / "losses.parquet")
    losses.to_csv(run / "losses.csv", index=False)
    Repository.init(store).commit([run], namespace="me", labels={"run": "first"})

    # The environment's CASTORE_REPOSITORY would do as well.
    options = {"repository": str(store)}
    newest = pd.read_parquet("castore://me/latest/losses.parquet", storage_options=options)
    labelled = pd.read_csv("castore://me/run=first/losses.csv", storage_options=options)
    pd.testing.assert_frame_equal(newest, losses)
    print(labelled.tail(3))
