"""DuckDB: SQL over files of snapshots, of one or of all of them."""

from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb

from castore import Repository
from castore.filesystem import CastoreFileSystem

with TemporaryDirectory() as folder:
    run, store = Path(folder, "run"), Repository.init(Path(folder, "store"))
    run.mkdir()
    with duckdb.connect() as connection:
        for last in (10, 20):
            table = f"SELECT range AS step, 1 / (range + 1) AS loss FROM range({last})"
            connection.execute(f"COPY ({table}) TO '{run / 'losses.parquet'}' (FORMAT parquet)")
            store.commit([run], namespace="me")

        connection.register_filesystem(CastoreFileSystem.of(store))
        newest = "SELECT count(*) FROM 'castore://me/latest/losses.parquet'"
        assert connection.execute(newest).fetchone() == (20,)
        every = "SELECT count(*), min(loss) FROM 'castore://me/*/losses.parquet'"
        print(connection.execute(every).fetchone())
        assert connection.execute(every).fetchone() == (30, 0.05)
