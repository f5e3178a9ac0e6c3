"""Killed writers: nothing older than the last second is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from castore import BackendError, FormatError, Repository
from castore_experiments.signals import Curves, Log, Recovered, Source, recover
from castore_experiments.signals import wal as wal_files
from tests.drivers.experiments.signals.test_log import eventually, refusing

H = "0123456789abcdef01234567"
SCRIPT = """
import sys, time
from castore import Repository
from castore_experiments.signals import Log
repository = Repository.open(sys.argv[1], storage_options=eval(sys.argv[3]))
log = Log(repository, "exp", sys.argv[2], interval=0.05)
print(log.writer, flush=True)
for i in range(10**9):
    log.log("loss", i, i, "0123456789abcdef01234567", per_sample={"a": i, "b": i})
    if i == 200:
        log.flush()
    if i % 50 == 0:
        print(i, flush=True)
        time.sleep(0.01)
"""


def holds(home: Path, step: int) -> bool:
    """Whether the local file has come to ``step``, with the values of its samples."""
    tables = wal_files.read(home).tables
    ends = (tables[t][-1]["step"].to_pylist()[-1] for t in ("signals", "per_sample") if t in tables)
    return len(tables) == 2 and min(ends) >= step


def killed(
    repository: Repository, wal: Path, options: dict[str, object], after: int
) -> tuple[str, int]:
    """A training killed with SIGKILL; its writer, and a step that its local file had come to."""
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, repository.url, str(wal), repr(options)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    writer, sure = child.stdout.readline().strip(), 0
    while sure < after:
        sure = int(child.stdout.readline())
    try:
        assert eventually(lambda: holds(wal / writer, sure))
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.stdout.close()
        child.wait()
    return writer, sure


def test_a_killed_training_loses_nothing_older_than_its_last_flush(
    repository: Repository, wal: Path, request: pytest.FixtureRequest
) -> None:
    """Issue: "A crash loses at most the rows since the last flush (1 s or at every checkpoint),
    never older ones". DB3: the same for rows of samples."""
    remote = repository.backend.kind != "local"
    options = request.getfixturevalue("s3_options") if remote else {}
    writer, sure = killed(repository, wal, options, 400)
    before = len(Curves([Source(repository, "exp")]).signals("loss"))
    (found,) = recover(repository, "exp", wal)
    assert found.writer == writer and found.rows > 0 and before >= 201
    curves = Curves([Source(repository, "exp")])
    points, samples = curves.signals("loss", H), curves.per_sample("loss", H)
    assert points["step"].tolist() == list(range(len(points))) and len(points) > sure > 200
    assert sorted(samples["value"]) == sorted([*range(len(samples) // 2)] * 2)
    assert len(samples) > 2 * sure
    assert not list(wal.iterdir())


def test_a_live_writers_file_is_left_alone(local: Repository, wal: Path) -> None:
    log = Log(local, "exp", wal, interval=0.01)
    log.log("loss", 1, 0, H)
    log.unflushed()
    assert recover(local, "exp", wal) == []
    assert list((wal / log.writer).glob("*.wal"))
    log.close()
    assert len(Curves([Source(local, "exp")]).signals("loss")) == 1


def left(repository: Repository, wal: Path, rows: int = 5, flushed: int = 0) -> Path:
    """The folder of a writer that ended without a word."""
    script = (
        "import os, sys\n"
        "from castore import Repository\n"
        "from castore_experiments.signals import Log\n"
        "log = Log(Repository.open(sys.argv[1]), 'exp', sys.argv[2], parent='p.0', fork_step=7)\n"
        "for i in range(int(sys.argv[3])):\n"
        "    log.log('loss', i, i, None)\n"
        "    log.unflushed()\n"
        "    if i + 1 == int(sys.argv[4]): log.flush()\n"
        "os._exit(0)\n"
    )
    command = [sys.executable, "-c", script, repository.url, str(wal), str(rows), str(flushed)]
    subprocess.run(command, check=True)
    (home,) = wal.iterdir()
    return home


def test_rows_that_a_snapshot_has_are_not_brought_in_again(local: Repository, wal: Path) -> None:
    home = left(local, wal, rows=5, flushed=0)
    kept = {p.name: p.read_bytes() for p in home.iterdir()}
    assert [r.rows for r in recover(local, "exp", wal)] == [5]
    home.mkdir()  # as if the machine had stopped before the folder went
    for name, data in kept.items():
        (home / name).write_bytes(data)
    assert recover(local, "exp", wal) == []
    curves = Curves([Source(local, "exp")])
    assert curves.signals("loss")["step"].tolist() == list(range(5))
    (run,) = curves.runs()
    assert (run.parent, run.fork_step) == ("p.0", 7)


def test_flushed_and_unflushed_rows_join(local: Repository, wal: Path) -> None:
    left(local, wal, rows=5, flushed=3)
    assert [r.rows for r in recover(local, "exp", wal)] == [2]
    assert len(Curves([Source(local, "exp")]).signals("loss")) == 5


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_torn_end_costs_only_itself(local: Repository, wal: Path, cut: int) -> None:
    home = left(local, wal)
    (path,) = home.glob("*.wal")
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    (found,) = recover(local, "exp", wal)
    assert found.rows == 4 and found.lost_bytes > 0
    assert Curves([Source(local, "exp")]).signals("loss")["step"].tolist() == [0, 1, 2, 3]


def test_a_flipped_byte_ends_the_file(local: Repository, wal: Path) -> None:
    home = left(local, wal)
    (path,) = home.glob("*.wal")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    (found,) = recover(local, "exp", wal)
    assert 0 < found.rows < 5 and found.lost_bytes > 0


def test_rows_of_another_root_are_left_to_it(local: Repository, wal: Path, tmp_path: Path) -> None:
    home = left(local, wal)
    other = Repository.init(tmp_path / "other")
    assert recover(other, "exp", wal) == [] and recover(local, "exp2", wal) == []
    assert home.exists() and not list(other.snapshots("exp.signals"))
    assert [r.rows for r in recover(local, "exp", wal)] == [5]


def test_garbage_is_reported_and_nothing_is_made_up(local: Repository, wal: Path) -> None:
    home = wal / ("a" * 16)
    home.mkdir(parents=True)
    (home / "000001.wal").write_bytes(b"x" * 100)
    assert recover(local, "exp", wal) == [Recovered("a" * 16, 0, 100)]
    (wal / "notes.txt").write_text("mine")
    assert recover(local, "exp", wal) == [] and (wal / "notes.txt").exists()


def test_a_record_of_a_newer_kind_is_refused_and_kept(local: Repository, wal: Path) -> None:
    home = left(local, wal)
    head = wal_files._HEAD.pack(b"CSWL", 9, 1)
    record = head + wal_files._SUM.pack(wal_files._checksum(head, b"x")) + b"x"
    with (home / "000001.wal").open("ab") as f:
        f.write(record)
    with pytest.raises(FormatError, match="newer castore"):
        recover(local, "exp", wal)
    assert (home / "000001.wal").exists()


def test_a_store_that_is_down_leaves_the_file(local: Repository, wal: Path) -> None:
    home = left(local, wal)
    repository, backend = refusing(local)
    backend.refuse = True
    with pytest.raises(BackendError, match="down"):
        recover(repository, "exp", wal)
    assert list(home.glob("*.wal"))
    assert [r.rows for r in recover(local, "exp", wal)] == [5]


def test_an_exit_without_close_leaves_all_in_the_local_file(local: Repository, wal: Path) -> None:
    script = (
        "import sys\n"
        "from castore import Repository\n"
        "from castore_experiments.signals import Log\n"
        "log = Log(Repository.open(sys.argv[1]), 'exp', sys.argv[2], interval=100)\n"
        "for i in range(7): log.log('loss', i, i)\n"
    )
    subprocess.run([sys.executable, "-c", script, local.url, str(wal)], check=True)
    assert [r.rows for r in recover(local, "exp", wal)] == [7]


def test_two_recover_at_once_and_each_row_counts_once(local: Repository, wal: Path) -> None:
    left(local, wal, rows=20)
    script = (
        "import sys, json\n"
        "from castore import Repository\n"
        "from castore_experiments.signals import recover\n"
        "found = recover(Repository.open(sys.argv[1]), 'exp', sys.argv[2])\n"
        "print(json.dumps([r.rows for r in found]))\n"
    )
    command = [sys.executable, "-c", script, local.url, str(wal)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    rows = [n for c in both for n in json.loads(c.communicate()[0])]
    assert rows == [20] and all(c.returncode == 0 for c in both)
    assert len(Curves([Source(local, "exp")]).signals("loss")) == 20
