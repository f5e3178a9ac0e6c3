"""One repository in many processes: opened before the fork, or sent to them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from castore.prune import prune
from castore.repository import Repository
from castore.snapshot import SnapshotName
from tests.helpers import contents, draft, noise, problems, series

FILES = {f"m_{i}": f for i, f in enumerate(series(3))}
_opened: Repository | None = None


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository.init(tmp_path / "store")


def commit_one(repository: Repository, i: int) -> SnapshotName:
    files = {**FILES, "own": noise(300, i)}
    return repository.commit(draft(files), namespace=f"w{i % 3}").name


def read_one(repository: Repository, name: SnapshotName) -> dict[str, Any]:
    return contents(repository, name)


def commit_with_the_opened(i: int) -> SnapshotName:
    assert _opened is not None
    return commit_one(_opened, i)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_and_write_through_what_they_were_sent(
    method: str, repository: Repository
) -> None:
    mine = commit_one(repository, 100)
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        names = list(pool.map(commit_one, [repository] * 5, range(5)))
        found = list(pool.map(read_one, [repository] * 6, [mine, *names]))
    assert len(set(names)) == 5
    assert [f["own"] for f in found] == [noise(300, i) for i in (100, *range(5))]
    assert set(repository.snapshots()) == {mine, *names}
    assert problems(repository) == []


def test_forked_workers_use_the_repository_their_parent_opened(repository: Repository) -> None:
    global _opened
    _opened = repository
    try:
        mine = commit_one(repository, 100)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            names = pool.map(commit_with_the_opened, range(6))
    finally:
        _opened = None
    assert set(repository.snapshots()) == {mine, *names}
    for i, name in enumerate(names):
        assert contents(repository, name) == {**FILES, "own": noise(300, i)}
    assert problems(repository) == []


def test_a_child_forked_in_the_middle_of_a_commit_holds_no_lock(repository: Repository) -> None:
    """It outlives its parent's commit: a prune must not wait for it."""
    pids: list[int] = []

    def fork_once(_: int) -> None:
        if not pids:
            pid = os.fork()
            if pid == 0:
                signal.pause()
                os._exit(0)
            pids.append(pid)

    try:
        name = repository.commit(draft(FILES), progress=fork_once).name
        with repository.backend.lock(exclusive=True, timeout=60):
            pass
        prune(repository, grace=0)
        assert contents(repository, name) == FILES
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def hold_and_wait(repository: Repository, ready: Any) -> None:
    with repository.shared_lock():
        ready.set()
        time.sleep(600)


def test_a_lock_dies_with_the_process_that_holds_it(repository: Repository) -> None:
    from castore.errors import BackendError

    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold_and_wait, args=(repository, ready))
    process.start()
    assert ready.wait(60)
    with (
        pytest.raises(BackendError, match=f"process {process.pid}"),
        repository.backend.lock(exclusive=True, timeout=0.1),
    ):
        pass
    with repository.shared_lock():
        pass
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with repository.backend.lock(exclusive=True, timeout=60):
        pass
    prune(repository, grace=0)


def test_commits_and_prunes_of_many_processes_at_once(repository: Repository) -> None:
    """GC2 on one machine: nothing a commit found is gone when its snapshot is there."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(3, mp_context=context) as pool:
        commits = [pool.submit(commit_and_forget, repository, i) for i in range(2)]
        prunes = pool.submit(prune_often, repository, 12)
        names = [name for c in commits for name in c.result()]
        prunes.result()
    assert set(repository.snapshots()) == set(names)
    for name in names:
        assert contents(repository, name)["m_2"] == FILES["m_2"]
    assert problems(repository) == []


def commit_and_forget(repository: Repository, worker: int) -> list[SnapshotName]:
    """Keeps every third snapshot; what they share goes unneeded again and again."""
    kept = []
    for i in range(9):
        name = commit_one(repository, 10 * worker + i)
        if i % 3:
            repository.forget(name)
        else:
            kept.append(name)
    return kept


def prune_often(repository: Repository, n: int) -> None:
    for _ in range(n):
        prune(repository, grace=0)
        time.sleep(0.01)


def test_what_is_pickled_is_a_place_and_no_cache(repository: Repository) -> None:
    name = commit_one(repository, 1)
    repository.store.current_headers(repository.tree(name).blobs())
    data = pickle.dumps(repository)
    assert len(data) < 1000
    again = pickle.loads(data)
    assert (again.id, again.url) == (repository.id, repository.url)
    assert contents(again, name) == contents(repository, name)
