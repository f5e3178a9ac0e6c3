"""Checks, copies and drivers' verifies by threads, processes and Dask: the same, each once."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from castore.check import CheckReport, Problem, check
from castore.cli import app
from castore.copy import copy
from castore.errors import BackendError, CastoreError, InvalidInputError
from castore.objects import object_name
from castore.repository import Repository
from castore.table import NONE, Needs, Table, raw_of
from castore.testing.s3server import S3Server
from castore.workers import TRIES, Lent, Processes, opened, results
from tests.executor_jobs import always_dies, dies_once, looks
from tests.helpers import (
    age,
    draft,
    flip_object,
    headers,
    new_repository,
    noise,
    problems,
    raw,
    series,
)

KINDS = ["threads", "processes", "dask"]


@pytest.fixture(scope="module")
def environment(s3server: S3Server) -> Iterator[None]:
    """What workers find in their environment, so that they reach the S3 server."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3server.env().items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def cluster(environment: None) -> Iterator[Any]:
    """Dask: a scheduler and two worker processes with their nannies."""
    import distributed

    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0"
    ) as made:
        yield made


@pytest.fixture(scope="module")
def executors(environment: None, cluster: Any) -> Iterator[dict[str, Executor]]:
    import distributed

    with (
        ThreadPoolExecutor(2) as threads,
        Processes(1) as processes,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield {"threads": threads, "processes": processes, "dask": client.get_executor()}


@pytest.fixture(params=["local", "s3"])
def url(request: pytest.FixtureRequest, environment: None, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "store")
    found: str = request.getfixturevalue("s3_url")
    return found


@pytest.fixture(autouse=True)
def small_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small repositories, and still many jobs."""
    for module in ("check", "copy"):
        monkeypatch.setattr(f"castore.{module}.BATCH", 4)


def fill(repository: Repository) -> None:
    """Chains, shared and lone objects in two namespaces."""
    for i, file in enumerate(series(6)):
        files = {"m": file, "shared": b"s" * 100, f"own{i}": noise(300, i)}
        repository.commit(draft(files), namespace="ab"[i % 2])


def spoil(repository: Repository) -> None:
    """Damage of each kind: a base, a lone object, a header, a document, a name."""
    deltas = [d for d, h in sorted(headers(repository).items()) if h.depth == 2]
    base = headers(repository)[deltas[0]]
    flip_object(repository, base.base)
    names = list(repository.snapshots())
    lone = [repository.tree(n).entries for n in names[:3]]
    victims = [next(e for p, e in t.items() if p.startswith("own")) for t in lone]
    digests = [v.blobs()[0] for v in victims if hasattr(v, "blobs")]
    repository.backend.delete(object_name(digests[0]))
    flip_object(repository, digests[1], 3)
    flip_object(repository, digests[2])
    data = repository.backend.get(names[-1].path)
    repository.backend.delete(names[-1].path)
    repository.backend.create(names[-1].path, data + b" ")
    repository.backend.create("objects/zz/strange", b"?")


def audit(repository: Repository, **how: Any) -> tuple[list[Problem], CheckReport]:
    report = CheckReport()
    return list(check(repository, report=report, **how)), report


# -- results


def test_results_come_in_order_each_once_and_few_jobs_wait() -> None:
    taken, done, ahead = 0, 0, []

    def jobs() -> Iterator[tuple[int]]:
        nonlocal taken
        for i in range(300):
            taken += 1
            ahead.append(taken - done)
            yield (i,)

    def work(i: int) -> int:
        time.sleep(random.uniform(0, 0.002))
        return i

    with ThreadPoolExecutor(4) as pool:
        for i in results(pool, work, jobs()):
            assert i == done
            done += 1
    assert done == 300
    assert max(ahead) <= 2 * 4 + 3 + 1


@pytest.mark.parametrize("kind", KINDS)
def test_equal_jobs_are_each_done(
    kind: str, executors: dict[str, Executor], tmp_path: Path
) -> None:
    """Dask by itself takes equal jobs for one, and gives its result again while anybody has it:
    a check beside another one would see what that one saw, and one after it, a job taken back."""
    file, new = tmp_path / "file", tmp_path / "new"
    jobs = [(str(file),)] * 3
    file.write_text("as it was")
    before = results(executors[kind], looks, jobs)
    assert next(before) == "as it was"
    assert next(before) == "as it was"
    new.write_text("as it is")
    new.replace(file)
    assert list(results(executors[kind], looks, jobs)) == ["as it is"] * 3
    assert next(before) in ("as it was", "as it is")


@pytest.mark.parametrize("how", ["error", "interrupt", "left"])
def test_what_ends_the_work_takes_back_what_has_not_begun(how: str) -> None:
    begun: list[int] = []
    gate = threading.Event()

    def work(i: int) -> int:
        begun.append(i)
        if i == 0 and how == "error":
            raise BackendError("no")
        if i > 0:
            gate.wait(120)
        return i

    with ThreadPoolExecutor(1) as pool:
        running = results(pool, work, ((i,) for i in range(100)))
        if how == "error":
            with pytest.raises(BackendError, match="no"):
                next(running)
        else:
            assert next(running) == 0
            if how == "interrupt":
                with pytest.raises(KeyboardInterrupt):
                    running.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
            else:
                running.close()  # type: ignore[attr-defined]
        gate.set()
    assert len(begun) <= 2


def test_a_job_whose_process_dies_is_handed_over_again(tmp_path: Path) -> None:
    jobs = [(str(tmp_path / "flag"), i) for i in range(12)]
    with Processes(1) as pool:
        found = list(results(pool, dies_once, jobs))
        assert [i for i, _ in found] == list(range(12))
        assert len({pid for _, pid in found}) > 1, "it was killed"
        with pytest.raises(BackendError, match=f"died {TRIES} times"):
            list(results(pool, always_dies, [(i,) for i in range(3)]))
        assert [i for i, _ in results(pool, dies_once, jobs)] == list(range(12))


def test_a_pool_that_stays_broken_is_a_clear_error() -> None:
    jobs = [(i,) for i in range(3)]
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        pytest.raises(BackendError, match=r"castore\.workers\.Processes"),
    ):
        list(results(pool, always_dies, jobs))


def test_an_executor_that_was_shut_down_is_told() -> None:
    class Cancels(Executor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.cancel()
            return future

    with pytest.raises(BackendError, match="cancelled"):
        list(results(Cancels(), always_dies, [(0,)]))


# -- tables


@pytest.mark.parametrize("seed", range(5))
def test_chains_hold_each_object_once_bases_first(seed: int) -> None:
    rng = random.Random(seed)
    digests = sorted(
        {f"{rng.getrandbits(256):064x}" for _ in range(200)} | {"00" * 32, "ab00" * 16}
    )
    count = len(digests)
    table = Table(raw_of(digests), np.ones(count, np.int64))
    assert table.named(range(count)) == digests
    assert [table.place(d) for d in digests] == list(range(count))
    assert table.place("ff" * 32) == NONE or "ff" * 32 in digests
    table.known[:] = True
    for i in rng.sample(range(count), 120):
        base = rng.randrange(count)
        if table.depths[base] < 8 and base != i and table.bases[i] == NONE:
            table.bases[i], table.depths[i] = base, table.depths[base] + 1
    chosen = np.sort(np.array(rng.sample(range(count), 150)))
    groups = [group.tolist() for group in table.chains(chosen)]
    order = [place for group in groups for place in group]
    assert sorted(order) == chosen.tolist()
    for group in groups:
        for i, place in enumerate(group):
            base = int(table.bases[place])
            sound = base != NONE and table.depths[base] < table.depths[place]
            assert (base in group[:i]) == bool(i) or not sound
            assert i == 0 or base in group[:i]
    mask = np.zeros(count, np.bool_)
    mask[rng.sample(range(count), 5)] = True
    below, above = table.closure(mask), table.standing_on(mask)
    for place in range(count):
        assert above[place] == any(mask[p] for p in table.down(place))
        if below[place]:
            assert any(place in table.down(p) for p in np.flatnonzero(mask).tolist())


def test_needs_keep_the_greediest_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("castore.table._CHUNK", 3)
    rng, expected, needs = random.Random(1), dict[str, tuple[int, int]](), Needs()
    digests = [f"{i:064x}" for i in range(20)]
    for tree in range(40):
        some = rng.sample(digests, 7)
        lengths = [rng.randrange(50) for _ in some]
        needs.add(raw_of(some), np.array(lengths), tree)
        for digest, length in zip(some, lengths, strict=True):
            expected[digest] = max(expected.get(digest, (0, 0)), (length, tree))
    rows = needs.table()
    found = {
        d: (int(n), int(t)) for d, n, t in zip(digests, rows["length"], rows["tree"], strict=True)
    }
    assert found == expected


# -- check


def same_by_all(repository: Repository, executors: dict[str, Executor], **how: Any) -> int:
    """Check alone and by each executor; gives how many problems each finds."""
    expected, first = audit(repository, **how)
    for kind in KINDS:
        seen: list[int] = []
        found, report = audit(repository, **how, executor=executors[kind], progress=seen.append)
        assert found == expected, kind
        assert sorted(report.unstable) == sorted(first.unstable) == []
        counts = [(r.snapshots, r.objects, r.bytes_read, r.unreferenced) for r in (report, first)]
        assert counts[0] == counts[1]
        assert sum(seen) == report.bytes_read
    return len(expected)


def test_a_check_is_the_same_whoever_does_it(url: str, executors: dict[str, Executor]) -> None:
    """Damage of each kind, on a local disk and on S3."""
    repository = Repository.init(url)
    fill(repository)
    spoil(repository)
    assert same_by_all(repository, executors, read_data=True) == 6
    expected, _ = audit(repository, read_data=True)
    assert {p.kind for p in expected} == {"missing", "corrupt", "malformed"}


def test_every_way_to_check_is_the_same_by_workers(
    tmp_path: Path, executors: dict[str, Executor]
) -> None:
    repository = Repository.init(tmp_path / "store")
    fill(repository)
    since = sorted(n.time for n in repository.snapshots())[3]
    assert same_by_all(repository, executors, read_data=True, layout=True) == 0
    spoil(repository)
    for how in ({}, {"since": since, "read_data": True}, {"layout": True}):
        assert same_by_all(repository, executors, **how)


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_check_goes_on_and_reads_each_object_once(
    kind: str, tmp_path: Path, executors: dict[str, Executor]
) -> None:
    repository = Repository.init(tmp_path / "store")
    repository.commit(draft({f"f{i:02d}": noise(200, i) for i in range(40)}))
    total = sum(len(d) for n, d in raw(repository).items() if n.startswith("objects/"))
    state, seen = str(tmp_path / "state"), list[int]()

    def stop(size: int) -> None:
        seen.append(size)
        if len(seen) == 11:
            raise KeyboardInterrupt

    how: dict[str, Any] = {"read_data": True, "state": state, "executor": executors[kind]}
    with pytest.raises(KeyboardInterrupt):
        audit(repository, progress=stop, **how)
    found, report = audit(repository, **how)
    assert found == []
    assert report.bytes_read == total - sum(seen[:10])
    lines = (tmp_path / "state").read_text().splitlines()[1:-1]
    assert len({line.split()[0] for line in lines}) == len(lines) == len(headers(repository))


def test_a_killed_dask_worker_changes_nothing(
    url: str, cluster: Any, executors: dict[str, Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two worker processes dies by SIGKILL in the middle of the check."""
    monkeypatch.setattr("castore.check.BATCH", 1)
    repository = Repository.init(url)
    repository.commit(draft({f"f{i:02d}": noise(200, i) for i in range(60)}))
    flip_object(repository, sorted(headers(repository))[30])
    expected, first = audit(repository, read_data=True)
    assert len(expected) == 1
    pids = [w.process.pid for w in cluster.workers.values() if w.process]
    seen: list[int] = []

    def progress(size: int) -> None:
        seen.append(size)
        if len(seen) == 5:
            os.kill(pids[0], signal.SIGKILL)

    found, report = audit(repository, read_data=True, executor=executors["dask"], progress=progress)
    assert found == expected
    assert report.bytes_read == first.bytes_read == sum(seen)
    assert len(seen) == len(headers(repository)) - 1
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:  # the nanny starts another: later tests have two again
        now = [w.process.pid for w in cluster.workers.values() if w.process and w.process.pid]
        if len(now) == 2 and pids[0] not in now:
            break
        time.sleep(0.05)
    assert pids[0] not in now


def test_a_check_by_processes_that_are_killed(tmp_path: Path) -> None:
    """A worker of ``--workers`` dies: the pool is replaced, and nothing is told twice."""
    repository = Repository.init(tmp_path / "store")
    repository.commit(draft({f"f{i:02d}": noise(200, i) for i in range(40)}))
    state = tmp_path / "state"
    with Processes(2) as pool:
        seen: list[int] = []

        def progress(size: int) -> None:
            seen.append(size)
            if len(seen) == 3:
                victims = list(pool._pool._processes)
                os.kill(victims[0], signal.SIGKILL)

        found, report = audit(
            repository, read_data=True, state=str(state), executor=pool, progress=progress
        )
    assert found == []
    assert len(seen) == report.objects == len(headers(repository))
    assert state.read_text().count("\n") == report.objects + 2


def test_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    repository = Repository.init(tmp_path / "store")
    repository.commit(draft({f"f{i:02d}": noise(200, i) for i in range(40)}))

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    pool = Processes(1)
    with pytest.raises(KeyboardInterrupt), pool:
        pids = []
        for problem in check(repository, read_data=True, executor=pool, progress=stop):
            raise AssertionError(problem)
    pids = [p for p in (pool._pool._processes or {}) if Path(f"/proc/{p}").exists()]
    assert pids == []


# -- what travels


def test_secrets_do_not_travel_and_want_of_access_is_no_damage(
    s3_url: str, s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker without credentials stops the check: it finds no thousand unreadable objects."""
    repository = Repository.init(s3_url, storage_options=s3_options)
    fill(repository)
    packed = pickle.dumps(Lent(repository))
    for secret in (s3_options["key"], s3_options["secret"]):
        assert secret.encode() not in packed
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(BackendError, match="credentials do not travel"):
        pickle.loads(packed).repository  # noqa: B018
    with ThreadPoolExecutor(2) as pool:  # threads have them
        assert audit(repository, executor=pool)[0] == []


def test_a_worker_on_another_disk_is_told(tmp_path: Path) -> None:
    repository = Repository.init(tmp_path / "store")
    packed = pickle.dumps(Lent(repository))
    os.rename(tmp_path / "store", tmp_path / "away")
    with pytest.raises(BackendError, match="cannot open"):
        pickle.loads(packed).repository  # noqa: B018
    Repository.init(tmp_path / "store")
    with pytest.raises(BackendError, match="another repository"):
        pickle.loads(packed).repository  # noqa: B018


def test_a_process_that_cannot_open_the_repository_says_so(tmp_path: Path) -> None:
    """It does not die of it: nobody is told of memory that ran out."""
    repository = new_repository("memory", tmp_path)
    fill(repository)
    with Processes(1) as processes, pytest.raises(BackendError, match="a worker cannot open"):
        audit(repository, executor=processes)


# -- copy


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_the_same_whoever_sends(
    kind: str, url: str, tmp_path: Path, executors: dict[str, Executor]
) -> None:
    source, target = Repository.init(tmp_path / "source"), Repository.init(url)
    fill(source)
    deltas = [h for h in headers(source).values() if h.base]
    assert len(deltas) == 4
    seen: list[int] = []
    report = copy(source, target, executor=executors[kind], progress=seen.append)
    stored = {n: d for n, d in raw(source).items() if n.startswith("objects/")}
    assert {n: d for n, d in raw(target).items() if n.startswith("objects/")} == stored
    assert (report.snapshots, report.objects) == (6, len(stored))
    assert report.bytes == sum(seen) == sum(map(len, stored.values()))
    assert {n.id for n in target.snapshots()} == {n.id for n in source.snapshots()}
    assert problems(target) == []
    again = copy(source, target, executor=executors[kind])
    assert (again.snapshots, again.skipped, again.objects) == (0, 6, 0)


def test_a_copy_by_workers_sends_no_delta_without_its_base(
    tmp_path: Path, executors: dict[str, Executor]
) -> None:
    """Only newer snapshots go: deltas whose base stays behind go without one, as from here."""
    source = Repository.init(tmp_path / "source")
    names = [source.commit(draft({"m": f})).name for f in series(4)]
    targets: list[dict[str, bytes]] = []
    for executor in (None, executors["processes"]):
        target = Repository.init(tmp_path / f"target{len(targets)}")
        copy(source, target, since=names[2].time, executor=executor)
        assert problems(target) == []
        targets.append({n: d for n, d in raw(target).items() if n.startswith("objects/")})
        copy(source, target, executor=executor)
        assert problems(target) == []
    assert targets[0] == targets[1]


def test_damage_ends_a_copy_by_workers(tmp_path: Path, executors: dict[str, Executor]) -> None:
    source, target = Repository.init(tmp_path / "source"), Repository.init(tmp_path / "target")
    fill(source)
    victim = max(headers(source), key=lambda d: headers(source)[d].depth)
    flip_object(source, victim)
    with pytest.raises(CastoreError, match=victim):
        copy(source, target, executor=executors["processes"])
    assert object_name(victim) not in raw(target)
    assert list(target.snapshots("b")) == []
    assert problems(target) == []


def test_a_prune_during_a_copy_by_workers_loses_nothing(
    tmp_path: Path, s3_url: str, environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep with no grace deletes what workers have sent; the publisher sees it and mends."""
    from castore.prune import prune

    source, target = Repository.init(tmp_path / "source"), Repository.init(s3_url)
    fill(source)
    real, swept = target.publish, list[int]()

    def after_a_sweep(*args: Any) -> Any:
        if not swept:
            age(target)
            swept.append(prune(Repository.open(s3_url), grace=0).objects)
        return real(*args)

    monkeypatch.setattr(target, "publish", after_a_sweep)
    with ThreadPoolExecutor(2) as pool:
        copy(source, target, executor=pool)
    assert swept[0] > 10
    assert len(list(target.snapshots())) == 6
    assert problems(target) == []


# -- command line and drivers


def castore(*words: str) -> tuple[int, list[dict[str, Any]], str]:
    done = CliRunner().invoke(app, [*words, "--json"])
    return done.exit_code, [json.loads(x) for x in done.stdout.splitlines()], done.stderr


def test_the_command_line_takes_workers_and_a_scheduler(url: str, cluster: Any) -> None:
    repository = Repository.init(url)
    fill(repository)
    spoil(repository)
    alone = castore("check", "-r", url, "--read-data")
    assert alone[0] == 3
    assert castore("check", "-r", url, "--read-data", "--workers", "1")[:2] == alone[:2]
    dask = ("--dask", cluster.scheduler_address)
    assert castore("check", "-r", url, "--read-data", *dask)[:2] == alone[:2]


def test_the_command_line_copies_by_workers(
    url: str, tmp_path: Path, cluster: Any, environment: None
) -> None:
    fill(Repository.init(tmp_path / "source"))
    Repository.init(url)
    words = ("copy", "-r", str(tmp_path / "source"), "--to", url)
    code, shown, _ = castore(*words, "--dask", cluster.scheduler_address)
    assert (code, shown[-1]["snapshots"]) == (0, 6)
    assert problems(Repository.open(url)) == []


@pytest.mark.parametrize("words", [["--workers", "0"], ["--workers", "2", "--dask", "tcp://x:1"]])
def test_wrong_workers_are_a_usage_error(words: list[str], tmp_path: Path) -> None:
    Repository.init(tmp_path / "store")
    assert castore("check", "-r", str(tmp_path / "store"), *words)[0] == 2


def test_what_opens_no_executor() -> None:
    with pytest.raises(InvalidInputError, match="choose one"), opened(1, "tcp://127.0.0.1:1"):
        pass
    with pytest.raises(InvalidInputError, match="1 or more"), opened(0):
        pass
    with opened() as executor:
        assert executor is None
