"""The live end: what is logged is in the repository, whatever happens on the way."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from castore import BackendError, InvalidInputError, Repository, SnapshotName
from castore.backend import Backend
from castore_experiments.signals import Curves, Log, Source, recover
from castore_experiments.signals import wal as wal_files
from castore_experiments.signals.batch import parse_key
from castore_experiments.signals.lock import WriterLock
from castore_experiments.signals.run import newest
from tests.helpers import with_backend

H = "0123456789abcdef01234567"


def values(
    repository: Repository, metric: str = "loss", namespace: str = "exp"
) -> dict[int, float]:
    frame = Curves([Source(repository, namespace)]).signals(metric)
    return dict(zip(frame["step"].tolist(), frame["metric_value"].tolist(), strict=True))


def names(repository: Repository, namespace: str = "exp") -> list[SnapshotName]:
    return list(repository.snapshots(f"{namespace}.signals"))


class Refusing:
    """A backend whose writes fail while ``refuse`` is set."""

    def __init__(self, inner: Backend):
        self._inner, self.refuse = inner, False

    def __getattr__(self, name: str) -> Any:
        found: Any = getattr(self._inner, name)
        if name in ("create", "create_many", "replace") and self.refuse:
            return self._no
        return found

    def _no(self, *_: object) -> None:
        raise BackendError("the store is down")


def refusing(repository: Repository) -> tuple[Repository, Refusing]:
    backend = Refusing(repository.backend)
    return with_backend(repository, backend), backend


def eventually(check: Callable[[], bool]) -> bool:
    """Whether it holds within a minute at least."""
    for _ in range(6000):
        if check():
            return True
        time.sleep(0.01)
    return False


def test_what_is_flushed_is_there(repository: Repository, wal: Path) -> None:
    """Seed: "Training curves (losses, metrics, per-sample signals) persist ... keyed by
    (metric_name, experiment_hash, step)"."""
    with Log(repository, "exp", wal, clock=lambda: 1796008300.9) as log:
        log.log("loss", torch.tensor(0.5), np.int64(3), H, per_sample={"a": 1.0, "b": math.nan})
        log.log("iou", 0.25, 3, H, per_instance={("a", 0): 0.5, ("a", 1): 0.75})
        name = log.flush()
        assert name is not None and log.flush() is None
        curves = Curves([Source(repository, "exp")])
        point = curves.signals("loss", H).iloc[0].to_dict()
        samples, instances = curves.per_sample("loss"), curves.per_instance("iou", H)
    run = point.pop("run")
    assert run == log.run
    assert {k: x for k, x in point.items() if x is not None and x == x} == {
        "metric_name": "loss",
        "experiment_hash": H,
        "step": 3,
        "metric_value": 0.5,
        "timestamp": 1796008300,
        "audit_mode": False,
        "is_evaluation_marker": False,
        "split_name": "",
        "evaluation_tags": "[]",
        "point_note": "",
        "outliers": "",
        "outlier_count": 0,
        "sample_count": 2,
        "value_min": 1.0,
        "value_max": 1.0,
        "seq": 3,
    }
    assert samples["sample_id"].tolist() == ["a", "b"] and math.isnan(samples["value"][1])
    assert instances[["sample_id", "annotation_id", "value"]].values.tolist() == [
        ["a", 0, 0.5],
        ["a", 1, 0.75],
    ]


def test_documented_columns_are_kept(local: Repository, wal: Path) -> None:
    with Log(local, "exp", wal) as log:
        log.log(
            "acc",
            1,
            7,
            f"{H}_2",
            timestamp=5,
            audit_mode=True,
            is_evaluation_marker=True,
            split_name="test",
            evaluation_tags=["hard"],
            point_note="ünï",
            outliers=[["s1", 9.0]],
            trend_value=0.5,
            trend_margin=np.float32(0.25),
            value_min=-1,
            value_max=2,
            sample_count=9,
        )
    row = Curves([Source(local, "exp")]).signals("acc", f"{H}_2").iloc[0]
    assert row.tolist()[3:17] == [
        *(1.0, 5, True, True, "test", '["hard"]', "ünï", '[["s1", 9.0]]', 1, 9),
        *(0.5, 0.25, -1.0, 2.0),
    ]


def test_nan_infinities_and_large_steps_survive(repository: Repository, wal: Path) -> None:
    found = {0: math.nan, 1: math.inf, 2: -math.inf, 2**40: -0.0, -(2**63): 5e-324}
    with Log(repository, "exp", wal) as log:
        for step, value in found.items():
            log.log("loss", value, step)
    read = values(repository)
    assert read.keys() == found.keys()
    assert math.isnan(read[0]) and (read[1], read[2]) == (math.inf, -math.inf)
    assert math.copysign(1, read[2**40]) == -1 and read[-(2**63)] == 5e-324


def test_what_the_caller_changes_afterwards_changes_nothing(local: Repository, wal: Path) -> None:
    value, samples, column = torch.tensor(1.0), {"a": torch.tensor(2.0)}, np.array([3.0])
    with Log(local, "exp", wal) as log:
        log.log("loss", value, 0, per_sample=samples)
        log.log("loss", value, 1, per_sample=(["b"], column))
        value.fill_(9)
        samples["a"].fill_(9)
        samples["c"] = torch.tensor(9.0)
        column[:] = 9
    assert values(local) == {0: 1.0, 1: 1.0}
    found = Curves([Source(local, "exp")]).per_sample("loss")
    assert found[["sample_id", "value"]].values.tolist() == [["a", 2.0], ["b", 3.0]]


def test_a_refused_call_takes_nothing(local: Repository, wal: Path) -> None:
    with Log(local, "exp", wal) as log:
        for bad in ({"b": "x"}, {1.5: 1.0}, [1.0]):
            with pytest.raises(InvalidInputError):
                log.log("loss", 1.0, 0, H, per_sample=bad)
        odd: list[tuple[Any, ...]]
        odd = [("", 1.0, 0), ("loss", "1", 0), ("loss", 1.0, 0.5), ("loss", 1.0, 0, [])]
        for arguments in odd:
            with pytest.raises(InvalidInputError):
                log.log(*arguments)
        assert log.flush() is None


def test_a_snapshot_names_writer_and_numbers(local: Repository, wal: Path) -> None:
    with Log(local, "exp", wal, writer="00000000000000aa") as log:
        for i in range(3):
            log.log("loss", i, i, H)
        log.flush()
        log.log("loss", 3, 3, H)
        log.flush()
        keys = [parse_key(n.key) for n in names(local)]
    assert [(k.writer, k.first, k.last) for k in keys if k] == [
        ("00000000000000aa", 4, 4),
        ("00000000000000aa", 1, 3),
    ]
    assert [n.key for n in names(local)] == ["w00000000000000aa.1.4"]  # merged by close
    facts = local.snapshot(names(local)[0]).facts
    assert len(facts["replaces"]) == 2 and facts["runs"][0]["id"] == "00000000000000aa.0"


def test_rows_stand_in_the_local_file_within_a_second(local: Repository, wal: Path) -> None:
    log = Log(local, "exp", wal, interval=0.01)
    log.log("loss", 1.0, 0, H)
    home = wal / log.writer
    assert eventually(lambda: any(p.stat().st_size for p in home.glob("*.wal")))
    log.flush()
    assert not list(home.glob("*.wal"))
    log.close()
    assert not home.exists()


def test_a_minute_makes_a_snapshot(local: Repository, wal: Path) -> None:
    with Log(local, "exp", wal, minute=0.01) as log:
        log.log("loss", 1.0, 0, H)
        assert eventually(lambda: len(names(local)) == 1)


def test_much_makes_a_snapshot_before_the_minute(
    local: Repository, wal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("castore_experiments.signals.log.GATHERED", 100)
    with Log(local, "exp", wal) as log:
        for i in range(200):
            log.log("loss", 1.0, i, H)
        assert eventually(lambda: len(names(local)) >= 1)
    assert len(values(local)) == 200


def test_a_failure_in_the_background_raises_at_the_next_call_and_loses_nothing(
    local: Repository, wal: Path
) -> None:
    """Issue: "a failed background save raises at the next call and from close()"."""
    repository, backend = refusing(local)
    log = Log(repository, "exp", wal, minute=0.01, interval=0.01)
    backend.refuse = True
    log.log("loss", 1.0, 0, H)
    assert eventually(lambda: log._failure is not None)
    with pytest.raises(BackendError, match="the store is down"):
        log.log("loss", 2.0, 1, H)
    backend.refuse = False
    assert eventually(lambda: values(local) == {0: 1.0})
    log._failure = None
    log.log("loss", 3.0, 2, H)
    log.close()
    assert values(local) == {0: 1.0, 2: 3.0}


def test_a_failed_close_raises_and_the_next_opener_takes_the_rows(
    local: Repository, wal: Path
) -> None:
    repository, backend = refusing(local)
    log = Log(repository, "exp", wal)
    log.log("loss", 1.0, 0, H)
    backend.refuse = True
    with pytest.raises(BackendError, match="the store is down"):
        log.close()
    log.close()
    found = recover(local, "exp", wal)
    assert [(r.writer, r.rows, r.lost_bytes) for r in found] == [(log.writer, 1, 0)]
    assert values(local) == {0: 1.0} and recover(local, "exp", wal) == []


def test_rows_survive_a_local_file_that_cannot_be_written(local: Repository, wal: Path) -> None:
    log = Log(local, "exp", wal)
    log.log("loss", 1.0, 0, H)
    home = wal / log.writer
    (home / "000001.wal").mkdir()
    log.flush()
    assert values(local) == {0: 1.0}
    with pytest.raises(BackendError, match="in memory only"):
        log.log("loss", 2.0, 1, H)
    (home / "000001.wal").rmdir()
    log.log("loss", 2.0, 1, H)
    log.close()
    assert values(local) == {0: 1.0, 1: 2.0}


def test_after_close_it_refuses(local: Repository, wal: Path) -> None:
    log = Log(local, "exp", wal)
    log.close()
    for call in (lambda: log.log("a", 1, 0), log.flush, lambda: log.begin(None, None)):
        with pytest.raises(InvalidInputError, match="closed"):
            call()
    assert log.unflushed() == {}


def test_a_writer_of_another_form_is_refused(local: Repository, wal: Path) -> None:
    with pytest.raises(InvalidInputError, match="16 hexadecimal"):
        Log(local, "exp", wal, writer="me")
    own = "0" * 15 + "1"
    with Log(local, "exp", wal, writer=own), pytest.raises(BackendError, match="live writer"):
        Log(local, "exp", wal, writer=own)


def test_a_new_folder_that_a_recovery_holds_is_waited_for(
    local: Repository, wal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that recovers may be stopped just then; a folder that was there is a writer's."""
    real, calls = WriterLock.take, itertools.count()

    def take(path: Path) -> WriterLock | None:
        return real(path) if next(calls) >= 500 else None

    monkeypatch.setattr(WriterLock, "take", take)
    monkeypatch.setattr(wal_files, "time", SimpleNamespace(sleep=lambda _: None))
    with Log(local, "exp", wal, writer="0" * 15 + "1") as log:
        log.log("loss", 1.0, 0, H)
    assert values(local) == {0: 1.0} and next(calls) == 501
    (wal / ("0" * 15 + "2")).mkdir()
    calls = itertools.count()
    with pytest.raises(BackendError, match="live writer"):
        Log(local, "exp", wal, writer="0" * 15 + "2")


class WholeSeconds:
    """A store's clock that tells whole seconds, and whose answer takes ``took`` seconds."""

    def __init__(self, inner: Backend, at: float):
        self._inner, self.at, self.took = inner, at, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def now(self) -> float:
        told = float(int(self.at))
        self.at += self.took
        return told


def test_runs_of_one_second_have_an_order_however_late_an_answer_comes(
    local: Repository, wal: Path
) -> None:
    backend = WholeSeconds(local.backend, 1796008300.25)
    repository = with_backend(local, backend)
    runs = []
    for name, took in (("one", 0.0), ("two", 3.0)):
        backend.took = took
        with Log(repository, name, wal, clock=lambda: backend.at) as log:
            backend.took = 0.0
            runs += log.runs()
        backend.at = 1796008300.5
    found = newest(runs)
    assert found is not None and found.id == runs[1].id


def test_a_forked_child_is_told_to_open_its_own(local: Repository, wal: Path) -> None:
    log = Log(local, "exp", wal, interval=600, minute=600)  # its threads rest while it forks
    log.log("loss", 1.0, 0, H)
    child = os.fork()
    if not child:
        code = 1
        try:
            log.close()  # the parent's: nothing happens
            try:
                log.log("loss", 2.0, 1, H)
            except InvalidInputError as e:
                code = 0 if "forked child" in str(e) else 2
            with Log(local, "exp", wal) as own:
                own.log("own", 3.0, 1, H)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    log.log("loss", 4.0, 2, H)
    log.close()
    curves = Curves([Source(local, "exp")])
    assert curves.signals("loss", run=log.run)["metric_value"].tolist() == [1.0, 4.0]
    assert curves.signals("own")["metric_value"].tolist() == [3.0]


def test_many_threads_lose_nothing(local: Repository, wal: Path) -> None:
    with Log(local, "exp", wal, interval=0.005, minute=0.02) as log:

        def work(n: int) -> None:
            for i in range(300):
                log.log(f"m{n}", i, i, H, per_sample={"a": 1.0})

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    curves = Curves([Source(local, "exp")])
    for n in range(4):
        assert curves.signals(f"m{n}")["metric_value"].tolist() == list(range(300))
        assert len(curves.per_sample(f"m{n}")) == 300


def test_two_writers_at_once_count_once_each(repository: Repository, wal: Path) -> None:
    """Issue: "the union is by (writer, sequence), so nothing counts twice"."""
    with Log(repository, "exp", wal) as one, Log(repository, "exp", wal) as two:
        for i in range(10):
            one.log("one", i, i, H)
            two.log("two", i, i, H)
        one.flush()
        two.flush()
    curves = Curves([Source(repository, "exp")])
    assert len(curves.signals("one", run=one.run)) == len(curves.signals("two", run=two.run)) == 10
