"""Random operations on an S3 repository through a faulty network, each judged by a plain record.

The rules are the same for a few seconds in the tests and for hours (``benchmarks/faults.py``): an
operation ends well, or with one error of castore's; what was promised is there byte for byte;
nothing is there twice; the same command, repeated on a good network, goes through.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from castore.copy import copy
from castore.errors import CastoreError
from castore.prune import prune
from castore.publish import Patience
from castore.repository import Repository
from castore.snapshot import SnapshotName
from castore.testing import proxy
from castore.testing.proxy import FaultProxy, Kind, Plan, calm
from tests.helpers import draft, drift, folder, noise, problems, safetensors, weights

KINDS: list[Kind] = [k for k in proxy.KINDS if k not in ("forbid", "hang")] * 6
KINDS += ["forbid", "hang"]
"""A refusal ends most operations, and a client waits long where nothing comes: fewer of these."""

QUICK = Patience(poll=0.02, margin=1.0, overdue=0.4)
SWEEP = 3.0


class Storm:
    """One repository in the storm, and what it must hold.

    Parameters
    ----------
    url : str
        An empty place on the server.
    direct : dict
        Storage options that lead to the server itself.
    tmp_path : Path
        For local repositories and checkouts.

    Notes
    -----
    ``operations`` counts what was run, ``errors`` what of it ended with an error, by name; ``told``
    keeps their words; ``verified`` is the number of bytes compared with what was promised.
    """

    def __init__(
        self,
        url: str,
        direct: dict[str, Any],
        proxy: FaultProxy,
        weather: Plan,
        tmp_path: Path,
        seed: int,
    ):
        self.rng, self.tmp_path = random.Random(seed), tmp_path
        self.proxy, self.weather = proxy, weather
        made = Repository.init(url, storage_options=direct)
        self.clear = Repository(made.backend, made.id, QUICK)
        soon = {"read_timeout": 1}  # where no answer comes
        through = {**direct, "endpoint_url": proxy.url, "config_kwargs": soon}
        seen = Repository.open(url, storage_options=through)
        self.windy = Repository(seen.backend, seen.id, QUICK)
        self.mirror = Repository.init(tmp_path / "mirror")
        self.other = Repository.init(tmp_path / "other")
        self.array = weights(20_000, seed)
        self.held: dict[str, dict[str, Any]] = {}
        self.hidden: dict[str, dict[str, Any]] = {}
        self.operations: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.told: list[str] = []
        self.verified = 0

    # -- the frame of every operation

    def run(self, name: str) -> None:
        """Run one operation and judge it."""
        getattr(self, name)()
        self.operations[name] += 1

    def step(self) -> None:
        """Run one operation at random and judge it."""
        names = ["commit"] * 5 + ["copy_up", "copy_up", "copy_down", "check"]
        names += ["forget", "forget", "prune", "checkout"] if self.held else []
        self.run(self.rng.choice(names + ["unforget"] * 2 * bool(self.hidden)))

    def tried(self, name: str, act: Callable[[Repository], Any]) -> Any:
        """What ``act`` gives in the storm, or the error it ended with."""
        self.proxy.plan = self.weather
        try:
            return act(self.windy)
        except CastoreError as e:
            self.errors[name] += 1
            self.told.append(f"{name}: {type(e).__name__}: {e}")
            return e
        finally:
            self.proxy.plan = calm
            self.proxy.settle()

    def listed(self) -> dict[str, SnapshotName]:
        """Snapshots by id; none may be there twice."""
        names = list(self.clear.snapshots())
        found = {n.id: n for n in names}
        assert len(found) == len(names), f"twice: {sorted(map(str, names))}"
        return found

    def forgotten(self) -> set[str]:
        return {n.id for n in self.clear.forgotten()}

    def same(self, repository: Repository, name: SnapshotName, expected: dict[str, Any]) -> None:
        target = self.tmp_path / f"same{self.verified}"
        repository.checkout(name, target)
        assert folder(target) == expected
        shutil.rmtree(target)
        self.verified += sum(map(len, expected.values()))

    # -- operations

    def commit(self) -> None:
        files, before = self.files(), set(self.listed())
        result = self.tried("commit", lambda r: r.commit(draft(files)))
        self.arrived(result, files, before, lambda: self.windy.commit(draft(files)).name)

    def files(self) -> dict[str, Any]:
        """A weight file one step on, and some small ones of which half is new."""
        self.array = drift(self.array, self.rng.randrange(1 << 30))
        made: dict[str, Any] = {f"n{i}": noise(300, self.rng.randrange(40)) for i in range(15)}
        made |= {f"u{i}": self.rng.randbytes(300) for i in range(20)}
        return {**made, "m.safetensors": safetensors({"w": self.array, "v": self.array[::-1]})}

    def arrived(
        self,
        result: Any,
        files: dict[str, Any],
        before: set[str],
        again: Callable[[], SnapshotName],
    ) -> None:
        """At most one new snapshot, whole; one at the latest after ``again``."""
        now = self.listed()
        new = set(now) - before
        assert len(new) <= 1
        if isinstance(result, CastoreError):
            if not new:
                new = {again().id}
        else:
            assert len(new) == 1, "promised, and not there"
        for id in new:
            self.held[id] = files
            self.same(self.clear, self.listed()[id], files)

    def forget(self) -> None:
        id = self.rng.choice(sorted(self.held))
        name = self.listed()[id]
        result = self.tried("forget", lambda r: r.forget(name))
        if isinstance(result, CastoreError):
            assert id in {*self.listed(), *self.forgotten()}
            if id in self.listed():
                self.windy.forget(name)
        assert id not in self.listed()
        assert id in self.forgotten()
        self.hidden[id] = self.held.pop(id)

    def unforget(self) -> None:
        id = self.rng.choice(sorted(self.hidden))
        name = next(n for n in self.clear.forgotten() if n.id == id)
        result = self.tried("unforget", lambda r: r.unforget(name))
        if isinstance(result, CastoreError) and id in self.forgotten():
            self.windy.unforget(name)
        assert id not in self.forgotten()
        self.held[id] = self.hidden.pop(id)
        self.same(self.clear, self.listed()[id], self.held[id])

    def prune(self) -> None:
        self.hidden.clear()  # their grace is over
        result = self.tried("prune", lambda r: prune(r, grace=0, sweep=SWEEP))
        assert set(self.listed()) == set(self.held)
        if isinstance(result, CastoreError) or result.failed:
            assert not prune(self.clear, grace=0).failed
        self.clean()

    def copy_down(self) -> None:
        result = self.tried("copy_down", lambda r: copy(r, self.mirror))
        if isinstance(result, CastoreError):
            assert problems(self.mirror) == []
            copy(self.windy, self.mirror)
        there = list(self.mirror.snapshots())
        assert len({n.id for n in there}) == len(there), "twice"
        assert set(self.held) <= {n.id for n in there}
        for name in there:
            if name.id in self.held:
                self.same(self.mirror, name, self.held[name.id])

    def copy_up(self) -> None:
        files, before = self.files(), set(self.listed())
        for old in list(self.other.snapshots()):
            self.other.forget(old)
        self.other.commit(draft(files), namespace="other")
        result = self.tried("copy_up", lambda r: copy(self.other, r))
        self.arrived(result, files, before, lambda: copy(self.other, self.windy).names[0])

    def check(self) -> None:
        found = self.tried("check", problems)
        if not isinstance(found, CastoreError):
            assert {p.kind for p in found} <= {"unreadable"}, found
        self.clean()

    def checkout(self) -> None:
        id = self.rng.choice(sorted(self.held))
        name, target = self.listed()[id], self.tmp_path / f"out{self.operations['checkout']}"
        result = self.tried("checkout", lambda r: r.checkout(name, target))
        if isinstance(result, CastoreError):
            assert not target.exists()
            self.windy.checkout(name, target)
        assert folder(target) == self.held[id]
        shutil.rmtree(target)
        self.verified += sum(map(len, self.held[id].values()))

    # -- the whole

    def clean(self) -> None:
        assert problems(self.clear) == []

    def end(self) -> None:
        """Everything promised is there, byte for byte, and nothing else."""
        self.clean()
        listed = self.listed()
        assert set(listed) == set(self.held)
        for id, name in listed.items():
            self.same(self.clear, name, self.held[id])
        prune(self.windy, grace=0)
        needed = {d for n in listed.values() for d in self.clear.tree(n).blobs()}
        needed |= {self.clear.snapshot(n).tree for n in listed.values()}
        assert needed <= {s.name.rpartition("/")[2] for s in self.clear.store.list()}
        self.clean()
