"""``loggers.duckdb``: derived, whole, at the old storage version, in nobody's way."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest

from castore import BackendError, Repository
from castore_experiments.signals import (
    Curves,
    Database,
    Foreign,
    Log,
    Source,
    compare,
    export_merged,
    import_signals,
)
from castore_experiments.signals.duckfile import read_header
from castore_experiments.signals.schema import COLUMNS

H = "0123456789abcdef01234567"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "root" / "checkpoints" / "loggers"


def database(place: Path, write: Any = None) -> Database:
    return Database(place / "loggers.duckdb", place.parents[1] / "state.json", write)


def query(place: Path, sql: str) -> list[Any]:
    with duckdb.connect(str(place / "loggers.duckdb"), read_only=True) as connection:
        return connection.execute(sql).fetchall()


def test_every_flushed_row_is_in_it_with_the_documented_columns(
    repository: Repository, wal: Path, place: Path
) -> None:
    """Seed: "persist to an on-disk DuckDB file at checkpoints/loggers/loggers.duckdb, keyed by
    (metric_name, experiment_hash, step)". DB8: storage version 64, which DuckDB 1.0 opens."""
    found = database(place)
    with Log(repository, "exp", wal) as log:
        curves = Curves([Source(repository, "exp")])
        for i in range(10):
            log.log("loss", i / 2, i, H, per_sample={"a": i}, per_instance={("a", i): i})
        log.flush()
        update = found.update(curves)
        assert (update.added, update.rows, update.rebuilt) == (30, 30, True)
        log.log("loss", float("nan"), 10, H)
        log.flush()
        update = found.update(curves)
        assert (update.added, update.rows, update.rebuilt) == (1, 31, False)
    assert found.update(curves).added == 0  # merging batches adds nothing
    assert read_header(place / "loggers.duckdb").version == 64
    for table, columns in COLUMNS.items():
        described = query(place, f"DESCRIBE {table}")
        sql = [("FLOAT" if c.sql == "REAL" else c.sql) for c in columns]
        assert [(d[0], d[1]) for d in described] == [
            (c.name, kind) for c, kind in zip(columns, sql, strict=True)
        ]
    assert query(place, "SELECT step, metric_value FROM signals WHERE step < 3 ORDER BY seq") == [
        (0, 0.0),
        (1, 0.5),
        (2, 1.0),
    ]
    assert query(place, "SELECT count(*) FROM signals WHERE isnan(metric_value)") == [(1,)]
    seqs = "SELECT seq FROM signals UNION ALL SELECT seq FROM per_sample UNION ALL FROM"
    count = f"SELECT count(*), count(DISTINCT seq) FROM ({seqs} (SELECT seq FROM per_instance))"
    assert query(place, count) == [(31, 31)]
    assert compare(curves, place / "loggers.duckdb") == []
    assert [p.name for p in place.iterdir()] == ["loggers.duckdb"]


def test_earlier_attempts_stay_and_seq_rises_through_runs(
    local: Repository, wal: Path, place: Path
) -> None:
    found, curves = database(place), Curves([Source(local, "exp")])
    with Log(local, "exp", wal) as log:
        for i in range(5):
            log.log("loss", 1, i, H)
        log.flush()
        found.update(curves)
        parent = log.run
    with Log(local, "exp", wal, parent=parent, fork_step=2) as log:
        for i in range(3, 6):
            log.log("loss", 2, i, H)
    found.update(curves)
    rows = query(place, "SELECT step, metric_value FROM signals ORDER BY seq")
    assert rows == [(i, 1.0) for i in range(5)] + [(i, 2.0) for i in range(3, 6)]
    (place / "loggers.duckdb").unlink()
    found.update(curves)
    assert query(place, "SELECT step, metric_value FROM signals ORDER BY seq") == rows


def test_a_step_beyond_32_bits_makes_the_column_wide(
    local: Repository, wal: Path, place: Path
) -> None:
    found, curves = database(place), Curves([Source(local, "exp")])
    with Log(local, "exp", wal) as log:
        log.log("loss", 1, 2**31 - 1, H)
        log.flush()
        assert found.update(curves).rebuilt
        assert query(place, "SELECT typeof(step) FROM signals") == [("INTEGER",)]
        log.log("loss", 1, 2**31, H)
    update = found.update(curves)
    assert update.rebuilt and update.rows == 2
    assert query(place, "SELECT typeof(step), step FROM signals ORDER BY seq") == [
        ("BIGINT", 2**31 - 1),
        ("BIGINT", 2**31),
    ]
    assert compare(curves, place / "loggers.duckdb") == []


def test_a_reader_in_another_process_is_never_in_the_way(
    local: Repository, wal: Path, place: Path
) -> None:
    """DB1: a forgotten reader blocks no save, and keeps what it opened."""
    found, curves = database(place), Curves([Source(local, "exp")])
    with Log(local, "exp", wal) as log:
        log.log("loss", 1, 0, H)
        log.flush()
        found.update(curves)
        script = (
            "import duckdb, sys\n"
            "c = duckdb.connect(sys.argv[1], read_only=True)\n"
            "print(c.execute('SELECT count(*) FROM signals').fetchone()[0], flush=True)\n"
            "sys.stdin.readline()\n"
            "print(c.execute('SELECT count(*) FROM signals').fetchone()[0], flush=True)\n"
        )
        reader = subprocess.Popen(
            [sys.executable, "-c", script, str(place / "loggers.duckdb")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert reader.stdout is not None and reader.stdout.readline() == "1\n"
        log.log("loss", 2, 1, H)
        log.flush()
        assert found.update(curves).rows == 2
        assert query(place, "SELECT count(*) FROM signals") == [(2,)]
        assert reader.communicate("go\n")[0] == "1\n" and reader.returncode == 0


def test_another_writer_is_named_and_left_alone(
    local: Repository, wal: Path, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DB1: "a message naming the holder pid"; training goes on, the next save catches up."""
    found, curves = database(place), Curves([Source(local, "exp")])
    with Log(local, "exp", wal) as log:
        log.log("loss", 1, 0, H)
        log.flush()
        found.update(curves)
        script = (
            "import duckdb, sys; c = duckdb.connect(sys.argv[1]); print(1, flush=True); input()"
        )
        holder = subprocess.Popen(
            [sys.executable, "-c", script, str(place / "loggers.duckdb")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdout is not None and holder.stdout.readline() == "1\n"
        log.log("loss", 2, 1, H)
        log.flush()
        with caplog.at_level(logging.WARNING):
            update = found.update(curves)
        assert update.held_by == holder.pid and str(holder.pid) in caplog.text
        holder.communicate("\n")
        assert found.update(curves).rows == 2


def test_a_bucket_gets_the_whole_file(local: Repository, wal: Path, place: Path) -> None:
    written: list[bytes] = []
    found = database(place, written.append)
    with Log(local, "exp", wal) as log:
        log.log("loss", 1, 0, H)
    curves = Curves([Source(local, "exp")])
    found.update(curves)
    found.update(curves)
    assert written == [(place / "loggers.duckdb").read_bytes()]


def test_rows_that_another_program_added_are_imported_not_lost(
    local: Repository, wal: Path, place: Path
) -> None:
    found, curves = database(place), Curves([Source(local, "exp")])
    with Log(local, "exp", wal) as log:
        log.log("loss", 1, 0, H)
        log.flush()
        found.update(curves)
        assert found.is_ours()
        with duckdb.connect(str(place / "loggers.duckdb")) as other:
            other.execute(
                "INSERT INTO signals (metric_name, experiment_hash, step, metric_value, seq)"
                f" VALUES ('theirs', '{H}', 9, 0.5, 77)"
            )
        assert not found.is_ours()
        log.log("loss", 2, 1, H)
        log.flush()
        update = found.update(curves)
    assert (update.rows, update.set_aside) == (3, None)
    assert curves.metrics() == ["loss", "theirs"]
    assert curves.signals("theirs", H)["metric_value"].tolist() == [0.5]
    assert compare(curves, place / "loggers.duckdb") == []


@pytest.mark.parametrize("kind", ["garbage", "cut", "newer"])
def test_a_file_that_cannot_be_read_is_set_aside(
    local: Repository, wal: Path, place: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """DB2, DB8: no crash loop; the damaged file is kept, the curves are all there."""
    found, curves = database(place), Curves([Source(local, "exp")])
    with Log(local, "exp", wal) as log:
        log.log("loss", 1, 0, H)
        log.flush()
        found.update(curves)
        path = place / "loggers.duckdb"
        data = bytearray(path.read_bytes())
        if kind == "newer":
            data[12:20] = (5000).to_bytes(8, "little")
        damaged = {"garbage": b"no database", "cut": bytes(data[:5000]), "newer": bytes(data)}[kind]
        path.write_bytes(damaged)
        update = found.update(curves)
    assert update.rows == 1 and update.set_aside is not None
    assert Path(update.set_aside).read_bytes() == damaged
    assert "set aside" in caplog.text
    if kind == "newer":
        assert "storage version 5000" in caplog.text and duckdb.__version__ in caplog.text
    assert compare(curves, path) == []


def test_a_write_ahead_file_that_cannot_be_replayed(
    local: Repository, wal: Path, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DB2: "WAL set aside ..., main file opened, loud warning what is lost"."""
    found, curves = database(place), Curves([Source(local, "exp")])
    with Log(local, "exp", wal) as log:
        log.log("loss", 1, 0, H)
    found.update(curves)
    (place / "loggers.duckdb.wal").write_bytes(b"\x07garbage" * 99)
    assert not found.is_ours()
    found.update(curves)
    assert "lost" in caplog.text
    assert (place / "loggers.duckdb.wal.set-aside-1").exists()
    assert not (place / "loggers.duckdb.wal").exists()
    assert query(place, "SELECT count(*) FROM signals") == [(1,)]


def test_a_lost_or_wrong_state_file_costs_a_rebuild_only(
    local: Repository, wal: Path, place: Path
) -> None:
    found, curves = database(place), Curves([Source(local, "exp")])
    with Log(local, "exp", wal) as log:
        log.log("loss", 1, 0, H)
    found.update(curves)
    state = place.parents[1] / "state.json"
    for damage in ("", "{}", "[]", json.dumps({"more": 1})):
        state.write_text(damage)
        update = found.update(curves)
        assert (update.rows, update.rebuilt) == (1, True)
    state.unlink()
    assert found.update(curves).rows == 1


def test_the_file_does_not_grow_with_updates(local: Repository, wal: Path, place: Path) -> None:
    """DB6: twenty updates leave a file about as large as one made from nothing."""
    found, curves = database(place), Curves([Source(local, "exp")])
    with Log(local, "exp", wal) as log:
        for n in range(20):
            for i in range(200):
                log.log("loss", i, n * 200 + i, H)
            log.flush()
            found.update(curves)
    size = (place / "loggers.duckdb").stat().st_size
    (place / "loggers.duckdb").unlink()
    found.update(curves)
    assert size <= 2 * (place / "loggers.duckdb").stat().st_size


def test_a_folder_that_cannot_be_written_is_an_error(
    local: Repository, wal: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    found = Database(tmp_path / "file" / "loggers.duckdb", tmp_path / "state")
    with Log(local, "exp", wal) as log:
        log.log("loss", 1, 0, H)
    with pytest.raises(BackendError):
        found.update(Curves([Source(local, "exp")]))


def test_a_merged_database_has_each_row_once(
    repository: Repository, wal: Path, place: Path, tmp_path: Path
) -> None:
    """Issue: "merging twice, or from another process, never duplicates and never copies a
    sibling's rows into the winner"."""
    for n, name in enumerate(("v1", "v2")):
        with Log(repository, name, wal) as log:
            for i in range(5):
                log.log("loss", n, i, H, per_sample={"a": i})
    one, two = Source(repository, "v1"), Source(repository, "v2")
    database(place).update(Curves([one]))
    out = tmp_path / "merged.duckdb"
    many: list[list[Source | Foreign]] = [[one, two], [one, two, one], [one, two, Foreign(place)]]
    for sources in many:
        assert export_merged(Curves(sources), out) == 20
    assert compare(Curves([one, two]), out) == []
    assert len(compare(Curves([one]), out)) == 2
    import_signals(repository, "v2", place)  # v1's rows, as another root's import
    assert export_merged(Curves([one, two]), out) == 20
    with duckdb.connect(str(out), read_only=True) as connection:
        counts = "SELECT count(*), count(DISTINCT seq) FROM signals"
        assert connection.execute(counts).fetchone() == (10, 10)


@pytest.mark.parametrize("step", [1, 2**31])
def test_another_program_extends_and_merges_it(
    local: Repository, wal: Path, place: Path, step: int
) -> None:
    """WeightsLab's way: tables if not there, indexes, rows by name, siblings by position."""
    curves = Curves([Source(local, "exp")])
    with Log(local, "exp", wal) as log:
        log.log("loss", 1, step, H, per_sample={"a": 1})
    database(place).update(curves)
    path = place / "loggers.duckdb"
    columns = ", ".join(f"{c.name} {c.sql}" for c in COLUMNS["signals"])
    with duckdb.connect(str(path)) as other:
        other.execute(f"CREATE TABLE IF NOT EXISTS signals ({columns})")
        index = "CREATE INDEX IF NOT EXISTS {} ON signals (metric_name, experiment_hash, step)"
        other.execute(index.format("idx_signals_curve"))
        (top,) = other.execute("SELECT max(seq) FROM signals").fetchone() or (0,)
        names = ", ".join(c.name for c in COLUMNS["signals"])
        again = names.replace("seq", f"{top} + 1")
        other.execute(f"INSERT INTO signals ({names}) SELECT {again} FROM signals")
        assert other.execute("SELECT count(*) FROM signals").fetchone() == (2,)
    with duckdb.connect() as winner:
        winner.execute(f"CREATE TABLE signals ({columns})")
        winner.execute(f"ATTACH '{path}' AS incoming (READ_ONLY)")
        merge = "INSERT INTO signals SELECT * FROM incoming.signals"
        if step < 2**31:
            assert winner.execute(merge).fetchone() == (2,)
        else:
            with pytest.raises(duckdb.ConversionException):
                winner.execute(merge)
    assert database(place).update(curves).rows == 3
    assert compare(curves, path) == []


def test_a_file_that_did_not_arrive_is_sent_again_and_not_taken_for_another_programs(
    local: Repository, wal: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    outages = [BackendError("no network")]

    def write(data: bytes) -> None:
        if outages:
            raise outages.pop()
        sent.append(data)

    found, curves = database(place, write), Curves([Source(local, "exp")])
    with Log(local, "exp", wal) as log:
        log.log("loss", 1, 0, H)
        log.flush()
        with pytest.raises(BackendError, match="no network"):
            found.update(curves)
        assert found.is_ours() and sent == []
        monkeypatch.delattr("castore_experiments.signals.database.import_signals")
        assert found.update(curves).rows == 1
        assert sent == [(place / "loggers.duckdb").read_bytes()]
        found.update(curves)
        assert len(sent) == 1


@pytest.mark.parametrize("step", [1, 2**31])
def test_rows_that_another_program_adds_during_an_update_are_imported(
    step: int, local: Repository, wal: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither lost where the file is made anew, nor known to the file alone where it is not."""
    found, curves = database(place), Curves([Source(local, "exp")])
    with Log(local, "exp", wal) as log:
        log.log("loss", 1, 0, H)
        log.flush()
        found.update(curves)
        log.log("loss", 1, step, H)
        log.flush()
    looked = curves.refresh

    def refresh() -> None:
        monkeypatch.undo()
        with duckdb.connect(str(place / "loggers.duckdb")) as connection:
            sql = "INSERT INTO signals (metric_name, experiment_hash, step, metric_value, seq)"
            connection.execute(f"{sql} VALUES ('theirs', '{H}', 5, 0.5, 99)")
        looked()

    monkeypatch.setattr(curves, "refresh", refresh)
    found.update(curves)
    assert query(place, "SELECT step FROM signals WHERE metric_name = 'theirs'") == [(5,)]
    assert curves.signals("theirs")["step"].tolist() == [5]
