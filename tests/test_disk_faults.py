"""Local disks that fill, fail, vanish or lose power: real ones where a test can make one."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from castore.copy import copy
from castore.errors import BackendError, CastoreError
from castore.prune import prune
from castore.repository import Repository
from castore.testing.faulty import Call, FaultyBackend
from castore_experiments.audit import audit
from tests.drivers.experiments.small import filled, net, opened
from tests.helpers import (
    contents,
    draft,
    new_repository,
    noise,
    problems,
    series,
    with_backend,
)
from tests.power_cut import Disk, State, lay_state

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a real file system of its own with the options given to mount."""
    at = tmp_path / "small"
    at.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting is not allowed here; limits of size are tested anyway")
        return at

    yield mount
    subprocess.run(["umount", str(at)], capture_output=True)


@pytest.fixture
def swift() -> Iterator[Path]:
    """A folder in memory where there is one: what is tested is the order of calls, not a disk."""
    at = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    yield at
    shutil.rmtree(at)


def everything(repository: Repository) -> dict[str, Any]:
    return {n.id: contents(repository, n) for n in repository.snapshots()}


def _says(error: Exception, *texts: str) -> None:
    assert any(t in str(error) for t in texts), error


def files(i: int) -> dict[str, Any]:
    return {"m": series(i + 2)[i + 1], "n": noise(9_000, i), "s": b"%d" % i}


# -- no room


@root_only
@pytest.mark.parametrize("options", ["size=3m", "size=8m,nr_inodes=60"], ids=["bytes", "inodes"])
def test_a_disk_that_is_full_at_any_moment_of_a_command(
    options: str, small: Callable[[str], Path], tmp_path: Path
) -> None:
    """With room for ever more of it: it fails clearly, leaves nothing, and at last goes through.

    What needs no room still works: reads, check, prune, which makes some.
    """
    disk = small(options)
    repository = Repository.init(disk / "store")
    old = repository.commit(draft(files(0))).name
    other = new_repository("memory", tmp_path)
    other.commit(draft(files(7)))
    for what, act in {
        "commit": lambda: repository.commit(draft(files(1))),
        "copy": lambda: copy(other, repository),
        "forget": lambda: repository.forget(old),
        "unforget": lambda: repository.unforget(old),
    }.items():
        failed = _with_ever_more_room(disk, repository, act, "inodes" in options)
        assert failed or what in ("forget", "unforget"), what
    assert len(list(repository.snapshots())) == 3
    _fill(disk, 0, "inodes" in options)
    for name in list(repository.snapshots())[:2]:
        with pytest.raises(BackendError, match="disk is full"):
            repository.forget(name)
    assert problems(repository) == []
    prune(repository, grace=0)


def _with_ever_more_room(
    disk: Path, repository: Repository, act: Callable[[], Any], inodes: bool
) -> int:
    """How often ``act`` failed before it went through."""
    before = everything(repository)
    for failed in range(60):
        _fill(disk, failed, inodes)
        try:
            act()
        except BackendError as e:
            _says(e, "disk is full")
            assert everything(repository) == before
            assert not [p for p in (disk / "store/tmp").iterdir() if p.is_file()]
        else:
            return failed
        finally:
            shutil.rmtree(disk / "filler")
        assert problems(repository) == []
    raise AssertionError("never went through")


def _fill(disk: Path, leave: int, inodes: bool) -> None:
    """Take all room but ``leave`` inodes or times three pages."""
    filler = disk / "filler"
    filler.mkdir()
    free = os.statvfs(disk)
    if inodes:
        for i in range(free.f_ffree - leave):
            (filler / str(i)).touch()
    else:
        size = max(0, free.f_bavail - 3 * leave) * free.f_bsize
        with open(filler / "x", "wb") as f:
            f.write(bytes(size))


@root_only
def test_a_root_on_a_disk_that_is_full_loses_no_save(small: Callable[[str], Path]) -> None:
    disk = small("size=3m")
    with opened(disk / "root") as manager:
        manager.watch(model=net(fill=0.0), hyperparameters={"lr": 0.0})
        manager.save_model_checkpoint(step=0)
        first = manager.current_exp_hash
        manager.watch(model=net(fill=1.0), hyperparameters={"lr": 1.0})
        manager.update_experiment_hash()
        failed = 0
        while True:
            _fill(disk, failed, inodes=False)
            try:
                manager.save_model_checkpoint(step=1)
                break
            except BackendError as e:
                _says(e, "disk is full", "No space left")
                failed += 1
            finally:
                shutil.rmtree(disk / "filler")
        assert failed >= 2
        second = manager.current_exp_hash
    with opened(disk / "root") as manager:
        assert set(manager.get_all_hashes()) == {first, second}
        for i, hash in enumerate((first, second)):
            assert filled(manager.load_checkpoint(hash or "", force=True)) == float(i)
        place = manager._session.place
        assert list(audit(place.archive, place.files)) == []  # type: ignore[arg-type]


# -- a disk that fails


class _Failing:
    """Lets the ``at``-th call (from 0) of a function of `os` fail; 1 for each that was made."""

    def __init__(self, name: str, at: int, code: int):
        self.name, self.at, self.code, self.calls = name, at, code, 0
        self.real = getattr(os, name)

    def __call__(self, *args: Any, **more: Any) -> Any:
        mine, self.calls = self.calls, self.calls + 1
        if mine == self.at:
            raise OSError(self.code, os.strerror(self.code))
        return self.real(*args, **more)


@pytest.mark.parametrize("name", ["fsync", "write", "pread", "link"])
def test_a_call_that_fails_with_eio_fails_the_command_and_nothing_else(
    name: str, swift: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every one of its calls (nothing real fails on demand); the command, repeated, works."""
    monkeypatch.setattr("castore.write._WRITERS", 1)
    at = failed = 0
    while True:
        repository = new_repository("local", swift, f"store{at}")
        repository.commit(draft(files(0)))
        before = everything(repository)
        failing = _Failing(name, at, errno.EIO)
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing)
            try:
                repository.commit(draft(files(1)))
            except BackendError as e:
                failed += 1
                _says(e, "disk failed", "Input/output error")
        now = everything(repository)
        assert before.items() <= now.items()
        assert all(c in (files(0), files(1)) for c in now.values())
        assert problems(repository) == []
        repository.commit(draft(files(1)))
        if failing.calls <= at:
            break
        at += 1
        shutil.rmtree(repository.url)
    assert at >= 2
    assert failed >= 2


# -- no descriptors left

FEW = """
import os, resource, sys
from castore.check import check
from castore.copy import copy
from castore.errors import BackendError
from castore.prune import prune
from castore.repository import Repository
from castore.source import Draft, MemoryFile
from tests.helpers import draft, noise
url, other, out = sys.argv[1:]
repository, target = Repository.open(url), Repository.open(other)
name = repository.resolve("latest")
warm = Repository.init(f"{out}/warm")  # so that all modules are there
first = warm.commit(draft({"a": noise(9)})).name
warm.unforget(warm.forget(first))
copy(warm, Repository.init(f"{out}/warm2"))
warm.checkout("latest", f"{out}/warm3")
list(check(warm, read_data=True)), prune(warm, grace=0)
acts = {
    "commit": lambda i: repository.commit(draft({f"n{j}": noise(900, 90 + j) for j in range(30)})),
    "check": lambda i: {p.kind for p in check(repository, read_data=True)} <= {"unreadable"} or 1/0,
    "checkout": lambda i: repository.checkout(name, f"{out}/{i}"),
    "copy": lambda i: copy(repository, target),
    "forget": lambda i: repository.forget(name),
    "unforget": lambda i: repository.unforget(name),
    "prune": lambda i: prune(repository, grace=0),
}
soft = resource.getrlimit(resource.RLIMIT_NOFILE)
for what, act in acts.items():
    for spare in range(40):
        used = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, soft[1]))
        try:
            act(spare)
            done = "done"
        except BackendError as e:
            assert "open files" in str(e), e
            done = "BackendError"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, soft)
        print(what, done, flush=True)
        if done == "done":
            break
"""


def test_few_descriptors_fail_a_command_clearly_or_not_at_all(tmp_path: Path) -> None:
    """Whatever the command, with ever more of them until it goes through."""
    repository = new_repository("local", tmp_path)
    other = new_repository("local", tmp_path, "other")
    repository.commit(draft({f"n{i}": noise(900, i) for i in range(30)}))
    out = subprocess.run(
        [sys.executable, "-c", FEW, repository.url, other.url, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parent.parent,
    )
    assert out.returncode == 0, out.stderr + out.stdout
    ends = [line.split() for line in out.stdout.splitlines()]
    assert {what for what, end in ends if end == "done"} == {what for what, _ in ends}
    assert len({what for what, _ in ends}) == 7
    assert sum(end == "BackendError" for _, end in ends) >= 7
    assert problems(repository) == problems(other) == []
    assert len(list(repository.snapshots())) == 2


# -- a folder that vanishes


@pytest.mark.parametrize("what", [".", "objects", "tmp", "snapshots"])
def test_a_folder_that_vanishes_in_the_middle_of_a_commit(what: str, swift: Path) -> None:
    """At any call; moved away it takes its content along, and back again all is there."""
    k = failed = 0
    while True:
        repository = new_repository("local", swift, f"store{k}")
        repository.commit(draft(files(0)))
        before = everything(repository)
        gone, at = Path(repository.url) / what, swift / "gone"
        calls: list[Call] = []

        hook = partial(_vanish, calls, k, gone, at)
        faulty = with_backend(repository, FaultyBackend(repository.backend, hook=hook))
        try:
            faulty.commit(draft(files(1)))
        except CastoreError:
            failed += 1
        if at.exists():
            _move_back(at, gone)
        assert before.items() <= everything(repository).items()
        found = [p for p in problems(repository) if p.kind != "missing" or what == "."]
        assert found == []
        repository.commit(draft(files(1)))
        if len(calls) <= k:
            break
        k += 1
        shutil.rmtree(repository.url)
    assert k >= 5
    assert failed >= (3 if what == "." else 0)


def _vanish(calls: list[Call], k: int, gone: Path, to: Path, call: Call) -> None:
    calls.append(call)
    if len(calls) == k + 1:
        gone.rename(to)


def _move_back(at: Path, to: Path) -> None:
    """Where it was; into what was made there meanwhile."""
    for path in sorted(at.rglob("*")):
        new = to / path.relative_to(at)
        if path.is_file() and not new.exists():
            new.parent.mkdir(parents=True, exist_ok=True)
            path.rename(new)
    to.mkdir(exist_ok=True)
    shutil.rmtree(at)


# -- power


class _Cuts:
    """States a disk may be left in, and what was promised at that moment."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.promised: dict[str, Any] | None = None
        self.states: list[tuple[State, dict[str, Any]]] = []
        self._seen: set[int] = set()

    def __call__(self, disk: Disk) -> None:
        if self.promised is None:
            return  # the repository was not made yet
        for lost in (1.0, 0.5, 0.2):
            state = disk.state(self.rng, lost)
            key = hash(frozenset(state.items()))
            if key not in self._seen:
                self._seen.add(key)
                self.states.append((state, self.promised))


def power_cuts(root: Path, rng: random.Random) -> _Cuts:
    """Commit, forget, unforget and prune below ``root``, with the power gone at every call."""
    root.mkdir()
    cuts = _Cuts(rng)
    held: dict[str, Any] = {}
    with Disk(root, cuts).watching():
        repository = Repository.init(root)
        for i in range(3):
            cuts.promised = dict(held)
            held[repository.commit(draft(files(i))).name.id] = files(i)
        newest, middle, oldest = repository.snapshots()
        cuts.promised = {newest.id: held[newest.id]}
        repository.forget(oldest)
        repository.forget(middle)
        repository.unforget(middle)
        cuts.promised = {i: c for i, c in held.items() if i != oldest.id}
        prune(repository, grace=0)
        repository.commit(draft(files(0)))
    return cuts


def judge(at: Path, promised: dict[str, Any]) -> None:
    """What was promised reads whole, there is nothing else but whole, and work goes on."""
    repository = Repository.open(at)
    now = everything(repository)
    assert promised.items() <= now.items()
    assert all(c in [files(i) for i in range(3)] for c in now.values())
    assert problems(repository) == []
    again = repository.commit(draft(files(2))).name
    assert contents(repository, again) == files(2)


def test_a_power_cut_at_any_call_loses_nothing_that_was_promised(
    swift: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever calls since the last sync are lost, in any order; some of all states found.

    All of them, for many seeds: ``python -m benchmarks.faults --power-cuts N``.
    """
    monkeypatch.setattr("castore.write._BATCH_FRAMES", 2)
    rng = random.Random(11)
    cuts = power_cuts(swift / "store", rng)
    assert len(cuts.states) >= 100
    for n, (state, promised) in enumerate(rng.sample(cuts.states, 60)):
        judge(lay_state(state, swift / f"cut{n}"), promised)
        shutil.rmtree(swift / f"cut{n}")


def test_a_disk_that_syncs_too_little_is_found_out(
    swift: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge sees a loss: no folder is synced before a commit returns."""
    monkeypatch.setattr("castore.backends.local.sync_folder", lambda _: None)
    cuts = power_cuts(swift / "store", random.Random(11))
    late = [s for s in cuts.states if s[1]][-20:]
    assert any(_loses(swift / f"cut{n}", *s) for n, s in enumerate(late))


def _loses(at: Path, state: State, promised: dict[str, Any]) -> bool:
    try:
        judge(lay_state(state, at), promised)
    except (AssertionError, CastoreError):
        return True
    return False
