"""Check a repository by the workers of a Dask cluster.

Here the cluster is a thread of this process; in earnest it is an address, as for
``castore check -r s3://bucket/store --read-data --dask tcp://scheduler:8786``.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from distributed import Client, LocalCluster

from castore import Repository
from castore.check import CheckReport, check


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        run.mkdir()
        for step in range(5):
            (run / f"step_{step}.bin").write_bytes(os.urandom(100_000))
        store = Repository.init(Path(folder, "store"))
        store.commit([run], namespace="me")

        report = CheckReport()
        with (
            LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
            Client(cluster) as client,
        ):
            found = list(
                check(store, read_data=True, report=report, executor=client.get_executor())
            )
        assert found == []
        assert report.bytes_read > 500_000


if __name__ == "__main__":
    main()
