"""Random schedules of commits, forgets, unforgets, copies and prunes, and what must hold after.

    with one_thread():
        outcome = run(seed, "s3")
    assert not outcome.wrong

Actors run castore's own functions (`castore.testing.schedules`). ``s3`` has pending commits,
sweeps, lost answers and clocks that differ from node to node; ``local`` has the lock. Grace is
mostly zero, blobs are deltas of one another, and writers share them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from itertools import chain, combinations
from typing import Literal

from castore.copy import copy
from castore.digest import digest_of
from castore.encode import Base, encode
from castore.errors import ObjectNotFoundError, SnapshotNotFoundError
from castore.frame import HEADER_SIZE, MAX_DEPTH, parse_header
from castore.objects import object_name
from castore.prune import prune
from castore.publish import Patience
from castore.repository import Repository
from castore.snapshot import Snapshot, name_of
from castore.source import Draft, MemoryFile
from castore.testing.model import ModelBackend, World
from castore.testing.schedules import Actor, Habits, ScheduledBackend, Scheduler
from castore.tree import File, Slice, Tree

Kind = Literal["s3", "local"]

LENGTH = 12.0  # seconds of a sweep
OVERDUE, MARGIN, POLL = 5.0, 3.0, 2.0
CONTENTS = 5
_BLOB = 1024  # bytes


@cache
def contents() -> tuple[bytes, ...]:
    """Blobs that nothing packs, each a small difference to every other."""
    common = random.Random(0).randbytes(_BLOB)
    return tuple(bytes([i + 1]) + common[1:] for i in range(CONTENTS))


@cache
def digests() -> tuple[str, ...]:
    return tuple(digest_of(c) for c in contents())


@cache
def file_of(i: int) -> File:
    content = contents()[i]
    return File(_BLOB, sha256(content).hexdigest(), False, (Slice(digests()[i], 0, _BLOB),))


@cache
def tree_of(numbers: tuple[int, ...]) -> tuple[str, bytes]:
    """Digest and content of the tree of some blobs, each a file of its own."""
    content = Tree({f"f{i}": file_of(i) for i in numbers}).encode()
    return digest_of(content), content


@cache
def frame_of(content: bytes, base: bytes | None = None, depth: int = 0) -> bytes:
    """A stored object, as a delta to ``base`` where one is given."""
    hint = None if base is None else Base(digest_of(base), depth, 1, base, True)
    return b"".join(encode(content, 1, hint, "auto"))


@cache
def needs() -> dict[str, frozenset[str]]:
    """What each tree of this world needs, itself included."""
    found = {}
    for count in range(1, 4):
        for numbers in combinations(range(CONTENTS), count):
            digest = tree_of(numbers)[0]
            found[digest] = frozenset((digest, *(digests()[i] for i in numbers)))
    return found


@cache
def source_of(numbers: tuple[int, ...]) -> Repository:
    """Another repository that holds one snapshot of some blobs, each a delta to the one before."""
    world = World()
    for k, i in enumerate(numbers):
        base = contents()[numbers[k - 1]] if k else None
        world.put(object_name(digests()[i]), frame_of(contents()[i], base, max(0, k - 1)))
    tree, content = tree_of(numbers)
    world.put(object_name(tree), frame_of(content))
    data = Snapshot(tree, 1_000_000, "main").encode()
    world.put(name_of(data, "main", "snapshot", 1_000_000).path, data)
    return Repository(ModelBackend(world), "1" * 32)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a schedule draws its cast and its world from, each of a tuple equally likely."""

    writers: tuple[int, ...] = (1, 1, 2, 2, 3)
    users: tuple[int, ...] = (0, 1)
    copies: tuple[int, ...] = (0, 0, 0, 0, 0, 0, 1)
    prunes: tuple[int, ...] = (1, 1, 2)
    grace: tuple[float, ...] = (0.0, 0.0, 0.0, 3.0, 12.0, 1e6)
    lost: tuple[float, ...] = (0.0, 0.0, 0.08, 0.25)
    kill: tuple[float, ...] = (0.0, 0.0, 0.01, 0.03)
    pool: tuple[int, ...] = (2, 3, 4, 5)


CROWD = Setting()
"""Up to seven actors."""

FEW = Setting((1, 1, 1, 2), (0, 0, 1), (0,) * 15 + (1,), (1, 1, 1, 2), pool=(2, 3))
"""Two or three actors as a rule: many more schedules in the same time."""


# -- what happened


@dataclass(slots=True)
class Outcome:
    """One schedule: what was ``wrong`` (nothing, if castore is right), and what was done."""

    seed: int
    wrong: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Story:
    """``told``: names of commits answered as done; ``forgets``: of forgets begun, and when."""

    told: set[str] = field(default_factory=set)
    forgets: dict[str, float] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Play:
    """One world with its actors.

    Parameters
    ----------
    seed : int
    kind : ``s3`` or ``local``
    setting : Setting
    """

    def __init__(self, seed: int, kind: Kind, setting: Setting):
        self.kind, self.rng = kind, random.Random(seed)
        self.world, self.story = World(), Story()
        self.grace, self.pool = self.rng.choice(setting.grace), self.rng.choice(setting.pool)
        lost, kill = self.rng.choice(setting.lost), self.rng.choice(setting.kill)
        habits = Habits.drawn(self.rng, lost, kill, remote=kind == "s3")
        self.scheduler = Scheduler(self.rng, self.world, habits)
        self._furnish()
        cast = {"writer": setting.writers, "user": setting.users, "copy": setting.copies}
        for name, counts in {**cast, "prune": setting.prunes}.items():
            for i in range(self.rng.choice(counts)):
                self.scheduler.add(f"{name}{i}", self._work(name))

    # -- before

    def _furnish(self) -> None:
        """Some blobs, raw or deltas, old or young; some snapshots, listed or forgotten."""
        rng, there, start = self.rng, dict[int, int](), self.world.clock
        for i in range(self.pool):
            if rng.random() < 0.6:
                near = rng.choice(list(there)) if there and rng.random() < 0.5 else None
                base = None if near is None else contents()[near]
                depth = there[i] = 0 if near is None else there[near] + 1
                self._put(digests()[i], frame_of(contents()[i], base, max(0, depth - 1)))
        for k in range(rng.choice([0, 1, 1, 2]) if there else 0):
            numbers = tuple(sorted(rng.sample(sorted(there), min(len(there), rng.choice([1, 2])))))
            tree, content = tree_of(numbers)
            self._put(tree, frame_of(content))
            data = Snapshot(tree, int(start - 100 + k) * 1_000_000, "main").encode()
            name = name_of(data, "main", "snapshot", int(start - 100 + k) * 1_000_000)
            if rng.random() < 0.7:
                self.world.put(name.path, data)
                self.story.told.add(name.path)
            else:
                self.world.put(name.forgotten, data)
                self.story.forgets[name.path] = start
        self.world.clock = start

    def _put(self, digest: str, data: bytes) -> None:
        start, self.world.clock = (
            self.world.clock,
            self.world.clock - self.rng.choice([0, 2, 8, 30]),
        )
        if object_name(digest) not in self.world.names:
            self.world.put(object_name(digest), data)
        self.world.clock = start

    # -- the cast

    def _work(self, name: str) -> Callable[[Actor], None]:
        works = {"writer": self._writer, "user": self._user, "copy": self._copier}
        return works.get(name, self._pruner)

    def _repository(self, actor: Actor) -> Repository:
        backend = ScheduledBackend(self.scheduler, actor, self.kind)
        patience = Patience(
            lambda seconds: self.scheduler.sleep(actor, seconds),
            MARGIN,
            OVERDUE,
            POLL,
            clock=lambda: self.world.clock,
        )
        return Repository(backend, "0" * 32, patience)

    def _numbers(self) -> tuple[int, ...]:
        count = self.rng.randint(1, min(3, self.pool))
        return tuple(sorted(self.rng.sample(range(self.pool), count)))

    def _tell(self, path: str, what: str) -> None:
        self.story.told.add(path)
        self.story.done[what] += 1

    def _writer(self, actor: Actor) -> None:
        numbers = self._numbers()
        others = [self.rng.choice([j for j in range(self.pool) if j != i]) for i in numbers]
        base = {
            f"f{i}": file_of(j)
            for i, j in zip(numbers, others, strict=True)
            if self.rng.random() < 0.6
        }
        files = {f"f{i}": MemoryFile(contents()[i]) for i in numbers}
        done = self._repository(actor).commit(Draft(files, base=base))
        self._tell(done.name.path, "commits")

    def _user(self, actor: Actor) -> None:
        repository = self._repository(actor)
        for _ in range(self.rng.choice([1, 2, 3])):
            if self.rng.random() < 0.6:
                self._forget(repository)
            else:
                self._unforget(repository)

    def _forget(self, repository: Repository) -> None:
        names = list(repository.snapshots("main"))
        if names:
            name = self.rng.choice(names)
            self.story.forgets.setdefault(name.path, self.world.clock)
            try:
                repository.forget(name)
                self.story.done["forgets"] += 1
            except SnapshotNotFoundError:
                self.story.done["forgets refused"] += 1

    def _unforget(self, repository: Repository) -> None:
        names = list(repository.forgotten())
        if not names:
            return
        name = self.rng.choice(names)
        try:
            fresh = repository.unforget(name)
        except (SnapshotNotFoundError, ObjectNotFoundError):
            self.story.done["unforgets refused"] += 1
            return
        self._tell(fresh.path, "unforgets")

    def _copier(self, actor: Actor) -> None:
        numbers = self._numbers()
        for name in copy(source_of(numbers), self._repository(actor)).names:
            self._tell(name.path, "copies")

    def _pruner(self, actor: Actor) -> None:
        for _ in range(self.rng.choice([1, 1, 2])):
            report = prune(self._repository(actor), grace=self.grace, sweep=LENGTH)
            self.story.done["prunes"] += 1
            self.story.done["deleted"] += report.objects

    # -- after

    def judge(self) -> list[str]:
        """What a user lost, or was told that should not have been said."""
        wrong = list(self.story.wrong)
        for actor, error in self.scheduler.errors:
            wrong.append(f"{actor}: {type(error).__name__}: {error}")
        listed = {
            n: d for n, (d, _, _) in self.world.names.items() if n.startswith("snapshots/") and d
        }
        for path, data in listed.items():
            lacking = [d[:8] for d in needs()[json.loads(data)["tree"]] if not self.readable(d)]
            if lacking:
                wrong.append(f"listed {path} is unreadable: {', '.join(lacking)}")
        wrong += self._unreadable_within_grace()
        for path in self.story.told:
            if path not in listed and path not in self.story.forgets:
                wrong.append(f"{path} was answered as committed and is not listed")
            elif path not in listed and not self._within_grace(path, listed):
                wrong.append(f"{path} was forgotten and is gone within its grace")
        return wrong

    def _unreadable_within_grace(self) -> list[str]:
        wrong = []
        for name, (data, _, _) in self.world.names.items():
            begun = self.story.forgets.get(name.replace("forgotten/", "snapshots/", 1))
            if name.startswith("forgotten/") and begun is not None:
                young = self.world.clock - begun < self.grace - 2
                if young and not all(map(self.readable, needs()[json.loads(data)["tree"]])):
                    wrong.append(f"{name} is unreadable within its grace")
        return wrong

    def readable(self, digest: str) -> bool:
        """Whether an object and all its bases are there, each base less deep than its delta."""
        depth = MAX_DEPTH + 1
        while True:
            found = self.world.names.get(object_name(digest))
            if found is None:
                return False
            header = parse_header(found[0][:HEADER_SIZE], digest)
            if header.depth >= depth:
                return False
            if not header.base:
                return True
            digest, depth = header.base, header.depth

    def _within_grace(self, path: str, listed: Iterable[str]) -> bool:
        if self.world.clock - self.story.forgets[path] >= self.grace - 2:
            return True
        id = path[-21:]
        kept = [n for n in self.world.names if n.startswith("forgotten/")]
        return any(n.endswith(id) for n in chain(listed, kept))


def run(seed: int, kind: Kind, setting: Setting = CROWD, *, trace: bool = False) -> Outcome:
    """The schedule of ``seed``, to its end; within `castore.testing.inline.one_thread`."""
    play = Play(seed, kind, setting)
    play.scheduler.trace = [] if trace else None
    stuck = play.scheduler.run()
    outcome = Outcome(seed, [stuck] if stuck else play.judge(), play.story.done)
    outcome.done["killed"] = play.scheduler.killed
    outcome.done["turns"] = play.scheduler.turns
    outcome.done["answers lost"] = play.scheduler.lost
    outcome.trace = play.scheduler.trace or []
    return outcome


def run_many(
    seeds: Iterable[int], kind: Kind, setting: Setting = CROWD, *, stop: int = 1
) -> tuple[list[Outcome], Counter[str]]:
    """Schedules that went wrong, at most ``stop``, and what was done in all that were run."""
    wrong: list[Outcome] = []
    done: Counter[str] = Counter()
    for seed in seeds:
        outcome = run(seed, kind, setting)
        done.update(outcome.done)
        done["schedules"] += 1
        if outcome.wrong:
            wrong.append(outcome)
            if len(wrong) == stop:
                break
    return wrong, done
