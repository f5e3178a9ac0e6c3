"""A crash at any write: what was committed before still reads, and the same command goes through.

The process dies before the k-th write, half-way through it, or right after; for every k.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from castore.copy import copy
from castore.objects import object_name
from castore.prune import PAUSE, prune
from castore.publish import MARGIN, OVERDUE
from castore.repository import Repository
from tests.faults import Clock, Crash, Crashing, Volatile
from tests.helpers import (
    clocked,
    contents,
    draft,
    lay,
    new_repository,
    noise,
    problems,
    raw,
    safetensors,
    series,
    weights,
    with_backend,
)

ENOUGH = PAUSE * OVERDUE + MARGIN + 10
kinds = pytest.mark.parametrize("kind", ["local", "memory"])
moments = pytest.mark.parametrize("moment", ["before", "half", "after"])


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a commit is many writes, and as many whenever it is run."""
    monkeypatch.setattr("castore.write._BATCH_FRAMES", 2)
    monkeypatch.setattr("castore.write._WRITERS", 1)
    monkeypatch.setattr("castore.write._PATIENCE", 30)


def everything(repository: Repository) -> dict[str, Any]:
    return {n.id: contents(repository, n) for n in repository.snapshots()}


def prune_patiently(repository: Repository) -> None:
    """`prune`: it waits out a dead sweep and the pause by itself."""
    prune(repository, grace=0)


def crash_everywhere(
    start: Callable[[], tuple[Repository, Clock]],
    command: Callable[[Repository], Any],
    moment: str,
    judge: Callable[[Repository, dict[str, Any], dict[str, Any]], None],
    least: int,
) -> None:
    """Run ``command`` on a fresh start for each k until it no longer crashes.

    ``judge`` is given the repository, what it held before, and what it holds after the command
    was run again; in between all that was there before must read as it did and be clean.
    """
    k = 0
    while True:
        repository, clock = start()
        before = everything(repository)
        crashing = Crashing(clock, k, moment)
        try:
            command(with_backend(repository, crashing, sleep=clock.sleep))
        except Crash:
            pass
        else:
            assert not crashing.dead
            assert k >= least, f"only {k} writes"
            return
        now = everything(repository)
        judge(repository, before, now)
        assert problems(repository) == []
        clock.sleep(ENOUGH)
        command(repository)
        assert problems(repository) == []
        k += 1


def base(kind: str, tmp_path: Path) -> Callable[[], tuple[Repository, Clock]]:
    def start() -> tuple[Repository, Clock]:
        made, clock = clocked(new_repository(kind, tmp_path, f"store{time.monotonic_ns()}"))
        for i, file in enumerate(series(3)):
            made.commit(draft({"m": file, "n": b"%d" % i}))
        clock.sleep(60)
        return made, clock

    return start


@kinds
@moments
def test_a_commit(kind: str, moment: str, tmp_path: Path) -> None:
    files = {"m": series(4)[3], "big": safetensors({f"w{i}": weights(seed=i) for i in range(3)})}
    files |= {"n": b"new", "raw": noise(3000)}
    done: list[dict[str, Any]] = []

    def judge(_: Repository, before: dict[str, Any], now: dict[str, Any]) -> None:
        new = [c for i, c in now.items() if i not in before]
        assert {i: c for i, c in now.items() if i in before} == before
        assert new in ([], [files])
        done.append(now)

    def command(repository: Repository) -> None:
        commit = repository.commit(draft(files))
        assert contents(repository, commit.name) == files

    crash_everywhere(base(kind, tmp_path), command, moment, judge, 5)
    assert len(done[0]) == 3
    if moment == "after":
        assert len(done[-1]) == 4


@moments
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_commit_whose_unsynced_names_are_lost(share: float, moment: str, tmp_path: Path) -> None:
    """Power fails at any write: names that no `sync` was told of are gone, all or some."""
    files = {"m": series(4)[3], "big": safetensors({f"w{i}": weights(seed=i) for i in range(3)})}
    files |= {"raw": noise(3000)}
    rng, k, lost = random.Random(5), 0, 0
    while True:
        repository, _ = base("local", tmp_path)()
        before = everything(repository)
        disk = Volatile(repository.backend, k, moment)
        done = None
        try:
            done = with_backend(repository, disk).commit(draft(files)).name
        except Crash:
            lost += len(disk.loose)
        disk.lose(share, rng)
        assert before.items() <= everything(repository).items()
        assert problems(repository) == []
        if done is not None:
            assert contents(repository, done) == files
            break
        assert contents(repository, repository.commit(draft(files)).name) == files
        assert problems(repository) == []
        k += 1
    assert k >= 4
    assert lost >= 3


def test_what_another_writer_left_unsynced_is_synced_with_its_bases(tmp_path: Path) -> None:
    """The other dies with objects named and not durable; who finds them makes them so."""
    old, new = series(2)
    repository = new_repository("local", tmp_path)
    disk = Volatile(repository.backend)
    other = with_backend(repository, disk)
    disk.sync = _die  # type: ignore[method-assign]
    with pytest.raises(Crash):
        other.commit(draft({"m_0": old, "m_1": new}))
    del disk.sync  # type: ignore[attr-defined]
    left = set(disk.loose)
    headers = [repository.store.header(n.rpartition("/")[2]) for n in left]
    assert [h for h in headers if h and h.base], "no delta: the test shows nothing"
    name = other.commit(draft({"m_1": new})).name
    assert left & {object_name(d) for d in repository.tree(name).blobs()}, "nothing was reused"
    disk.lose(1.0, random.Random(0))
    assert contents(repository, name) == {"m_1": new}
    assert problems(repository) == []


def _die(names: Iterable[str]) -> None:
    raise Crash


def test_objects_are_durable_before_the_tree_and_the_tree_before_the_snapshot(
    tmp_path: Path,
) -> None:
    disk = Volatile(new_repository("local", tmp_path).backend)
    loose: dict[str, set[str]] = {}
    create, create_many = disk.create, disk.create_many

    def note(name: str, data: Any) -> Any:
        loose[name] = set(disk.loose)
        return create(name, data)

    def note_many(items: Sequence[tuple[str, Any]]) -> Any:
        loose.update((name, set(disk.loose)) for name, _ in items)
        return create_many(items)

    disk.create, disk.create_many = note, note_many  # type: ignore[method-assign]
    repository = Repository(disk, "id")
    name = repository.commit(draft({"m": series(1)[0], "n": noise(70_000)})).name
    assert loose == {object_name(repository.snapshot(name).tree): set(), name.path: set()}


@kinds
@moments
def test_a_prune(kind: str, moment: str, tmp_path: Path) -> None:
    start_base = base(kind, tmp_path)

    def start() -> tuple[Repository, Clock]:
        repository, clock = start_base()
        names = list(repository.snapshots())
        repository.commit(draft({"keep": b"k", "also/m": series(2)[1]}), namespace="b")
        for name in names[:2]:
            repository.forget(name)
        lost = repository.commit(draft({"lost": noise(100)}), namespace="c").name
        repository.backend.delete(lost.path)
        clock.sleep(60)
        return repository, clock

    def judge(repository: Repository, before: dict[str, Any], now: dict[str, Any]) -> None:
        assert now == before

    def command(repository: Repository) -> None:
        before = everything(repository)
        prune_patiently(repository)
        assert everything(repository) == before

    crash_everywhere(start, command, moment, judge, 3)


@kinds
@moments
def test_a_prune_leaves_nothing_behind_when_it_is_run_again(
    kind: str, moment: str, tmp_path: Path
) -> None:
    start_base = base(kind, tmp_path)

    def start() -> tuple[Repository, Clock]:
        repository, clock = start_base()
        for name in list(repository.snapshots()):
            repository.forget(name)
        clock.sleep(60)
        return repository, clock

    def judge(repository: Repository, before: dict[str, Any], now: dict[str, Any]) -> None:
        assert now == before == {}

    def command(repository: Repository) -> None:
        prune_patiently(repository)
        left = {n for n in raw(repository) if n.partition("/")[0] in ("objects", "forgotten")}
        assert left == set()

    crash_everywhere(start, command, moment, judge, 4)


@kinds
@moments
def test_forget(kind: str, moment: str, tmp_path: Path) -> None:
    def judge(repository: Repository, before: dict[str, Any], now: dict[str, Any]) -> None:
        hidden = set(before) - set(now)
        assert {i: c for i, c in before.items() if i in now} == now
        assert len(hidden) <= 1
        assert hidden <= {n.id for n in repository.forgotten()}

    def command(repository: Repository) -> None:
        oldest = list(repository.snapshots())[-1:]
        for name in oldest if len(list(repository.snapshots())) == 3 else []:
            repository.forget(name)
        assert len(list(repository.snapshots())) == 2
        assert len(list(repository.forgotten())) == 1

    crash_everywhere(base(kind, tmp_path), command, moment, judge, 2)


@kinds
@moments
def test_unforget(kind: str, moment: str, tmp_path: Path) -> None:
    start_base = base(kind, tmp_path)
    kept: list[dict[str, Any]] = []

    def start() -> tuple[Repository, Clock]:
        repository, clock = start_base()
        kept.append(everything(repository))
        repository.forget(next(iter(repository.snapshots())))
        return repository, clock

    def judge(repository: Repository, before: dict[str, Any], now: dict[str, Any]) -> None:
        assert now in (before, kept[-1])
        assert set(kept[-1]) <= set(now) | {n.id for n in repository.forgotten()}

    def command(repository: Repository) -> None:
        for name in list(repository.forgotten()):
            repository.unforget(name)
        assert everything(repository) == kept[-1]
        assert list(repository.forgotten()) == []

    crash_everywhere(start, command, moment, judge, 2)


@kinds
@moments
def test_a_copy(kind: str, moment: str, tmp_path: Path) -> None:
    source, _ = base("memory", tmp_path)()
    source.commit(draft({"x": noise(500), "y": series(1)[0]}), namespace="b")
    wanted = everything(source)

    def start() -> tuple[Repository, Clock]:
        target, clock = clocked(new_repository(kind, tmp_path, f"target{time.monotonic_ns()}"))
        target.commit(draft({"own": b"1", "m": series(2)[1]}), namespace="mine")
        return target, clock

    def judge(repository: Repository, before: dict[str, Any], now: dict[str, Any]) -> None:
        assert {i: c for i, c in now.items() if i in before} == before
        assert {i: c for i, c in now.items() if i not in before}.items() <= wanted.items()

    def command(target: Repository) -> None:
        copy(source, target)
        assert wanted.items() <= everything(target).items()

    before = raw(source)
    crash_everywhere(start, command, moment, judge, 5)
    assert raw(source) == before


WRITER = """
import sys
from castore.repository import Repository
repository = Repository.open(sys.argv[1])
print("open", flush=True)
i = 0
while True:
    print(repository.commit([sys.argv[2]], labels={"i": str(i)}).name.id, flush=True)
    sys.argv[2] = sys.argv[3 + i % 2]
    i += 1
"""


def test_mc1_a_real_sigkill_in_the_middle_of_commits(tmp_path: Path) -> None:
    repository = new_repository("local", tmp_path)
    files = series(3)
    for i, file in enumerate(files):
        tensors = {f"w{j}": weights(30_000, 10 * i + j) for j in range(8)}
        lay(
            tmp_path / f"run{i}",
            {
                "m": file,
                "big": safetensors(tensors),
                **{f"s{j}": noise(40, 99 * i + j) for j in range(60)},
            },
        )
    folders = [str(tmp_path / f"run{i}") for i in range(3)]
    first = repository.commit([folders[0]]).name
    expected = contents(repository, first)
    rng = random.Random(7)
    promised: set[str] = set()
    for round_ in range(6):
        for path in Path(repository.url).glob("objects/*/*"):
            if round_ % 2:
                break
            # Make the writer work: all but what the first snapshot needs goes.
            if path.name not in {repository.snapshot(first).tree, *repository.tree(first).blobs()}:
                path.unlink()
        if round_ % 2 == 0:
            for name in list(repository.snapshots()):
                if name != first:
                    repository.backend.delete(name.path)
            promised.clear()
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, repository.url, folders[1], folders[2], folders[1]],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        time.sleep(rng.uniform(0.0, 0.08))
        os.kill(process.pid, signal.SIGKILL)
        promised.update(process.stdout.read().split())
        process.wait()
        process.stdout.close()
        assert promised <= {n.id for n in repository.snapshots()}
        assert contents(repository, first) == expected
        assert problems(repository) == []
        again = repository.commit([folders[1]]).name
        promised.add(again.id)
        repository.checkout(again, tmp_path / f"out{round_}")
    assert not [p for p in (Path(repository.url) / "tmp").iterdir() if p.stat().st_size]
    prune(repository, grace=0)
    assert contents(repository, first) == expected
    assert problems(repository) == []
