"""A repository beside a plain dict, through whatever sequence of commands hypothesis thinks of."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as some
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from castore.commit import Options
from castore.copy import copy
from castore.errors import CorruptObjectError, ObjectNotFoundError, SnapshotNotFoundError
from castore.objects import object_name
from castore.prune import GRACE, PAUSE, prune
from castore.publish import MARGIN, OVERDUE
from castore.repair import repair
from castore.repository import Repository
from castore.snapshot import SnapshotName
from castore.source import MemoryFile
from castore.tree import Folder, Link
from tests.faults import Clock, Crash, Crashing
from tests.helpers import (
    blobs,
    contents,
    draft,
    drift,
    empty_memory,
    flip,
    folder,
    memory_url,
    noise,
    overwrite,
    problems,
    usage_adds_up,
    weights,
    with_backend,
)


def _series(n: int) -> list[bytes]:
    array, found = weights(400, seed=5), []
    for i in range(n):
        found.append(array.tobytes())
        array = drift(array, i)
    return found


POOL: dict[str, Any] = {
    **{f"series {i}": data for i, data in enumerate(_series(6))},
    **{f"noise {i}": noise(100 + i, i) for i in range(3)},
    "empty": b"",
    "x": b"x",
    "zeros": bytes(3000),
    "script": MemoryFile(b"#!x", executable=True),
    "folder": Folder(),
    "link": Link("../up"),
}
CONTENT = some.sampled_from(sorted(POOL))
PATHS = some.sampled_from(["m", "m_1", "m_2", "d/m_1", "d/m_2", "d/e/f", "ü"])
FILES = some.dictionaries(PATHS, CONTENT, max_size=4)  # by their names in the pool
SPACES = some.sampled_from(["a", "b"])
CHAINS = some.sampled_from([0, 1, 2, 8])


class Machine(RuleBasedStateMachine):
    kind = "memory"
    snapshots = Bundle("snapshots")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="castore-stateful-"))
        self.listed: dict[SnapshotName, dict[str, Any]] = {}
        self.forgotten: dict[SnapshotName, tuple[float, dict[str, Any]]] = {}
        self.copied: dict[str, dict[str, Any]] = {}

    def _make(self, name: str) -> Repository:
        url = memory_url() if self.kind == "memory" else str(self.folder / name)
        made = Repository.init(url)
        return with_backend(made, Clock(made.backend, 0.0))

    @initialize()
    def init(self) -> None:
        self.repository = self._make("store")
        self.mirror = self._make("mirror")
        self._reopen(self.repository.backend)

    def _reopen(self, clock: Any) -> None:
        self.clock = clock
        opened = Repository.open(self.repository.url)
        assert opened.id == self.repository.id
        self.repository = with_backend(opened, clock, sleep=clock.sleep)

    # -- writing

    @rule(target=snapshots, files=FILES, space=SPACES, chain=CHAINS)
    def commit(self, files: dict[str, str], space: str, chain: int) -> SnapshotName:
        made = {p: POOL[c] for p, c in files.items()}
        options = Options(max_chain=chain)
        found = self.repository.commit(draft(made), namespace=space, options=options)
        assert found.name == self.repository.resolve(f"{space}@latest")
        assert found.name not in self.listed
        self.listed[found.name] = made
        return found.name

    @rule(target=snapshots, name=snapshots, space=SPACES)
    def commit_again(self, name: SnapshotName, space: str) -> Any:
        if name not in self.listed:
            return multiple()
        files = self.listed[name]
        found = self.repository.commit(draft(files), namespace=space)
        assert found.added == 0
        self.listed[found.name] = files
        return found.name

    @rule(
        files=FILES,
        at=some.sampled_from(["objects/", "pending/", "snapshots/"]),
        moment=some.sampled_from(["before", "half", "after"]),
    )
    def commit_and_crash(self, files: dict[str, str], at: str, moment: str) -> None:
        made = {p: POOL[c] for p, c in files.items()}
        crashing = Crashing(self.clock, 0, moment, at)
        try:
            with_backend(self.repository, crashing).commit(draft(made), namespace="a")
        except Crash:
            pass
        for name in self.repository.snapshots("a"):
            if name not in self.listed:
                assert contents(self.repository, name) == made
                self.listed[name] = made
        self._reopen(self.clock)

    @rule(name=snapshots)
    def forget(self, name: SnapshotName) -> None:
        if name not in self.listed:
            with pytest.raises(SnapshotNotFoundError):
                self.repository.forget(name)
            return
        self.repository.forget(name)
        self.forgotten[name] = self.clock.now(), self.listed.pop(name)

    @rule(target=snapshots, name=consumes(snapshots))
    def unforget(self, name: SnapshotName) -> Any:
        if name not in self.forgotten:
            with pytest.raises(SnapshotNotFoundError):
                self.repository.unforget(name)
            return name
        fresh = self.repository.unforget(name)
        self.listed[fresh] = self.forgotten.pop(name)[1]
        return fresh

    @rule(days=some.floats(0, 9))
    def time_passes(self, days: float) -> None:
        self.clock.sleep(days * 86_400)

    @rule(grace=some.sampled_from([0.0, 86_400.0, GRACE]), dry=some.booleans())
    def prune(self, grace: float, dry: bool) -> None:
        self.clock.sleep(PAUSE * OVERDUE + MARGIN)
        now = self.clock.now()
        expired = {n for n, (at, _) in self.forgotten.items() if at + grace < now}
        promised = prune(self.repository, grace=grace, dry_run=True)
        assert set(promised.expired) == expired
        if dry:
            return
        done = prune(self.repository, grace=grace)
        assert done.victims == promised.victims
        assert set(done.expired) == expired
        assert not done.failed
        for name in expired:
            del self.forgotten[name]
        if grace == 0:
            assert prune(self.repository, grace=0, dry_run=True).objects == 0

    # -- reading

    @rule(name=snapshots)
    def read(self, name: SnapshotName) -> None:
        if name in self.listed:
            assert contents(self.repository, name) == self.listed[name]
        else:
            with pytest.raises(SnapshotNotFoundError):
                self.repository.tree(name)

    @precondition(lambda self: self.listed)
    @rule(data=some.data())
    def check_out(self, data: some.DataObject) -> None:
        name = data.draw(some.sampled_from(sorted(self.listed)))
        out = self.folder / "out"
        self.repository.checkout(name, out, sha256=True)
        assert folder(out) == self.listed[name]
        shutil.rmtree(out)

    @rule()
    def copy(self) -> None:
        copy(self.repository, self.mirror)
        self.copied |= {n.id: files for n, files in self.listed.items()}
        found = {n.id: contents(self.mirror, n) for n in self.mirror.snapshots()}
        assert found == self.copied
        assert problems(self.mirror) == []

    @rule()
    def reopen(self) -> None:
        self._reopen(self.clock)

    @rule()
    def usage(self) -> None:
        usage_adds_up(self.repository)

    # -- damage

    @precondition(lambda self: any(blobs_of(self, n) for n in self.listed))
    @rule(
        data=some.data(),
        how=some.sampled_from(["flip", "cut", "delete"]),
        at=some.integers(0, 2000),
    )
    def damage_and_heal(self, data: some.DataObject, how: str, at: int) -> None:
        name = data.draw(some.sampled_from(sorted(n for n in self.listed if blobs_of(self, n))))
        path = data.draw(some.sampled_from(sorted(blobs_of(self, name))))
        digest = data.draw(some.sampled_from(blobs_of(self, name)[path]))
        stored = object_name(digest)
        good = self.repository.backend.get(stored)
        if how == "delete":
            self.repository.backend.delete(stored)
        else:
            bad = good[: at % len(good)] if how == "cut" else flip(good, at % len(good))
            overwrite(self.repository, stored, bad)
        self._reopen(self.clock)
        found = problems(self.repository)
        assert [p.object for p in found] == [digest]
        assert found[0].kind == ("missing" if how == "delete" else "corrupt")
        assert (str(name), path) in found[0].needed_by
        for other, files in self.listed.items():
            hit = {p for n, p in found[0].needed_by if n == str(other)}
            for p in files:
                if p in hit:
                    with pytest.raises((CorruptObjectError, ObjectNotFoundError), match=digest):
                        self.repository.read(other, p)
                elif p in blobs_of(self, other):
                    assert self.repository.read(other, p) == bytes_of(files[p])
        if data.draw(some.booleans()):
            self._heal_by_commit(name)
        elif repair(self.repository, self.mirror) != [digest]:
            overwrite(self.repository, stored, good) if how != "delete" else (
                self.repository.backend.create(stored, good)
            )
        assert problems(self.repository) == []

    def _heal_by_commit(self, name: SnapshotName) -> None:
        files = self.listed[name]
        options = Options(verify_hits=True)
        found = self.repository.commit(draft(files), namespace="a", options=options)
        assert contents(self.repository, found.name) == files
        self.listed[found.name] = files

    # -- always

    @invariant()
    def the_list_is_right(self) -> None:
        if hasattr(self, "repository"):
            assert set(self.repository.snapshots()) == set(self.listed)
            assert set(self.repository.forgotten()) == set(self.forgotten)

    def teardown(self) -> None:
        if hasattr(self, "repository"):
            assert problems(self.repository) == []
            for name, files in self.listed.items():
                assert contents(self.repository, name) == files
        shutil.rmtree(self.folder)
        empty_memory()


def blobs_of(machine: Machine, name: SnapshotName) -> dict[str, list[str]]:
    """The digests each file of a snapshot needs, files without any left out."""
    tree = machine.repository.tree(name)
    found = {p: blobs(machine.repository, name, p) for p, _ in tree.files()}
    return {p: b for p, b in found.items() if b}


def bytes_of(entry: Any) -> bytes:
    return entry.data if isinstance(entry, MemoryFile) else entry


class LocalMachine(Machine):
    kind = "local"


_quick = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
TestMemory = Machine.TestCase
TestMemory.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=_quick
)
TestLocal = LocalMachine.TestCase
TestLocal.settings = settings(
    max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=_quick
)
