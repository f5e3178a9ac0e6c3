"""A seeded scheduler for actors that run castore's own code over one `World`.

Each actor is a greenlet, so its code is castore's code, called as in life; at every call of its
backend the scheduler decides who goes on. It may freeze an actor there, kill it, lose the answer
of a write (which acted, did not act, or acts later), and move the store's clock. The same seed
gives the same schedule. Needs the ``greenlet`` package.
"""

from __future__ import annotations

import builtins
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from greenlet import GreenletExit, getcurrent, greenlet

from castore.backend import ExpiredError, Stat, UnansweredError
from castore.digest import Buffer
from castore.errors import AlreadyExistsError, BackendError
from castore.testing.model import ModelBackend, World

_MOST_TURNS = 6_000
_JUMPS = (0, 0, 1, 15, 40)


@dataclass(slots=True, eq=False)
class Actor:
    """One process of the model: what it waits for, and how the scheduler treats it."""

    name: str
    run: greenlet
    priority: float
    freeze_at: int = -1
    frozen: bool = False
    steps: int = 0
    wake: float = 0.0
    until: Callable[[], bool] | None = None
    dead: bool = False


@dataclass(frozen=True, slots=True)
class Habits:
    """How rough one schedule's world is.

    ``lost``: share of writes whose answer is lost; ``kill``: chance at each call that the actor
    dies there; ``mode``: who goes on; ``ticks``: seconds between two calls; ``arrival``: chance
    at each call that a lost request arrives; ``jitter``: seconds a node's clock is off;
    ``torn_lists``: the second half of a listing is listed later.
    """

    lost: float
    kill: float
    mode: Literal["uniform", "priority", "freeze"]
    ticks: Sequence[int]
    arrival: float
    jitter: Sequence[int]
    torn_lists: bool

    @staticmethod
    def drawn(rng: random.Random, lost: float, kill: float, *, remote: bool) -> Habits:
        """Those of one schedule; ``remote``: answers get lost and clocks differ."""
        return Habits(
            lost if remote else 0.0,
            kill,
            rng.choice(["uniform", "priority", "priority", "freeze", "freeze"]),
            rng.choice([(0, 0, 0, 1), (0, 0, 1, 1, 2), (0, 0, 0, 0, 0, 0, 0, 1)]),
            rng.choice([0.1, 0.02, 0.004]),
            rng.choice([(0,), (-1, 0, 0, 1)]) if remote else (0,),
            rng.random() < 0.3,
        )


@dataclass(slots=True)
class Lock:
    """The repository's lock of a local folder: a queue that whoever wants in passes first."""

    queue: Actor | None = None
    exclusive: Actor | None = None
    shared: set[str] = field(default_factory=set)


class Scheduler:
    """Runs actors to their ends, one call at a time.

    Parameters
    ----------
    rng : random.Random
        All choices come from it.
    world : World
    habits : Habits
    """

    def __init__(self, rng: random.Random, world: World, habits: Habits):
        self.rng, self.world, self.habits = rng, world, habits
        self.lock = Lock()
        self.actors: list[Actor] = []
        self.late: list[Callable[[], object]] = []
        self.killed = self.lost = 0
        self.turns = 0
        self.errors: list[tuple[str, BaseException]] = []
        self.trace: list[str] | None = None
        self._changes = {rng.randrange(150) for _ in range(rng.randint(1, 5))}
        self._idle = 0
        self._hub = getcurrent()

    def add(self, name: str, work: Callable[[Actor], None]) -> Actor:
        """An actor that will do ``work``; what it raises stands in ``errors``."""

        def run() -> None:
            try:
                work(actor)
            except Exception as e:
                self.errors.append((name, e))

        actor = Actor(name, greenlet(run), self.rng.random())
        if self.habits.mode == "freeze" and self.rng.random() < 0.5:
            actor.freeze_at = self.rng.randrange(1, 40)
        self.actors.append(actor)
        return actor

    # -- the hub

    def run(self) -> str:
        """All actors to their ends; empty, or what kept one from its end."""
        self._hub = getcurrent()
        while self.actors or self.late:
            self.turns += 1
            if self.turns > _MOST_TURNS:
                return self._give_up("livelock")
            self.world.clock += self._tick()
            if self.late and (not self.actors or self.rng.random() < self.habits.arrival):
                self.late.pop(self.rng.randrange(len(self.late)))()
                continue
            actor = self._next()
            if actor is not None:
                actor.run.switch()
                if actor.run.dead:
                    self._remove(actor)
            elif self._idle > 400:
                return self._give_up("deadlock")
        return ""

    def _next(self) -> Actor | None:
        """Who goes on, or None where the time has to, or somebody was frozen, thawed or killed."""
        clock = self.world.clock
        ready = [
            a
            for a in self.actors
            if not a.frozen and a.wake <= clock and (a.until is None or a.until())
        ]
        if not ready:
            self._pass_time()
            return None
        self._idle = 0
        rng = self.rng
        actor = self._chosen(ready)
        actor.steps += 1
        if actor.steps == actor.freeze_at:
            actor.frozen = True
            return None
        if rng.random() < self.habits.kill:
            self.kill(actor)
            return None
        return actor

    def _chosen(self, ready: Sequence[Actor]) -> Actor:
        rng = self.rng
        if self.habits.mode != "priority":
            if rng.random() < 0.004:
                self._thaw()
            return ready[int(rng.random() * len(ready))]
        actor = max(ready, key=_priority)
        if self.turns in self._changes:
            actor.priority = -rng.random()
            self.world.clock += rng.choice(_JUMPS)
            actor = max(ready, key=_priority)
        return actor

    def _pass_time(self) -> None:
        """Thaw somebody, or go on to the moment the next one waits for."""
        self._idle += 1
        frozen = [a for a in self.actors if a.frozen]
        if frozen and (len(frozen) == len(self.actors) or self.rng.random() < 0.1):
            self._thaw()
            self.world.clock += self.rng.choice((0, 1, 15, 40))
            return
        wakes = [a.wake for a in self.actors if not a.frozen and a.wake > self.world.clock]
        self.world.clock = min(wakes, default=self.world.clock + 1)

    def _thaw(self) -> None:
        frozen = [a for a in self.actors if a.frozen]
        if frozen:
            self.rng.choice(frozen).frozen = False

    def kill(self, actor: Actor) -> None:
        """It does nothing more, not even on its way out; a lock it holds is free."""
        self.killed += 1
        actor.dead = True
        self.note(actor, "killed", "")
        actor.run.throw(GreenletExit)
        self._remove(actor)

    def _remove(self, actor: Actor) -> None:
        self.actors.remove(actor)

    def _give_up(self, why: str) -> str:
        left = [a.name for a in self.actors]
        for actor in list(self.actors):
            self.kill(actor)
        return f"{why}: {', '.join(left)}"

    # -- called by actors

    def turn(self, actor: Actor) -> None:
        """Let others act, if the scheduler wants."""
        if actor.dead:
            raise GreenletExit
        if not self._goes_on(actor):
            self._hub.switch()

    def _goes_on(self, actor: Actor) -> bool:
        """Whether the hub would choose the same actor again, which saves two switches."""
        self.turns += 1
        if self.late or self.turns in self._changes or actor.until or self.turns > _MOST_TURNS:
            return False
        alone = len(self.actors) == 1
        first = self.habits.mode == "priority" and actor is max(self.actors, key=_priority)
        if not (alone or first) or actor.wake > self.world.clock:
            return False
        actor.steps += 1
        if actor.steps == actor.freeze_at or self.rng.random() < self.habits.kill:
            return False
        self.world.clock += self._tick()
        return True

    def _tick(self) -> int:
        ticks = self.habits.ticks
        return ticks[int(self.rng.random() * len(ticks))]

    def jitter(self) -> int:
        """How far the clock of the node that answers is from the store's."""
        jitter = self.habits.jitter
        return jitter[int(self.rng.random() * len(jitter))] if len(jitter) > 1 else 0

    def wait(self, actor: Actor, until: Callable[[], bool]) -> None:
        actor.until = until
        self.turn(actor)
        actor.until = None

    def sleep(self, actor: Actor, seconds: float) -> None:
        actor.wake = self.world.clock + seconds
        self.turn(actor)

    def loses(self) -> str:
        """How the answer to a write is lost: ``acted``, ``not acted``, ``later``, or not."""
        if self.habits.lost and self.rng.random() < self.habits.lost:
            self.lost += 1
            return self.rng.choice(["acted", "not acted", "later"])
        return ""

    def note(self, actor: Actor, what: str, name: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.world.clock:.0f} {actor.name} {what} {name}")


def _priority(actor: Actor) -> float:
    return actor.priority


class ScheduledBackend(ModelBackend):
    """One actor's backend: each call is the scheduler's turn first."""

    parallel = 1

    def __init__(self, scheduler: Scheduler, actor: Actor, kind: str):
        super().__init__(scheduler.world)
        self.scheduler, self.actor, self.kind = scheduler, actor, kind
        self.before = self._before

    def _before(self, method: str, name: str) -> None:
        self.scheduler.turn(self.actor)
        if self.scheduler.trace is not None:
            self.scheduler.note(self.actor, method, name)

    # -- reading

    def now(self) -> float:
        return super().now() + self.scheduler.jitter()

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> Iterator[Stat]:
        found = super().list(prefix, after, limit)
        if limit is None and self.scheduler.habits.torn_lists:
            return self._torn(prefix, builtins.list(found))
        return found

    def _torn(self, prefix: str, found: Sequence[Stat]) -> Iterator[Stat]:
        """The second page is listed later than the first, as in life."""
        half = len(found) // 2
        yield from found[:half]
        after = found[half - 1].name if half else None
        yield from super().list(prefix, after)

    # -- writing

    def _write(self, method: str, name: str, act: Callable[[], Any]) -> Any:
        self._before(method, name)
        fate = self.scheduler.loses()
        if not fate:
            return act()
        self.scheduler.note(self.actor, fate, name)
        if fate == "acted":
            with contextlib.suppress(BackendError, AlreadyExistsError):
                act()
        elif fate == "later":
            self.scheduler.late.append(lambda: self._arrive(method, name, act))
        raise UnansweredError(f"{name}: no answer")

    def _arrive(self, method: str, name: str, act: Callable[[], Any]) -> None:
        """A request reaches the store long after its sender gave it up."""
        self.scheduler.note(self.actor, f"late {method}", name)
        with contextlib.suppress(BackendError, AlreadyExistsError):
            act()

    def create(self, name: str, data: Buffer) -> str:
        def act() -> str:
            if name in self.world.names:
                raise AlreadyExistsError(name)
            return self.world.put(name, data)

        version: str = self._write("create", name, act)
        return version

    def create_many(self, items: Sequence[tuple[str, Buffer]]) -> builtins.list[str | None]:
        return [self._create_surely(name, data) for name, data in items]

    def _create_surely(self, name: str, data: Buffer) -> str | None:
        """Content-addressed: sent again until an answer comes, as the real ones do."""
        while True:
            try:
                return self.create(name, data)
            except AlreadyExistsError:
                return None
            except UnansweredError:
                continue

    def replace(self, name: str, data: Buffer, if_version: str) -> str:
        def act() -> str:
            current = self.world.names[name][2] if name in self.world.names else ""
            if current != if_version:
                raise AlreadyExistsError(name)
            return self.world.put(name, data)

        version: str = self._write("replace", name, act)
        return version

    def delete(self, name: str, expires: float | None = None) -> None:
        self._write("delete", name, lambda: self.delete_now(name, expires))

    def delete_now(self, name: str, expires: float | None) -> None:
        """What the store does with a delete when it arrives."""
        if expires is not None and self.world.clock + self.scheduler.jitter() > expires:
            raise ExpiredError(name)
        self.world.names.pop(name, None)

    # -- the lock

    def lock(self, *, exclusive: bool, timeout: float) -> AbstractContextManager[None]:
        return self._locked(exclusive) if self.kind == "local" else contextlib.nullcontext()

    @contextlib.contextmanager
    def _locked(self, exclusive: bool) -> Iterator[None]:
        lock, me = self.scheduler.lock, self.actor
        try:
            self.scheduler.wait(me, lambda: lock.queue is None)
            lock.queue = me
            self.scheduler.wait(
                me, lambda: lock.exclusive is None and not (exclusive and lock.shared)
            )
            if exclusive:
                lock.exclusive = me
            else:
                lock.queue = None
                lock.shared.add(me.name)
            yield
        finally:
            lock.shared.discard(me.name)
            lock.queue = None if lock.queue is me else lock.queue
            lock.exclusive = None if lock.exclusive is me else lock.exclusive
