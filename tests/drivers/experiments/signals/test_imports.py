"""Curves that the public tool wrote: taken in once, whatever their columns and age."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from castore import CorruptObjectError, FormatError, Repository
from castore_experiments.signals import (
    Curves,
    Database,
    Foreign,
    Imported,
    Log,
    Source,
    compare,
    foreign_run,
    import_signals,
)
from castore_experiments.signals.duckfile import unreplayed

H = "0123456789abcdef01234567"
FIXTURES = Path(__file__).parents[1] / "fixtures"


def make(place: Path, *statements: str) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    with duckdb.connect(str(place / "loggers.duckdb")) as connection:
        for statement in statements:
            connection.execute(statement)
    return place


OLD = (
    "CREATE TABLE signals (seq BIGINT, step INTEGER, metric_name VARCHAR, metric_value DOUBLE,"
    " experiment_hash VARCHAR, timestamp BIGINT)"
)


def add(*rows: tuple[int, int, float]) -> str:
    return "INSERT INTO signals VALUES " + ", ".join(
        f"({seq}, {step}, 'loss', {value}, '{H}', 5)" for seq, step, value in rows
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "foreign"


def test_the_public_tools_own_file(repository: Repository, tmp_path: Path) -> None:
    """The fixture of WeightsLab 2.0.3: every curve as its ``expected.json`` has it."""
    archive = FIXTURES / "weightslab" / "single.tar.xz"
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "fixture", filter="data")
    loggers = tmp_path / "fixture" / "single" / "checkpoints" / "loggers"
    assert import_signals(repository, "exp", loggers) == Imported(152, "duckdb")
    assert import_signals(repository, "exp", loggers) == Imported(0, "duckdb")
    expected = json.loads((archive.parent / "single.expected.json").read_text())
    curves = Curves([Source(repository, "exp")])
    for metric, hashes in expected["roots"]["."]["signals"].items():
        for hash, points in hashes.items():
            found = curves.signals(metric, hash)[["step", "metric_value"]].values.tolist()
            assert found == [[float(s), v] for s, v in points]
    assert compare(curves, loggers / "loggers.duckdb") == []
    assert compare(Curves([Foreign(loggers)]), loggers / "loggers.duckdb") != []


def test_columns_by_name_and_missing_ones(repository: Repository, place: Path) -> None:
    make(place, OLD, add((0, 0, 0.5), (1, 1, math.inf)).replace("inf", "'inf'"))
    assert import_signals(repository, "exp", place).rows == 2
    found = Curves([Source(repository, "exp")]).signals("loss", H)
    assert found["metric_value"].tolist() == [0.5, math.inf]
    assert (
        found[["audit_mode", "evaluation_tags", "outliers"]].values.tolist()
        == [[False, "[]", ""]] * 2
    )
    assert set(found["run"]) == {foreign_run("exp")}


def test_only_what_is_new_is_added(repository: Repository, place: Path) -> None:
    """Issue: an import may go on "incrementally, also while it is being written"."""
    make(place, OLD, add((0, 0, 0.5), (1, 0, 0.5), (2, 1, 0.25)))
    assert import_signals(repository, "exp", place).rows == 3
    assert import_signals(repository, "exp", place).rows == 0
    make(place, add((3, 0, 0.5), (4, 2, 0.75)))
    assert import_signals(repository, "exp", place).rows == 2  # a third equal row is new
    assert import_signals(repository, "exp", place).rows == 0
    source = Source(repository, "exp")
    source.refresh()
    assert sum(r.num_rows for r in source.rows("signals", "loss", None)) == 5
    assert Curves([source]).signals("loss")["metric_value"].tolist() == [0.5, 0.25, 0.75]


def test_the_order_of_columns_may_change_meanwhile(local: Repository, place: Path) -> None:
    make(place, OLD, add((0, 0, 0.5)))
    import_signals(local, "exp", place)
    make(place, "ALTER TABLE signals ADD COLUMN outliers VARCHAR")
    make(
        place,
        "ALTER TABLE signals ADD COLUMN sample_count INTEGER",
        add((1, 1, 0.5))[:-1] + ", '', 0)",
    )
    assert import_signals(local, "exp", place).rows == 1


def test_two_imports_at_once_count_once(local: Repository, place: Path) -> None:
    make(place, OLD, add(*((i, i, i / 2) for i in range(50))))
    script = (
        "import sys\n"
        "from castore import Repository\n"
        "from castore_experiments.signals import import_signals\n"
        "import_signals(Repository.open(sys.argv[1]), 'exp', sys.argv[2])\n"
    )
    command = [sys.executable, "-c", script, local.url, str(place)]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [c.wait() for c in both] == [0, 0]
    curves = Curves([Source(local, "exp")])
    assert len(curves.signals("loss")) == 50
    found = Database(place.parent / "own" / "loggers.duckdb", place.parent / "state.json")
    assert found.update(curves).rows == 50
    assert import_signals(local, "exp", place).rows == 0


def test_a_resume_goes_on_from_imported_rows(local: Repository, place: Path, wal: Path) -> None:
    make(place, OLD, add(*((i, i, 1.0) for i in range(10))))
    import_signals(local, "exp", place)
    with Log(local, "exp", wal, parent=foreign_run("exp"), fork_step=4) as log:
        log.log("loss", 2, 5, H)
    found = Curves([Source(local, "exp")]).signals("loss")
    assert found["metric_value"].tolist() == [1, 1, 1, 1, 1, 2]


def test_rows_that_came_later_go_on_from_the_newest_run(
    local: Repository, place: Path, wal: Path
) -> None:
    make(place, OLD, add((0, 0, 1.0)))
    import_signals(local, "exp", place)
    with Log(local, "exp", wal, parent=foreign_run("exp"), fork_step=0) as log:
        log.log("loss", 2, 1, H)
        log.log("loss", 2, 2, H)
    make(place, add((1, 2, 3.0)))
    import_signals(local, "exp", place)
    curves = Curves([Source(local, "exp")])
    assert curves.signals("loss", H)["metric_value"].tolist() == [1, 2, 3]
    assert curves.signals("loss", run=log.run)["metric_value"].tolist() == [1, 2, 2]
    newest = curves.newest_run()
    with Log(local, "exp", wal, parent=newest.id if newest else None, fork_step=2) as log:
        log.log("loss", 4, 3, H)
    assert curves.signals("loss")["metric_value"].tolist() == [1, 2, 3, 4]


def test_a_sibling_is_read_where_it_is(local: Repository, place: Path, wal: Path) -> None:
    make(place, OLD, add((0, 0, 0.5), (1, 0, 0.75)))
    with Log(local, "exp", wal) as log:
        log.log("loss", 2, 5, H)
    foreign = Foreign(place)
    curves = Curves([Source(local, "exp"), foreign])
    assert curves.signals("loss")["metric_value"].tolist() == [0.75, 2]
    assert curves.metrics() == ["loss"] and curves.hashes() == [H] and foreign.warning is None
    make(place, add((2, 1, 1.0)))
    assert curves.signals("loss")["metric_value"].tolist() == [0.75, 1, 2]
    assert len(list(local.snapshots("exp.signals"))) == 1


def test_a_sibling_that_cannot_be_read_is_left_out(
    local: Repository, place: Path, wal: Path
) -> None:
    """DB8: "merge skips that sibling with a warning, others merged"."""
    make(place, OLD, add((0, 0, 0.5)))
    data = bytearray((place / "loggers.duckdb").read_bytes())
    data[12:20] = (5000).to_bytes(8, "little")
    (place / "loggers.duckdb").write_bytes(data)
    with Log(local, "exp", wal) as log:
        log.log("loss", 2, 5, H)
    foreign = Foreign(place)
    assert len(Curves([Source(local, "exp"), foreign]).signals("loss")) == 1
    assert foreign.warning is not None and "5000" in foreign.warning
    with pytest.raises(FormatError, match="storage version 5000, written by DuckDB v.*upgrade"):
        import_signals(local, "exp", place)


@pytest.mark.parametrize(("data", "error"), [(b"x" * 9000, FormatError), (b"", FormatError)])
def test_no_database(local: Repository, place: Path, data: bytes, error: type[Exception]) -> None:
    place.mkdir()
    (place / "loggers.duckdb").write_bytes(data)
    with pytest.raises(error, match=r"loggers\.duckdb"):
        import_signals(local, "exp", place)


def test_a_damaged_database(local: Repository, place: Path) -> None:
    make(place, OLD, add(*((i, i, 1.0) for i in range(10))))
    path = place / "loggers.duckdb"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CorruptObjectError, match="written by DuckDB v.* is damaged"):
        import_signals(local, "exp", place)
    assert path.stat().st_size == 5000 and [p.name for p in place.iterdir()] == ["loggers.duckdb"]


def writer_killed(place: Path) -> bytes:
    """A database whose writer was killed before its write-ahead file was taken in; that file."""
    make(place, OLD, add((0, 0, 0.5)))
    script = (
        "import duckdb, os, sys\n"
        "c = duckdb.connect(sys.argv[1])\n"
        "c.execute(\"SET checkpoint_threshold = '1TB'\")\n"
        "for i in range(1, 6):\n"
        f"    c.execute(f\"INSERT INTO signals VALUES ({{i}}, {{i}}, 'loss', 1, '{H}', 5)\")\n"
        "os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(place / "loggers.duckdb")], check=False)
    return (place / "loggers.duckdb.wal").read_bytes()


def test_a_killed_writers_last_rows_are_read(local: Repository, place: Path) -> None:
    """DB2: kill -9 during inserts."""
    data = writer_killed(place)
    assert unreplayed(data) == 0
    assert import_signals(local, "exp", place) == Imported(6, "duckdb")
    assert (place / "loggers.duckdb.wal").read_bytes() == data


@pytest.mark.parametrize("damage", ["half", "garbage", "flip"])
def test_a_damaged_write_ahead_file_costs_its_rows_and_is_told(
    local: Repository, place: Path, damage: str
) -> None:
    """DB2: cut the .wal in half; fill it with garbage; the main file still opens."""
    data = writer_killed(place)
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 255
    found = {"half": data[: len(data) // 2], "garbage": b"\x07" * 500, "flip": bytes(flipped)}
    (place / "loggers.duckdb.wal").write_bytes(found[damage])
    result = import_signals(local, "exp", place)
    assert 1 <= result.rows < 6 and any("lost" in w for w in result.warnings)
    assert (place / "loggers.duckdb.wal").read_bytes() == found[damage]


def test_a_live_writers_database_is_read_from_a_copy(local: Repository, place: Path) -> None:
    """DB1: the public tool holds its file until it exits."""
    make(place, OLD, add((0, 0, 0.5)))
    script = (
        "import duckdb, sys\n"
        "c = duckdb.connect(sys.argv[1])\n"
        f"c.execute(\"INSERT INTO signals VALUES (1, 1, 'loss', 1, '{H}', 5)\")\n"
        "print(1, flush=True); input()\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(place / "loggers.duckdb")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None and writer.stdout.readline() == "1\n"
    assert import_signals(local, "exp", place).rows == 2
    writer.communicate("\n")
    assert writer.returncode == 0
    assert import_signals(local, "exp", place).rows == 0


def test_views_are_not_read(local: Repository, place: Path, tmp_path: Path) -> None:
    """A file from elsewhere runs nothing: only tables are read, and no other files."""
    (tmp_path / "secret.csv").write_text("a\n1\n")
    make(place, f"CREATE VIEW signals AS SELECT * FROM read_csv('{tmp_path}/secret.csv')")
    assert import_signals(local, "exp", place) == Imported(0, "duckdb")


def test_odd_rows(local: Repository, place: Path) -> None:
    make(
        place,
        OLD,
        "INSERT INTO signals VALUES (NULL, 1, 'a|b', NULL, NULL, NULL),"
        " (2, NULL, 'gone', 1, NULL, NULL), (3, 3, NULL, 1, NULL, NULL), (4, 4, 'c', 'nan', '', 1)",
    )
    assert import_signals(local, "exp", place).rows == 2
    curves = Curves([Source(local, "exp")])
    assert curves.metrics() == ["a|b", "c"] and curves.hashes() == [None, ""]
    assert math.isnan(curves.signals("c")["metric_value"][0])


# -- before the database

POINT = {"metric_value": 0.5, "timestamp": 5, "audit_mode": True}


def payload() -> dict[str, Any]:
    return {
        "graph_names": ["loss"],
        "signal_history": {"loss": {H: {"3": [POINT], "4": POINT | {"metric_value": math.nan}}}},
        "signal_history_per_sample": {
            "loss": {
                H: {"_compact": True, "sample_ids": [1, "b"], "steps": [3, 3], "values": [1, 2]}
            }
        },
        "signal_history_per_instance": {
            "iou": {
                H: {
                    "_compact": True,
                    "sample_ids": ["a"],
                    "annotation_ids": [2],
                    "steps": [3],
                    "values": [0.5],
                }
            }
        },
    }


def check_older(repository: Repository) -> None:
    curves = Curves([Source(repository, "exp")])
    points = curves.signals("loss", H)
    assert points["step"].tolist() == [3, 4] and points["metric_value"][0] == 0.5
    assert points["audit_mode"].tolist() == [True, True] and points["timestamp"][0] == 5
    assert curves.per_sample("loss", H)["sample_id"].tolist() == ["1", "b"]
    assert curves.per_instance("iou", H)["annotation_id"].tolist() == [2]


def test_older_json(repository: Repository, place: Path) -> None:
    place.mkdir()
    (place / "loggers.json").write_text(json.dumps({"loggers": {"main": payload()}}))
    assert import_signals(repository, "exp", place) == Imported(5, "json")
    assert import_signals(repository, "exp", place) == Imported(0, "json")
    check_older(repository)


@pytest.mark.parametrize("manifest", [True, False])
def test_older_parts(local: Repository, place: Path, manifest: bool) -> None:
    place.mkdir()
    whole = payload()
    for i, key in enumerate(k for k in whole if k != "graph_names"):
        line = json.dumps({"logger_name": "main", "payload": {key: whole[key]}}).encode()
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(line + b"\n\n")
        (place / f"loggers.part{i:04d}.json.zst").write_bytes(sink.getvalue())
    if manifest:
        names = sorted(p.name for p in place.iterdir())
        (place / "loggers.manifest.json").write_text(json.dumps({"chunks": names}))
    assert import_signals(local, "exp", place) == Imported(5, "json")
    check_older(local)
    if manifest:
        (place / names[1]).unlink()
        with pytest.raises(FormatError, match=r"part0001.*is missing"):
            import_signals(local, "other", place)


def test_older_lists_and_what_is_odd(local: Repository, place: Path) -> None:
    place.mkdir()
    old = {
        "signal_history": [
            {"metric_name": "loss", "model_age": 1, "metric_value": 2, "experiment_hash": H},
            "odd",
            {"metric_name": "loss", "model_age": "x"},
        ],
        "signal_history_per_sample": {
            "loss": {
                H: [{"sample_id": 5, "model_age": 1, "metric_value": 3.0}],
                "s9": {"model_age": 2, "metric_value": 4.0},
            },
            "odd": {H: {"_compact": True, "sample_ids": [1], "steps": []}},
        },
    }
    (place / "loggers.json").write_text(json.dumps({"loggers": {"main": old}}))
    found = import_signals(local, "exp", place)
    assert found.rows == 3 and "3 entries of an unknown shape" in found.warnings[0]
    samples = Curves([Source(local, "exp")]).per_sample("loss")
    assert samples["sample_id"].tolist() == ["5", "s9"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"loggers": {"main": {"signal_history": 1e999}}}']
)
def test_older_files_that_are_none(local: Repository, place: Path, text: str) -> None:
    place.mkdir()
    (place / "loggers.json").write_text(text)
    if "1e999" in text:
        assert import_signals(local, "exp", place).rows == 0
    else:
        with pytest.raises(FormatError, match=r"loggers\.json"):
            import_signals(local, "exp", place)


def test_the_database_goes_before_older_files(local: Repository, place: Path) -> None:
    make(place, OLD, add((0, 0, 0.5)))
    (place / "loggers.json").write_text(json.dumps({"loggers": {"main": payload()}}))
    assert import_signals(local, "exp", place) == Imported(1, "duckdb")


def test_an_empty_folder(local: Repository, place: Path) -> None:
    assert import_signals(local, "exp", place) == Imported(0, "none")
    shutil.rmtree(place, ignore_errors=True)
    assert Curves([Foreign(place)]).metrics() == []
