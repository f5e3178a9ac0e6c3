"""Backends that misbehave on purpose, wrapped around real ones; and a clock that tests own.

`castore.testing.FaultyBackend` is what driver authors get. These are smaller and meaner: they
stop a whole program between any two of its writes, which only the store's own tests need.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from castore.backend import Stat
from castore.errors import BackendError
from castore.frame import HEADER_SIZE


class Wrapped:
    """Everything as the wrapped backend does it."""

    def __init__(self, inner: Any):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Clock(Wrapped):
    """A store whose clock is ``ahead`` seconds ahead; ``sleep`` moves it on instead of waiting.

    What is written gets its time by this clock.
    """

    def __init__(self, inner: Any, ahead: float = 0.0):
        super().__init__(inner)
        self.ahead = ahead
        self._written: dict[str, float] = {}

    def sleep(self, seconds: float) -> None:
        self.ahead += seconds

    def now(self) -> float:
        return float(self.inner.now()) + self.ahead

    def create(self, name: str, data: Any) -> Any:
        version = self.inner.create(name, data)
        self._written[name] = self.ahead
        return version

    def create_many(self, items: Sequence[tuple[str, Any]]) -> Any:
        versions = self.inner.create_many(items)
        for (name, _), version in zip(items, versions, strict=True):
            if version is not None:
                self._written[name] = self.ahead
        return versions

    def write_many(self, items: Sequence[tuple[str, Any]]) -> Any:
        versions = self.inner.write_many(items)
        for (name, _), version in zip(items, versions, strict=True):
            if version is not None:
                self._written[name] = self.ahead
        return versions

    def replace(self, name: str, data: Any, if_version: str) -> Any:
        version = self.inner.replace(name, data, if_version)
        self._written[name] = self.ahead
        return version

    def stat(self, name: str) -> Stat:
        return self._shifted(self.inner.stat(name))

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> Iterator[Stat]:
        return map(self._shifted, self.inner.list(prefix, after, limit))

    def _shifted(self, stat: Stat) -> Stat:
        return replace(stat, modified=stat.modified + self._written.get(stat.name, 0.0))


class Crash(BaseException):
    """The process is dead from here on."""


class Crashing(Wrapped):
    """Dies at the ``at``-th write (from 0) of a name that starts with ``only``: before it acts,
    half-way through it, or after.

    Dead means dead: every later call dies too, so that no clean-up code can help.
    """

    def __init__(self, inner: Any, at: int, moment: str, only: str = ""):
        super().__init__(inner)
        self.at, self.moment, self.only = at, moment, only
        self.writes = 0
        self.dead = False
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if not callable(value) or name == "lock":
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.dead:
                raise Crash
            return value(*args, **kwargs)

        return call

    def _write(self, names: Sequence[str], act: Callable[[int], Any]) -> Any:
        """``act`` is told how many of ``names`` to write."""
        with self._lock:
            if self.dead:
                raise Crash
            counts = any(n.startswith(self.only) for n in names)
            mine, self.writes = self.writes, self.writes + counts
            if not counts or mine != self.at:
                return act(len(names))
            self.dead = True
            act({"before": 0, "half": len(names) // 2, "after": len(names)}[self.moment])
            raise Crash

    def create(self, name: str, data: Any) -> Any:
        return self._write([name], lambda n: n and self.inner.create(name, data))

    def create_many(self, items: Sequence[tuple[str, Any]]) -> Any:
        names = [name for name, _ in items]
        return self._write(names, lambda n: self.inner.create_many(items[:n]))

    def write_many(self, items: Sequence[tuple[str, Any]]) -> Any:
        names = [name for name, _ in items]
        return self._write(names, lambda n: self.inner.write_many(items[:n]))

    def replace(self, name: str, data: Any, if_version: str) -> Any:
        return self._write([name], lambda n: n and self.inner.replace(name, data, if_version))

    def delete(self, name: str, expires: float | None = None) -> Any:
        return self._write([name], lambda n: n and self.inner.delete(name, expires))

    def delete_many(self, names: Sequence[str], expires: float | None = None) -> Any:
        return self._write(names, lambda n: self.inner.delete_many(names[:n], expires))


class Volatile(Crashing):
    """A `Crashing` disk that power goes from as well: what was not synced may be lost.

    Harsher than a disk: `sync` saves the very names it is told, none beside them.
    """

    def __init__(self, inner: Any, at: int = -1, moment: str = "before"):
        super().__init__(inner, at, moment)
        self.loose: set[str] = set()

    def write_many(self, items: Sequence[tuple[str, Any]]) -> Any:
        there = {s.name for s in self.inner.list("objects")}
        try:
            return super().write_many(items)
        finally:
            now = {s.name for s in self.inner.list("objects")}
            self.loose |= now & {n for n, _ in items} - there

    def sync(self, names: Iterable[str]) -> None:
        if self.dead:
            raise Crash
        wanted = list(names)
        self.inner.sync(wanted)
        self.loose -= set(wanted)

    def lose(self, share: float, rng: random.Random) -> None:
        """Power comes back: each name that was not synced is gone with this probability."""
        for name in sorted(self.loose):
            if rng.random() < share:
                self.inner.delete(name)
        self.loose.clear()


class Outage(Wrapped):
    """`BackendError` from every call whose first argument ``refuse`` accepts, while ``on``."""

    def __init__(self, inner: Any, refuse: Callable[[str, str], bool]):
        super().__init__(inner)
        self.refuse, self.on = refuse, True

    def _check(self, call: str, name: str) -> None:
        if self.on and self.refuse(call, name):
            raise BackendError(f"{name}: the store does not answer") from TimeoutError(name)

    def get(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        self._check("get", name)
        return bytes(self.inner.get(name, start, stop))

    def get_versioned(self, name: str) -> tuple[bytes, str]:
        self._check("get", name)
        data, version = self.inner.get_versioned(name)
        return data, version

    def stat(self, name: str) -> Stat:
        self._check("stat", name)
        found: Stat = self.inner.stat(name)
        return found

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> Iterator[Stat]:
        self._check("list", prefix)
        return iter(list(self.inner.list(prefix, after, limit)))

    def folders(self, prefix: str) -> Any:
        self._check("list", prefix)
        return self.inner.folders(prefix)

    def delete_many(
        self, names: Sequence[str], expires: float | None = None
    ) -> list[BaseException | None]:
        outcomes: list[BaseException | None] = []
        for name in names:
            try:
                self._check("delete", name)
                outcomes += self.inner.delete_many([name], expires)
            except BackendError as e:
                outcomes.append(e)
        return outcomes


class BadReads(Wrapped):
    """Changes what a read gives: ``spoil(name, data, n)`` sees a name's ``n``-th whole read."""

    def __init__(self, inner: Any, spoil: Callable[[str, bytes, int], bytes]):
        super().__init__(inner)
        self._spoil, self._reads = spoil, dict[str, int]()

    def get(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        data = bytes(self.inner.get(name, start, stop))
        if start or (stop is not None and stop <= HEADER_SIZE):
            return data
        n = self._reads[name] = self._reads.get(name, 0) + 1
        return self._spoil(name, data, n)


class Counting(Wrapped):
    """Keeps the names that were read (beyond a header), created, replaced and deleted."""

    def __init__(self, inner: Any):
        super().__init__(inner)
        self.read: list[str] = []
        self.created: list[str] = []
        self.deleted: list[str] = []
        self.replaced: list[str] = []

    def get(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        if not start and (stop is None or stop > HEADER_SIZE):
            self.read.append(name)
        return bytes(self.inner.get(name, start, stop))

    def create(self, name: str, data: Any) -> Any:
        self.created.append(name)
        return self.inner.create(name, data)

    def create_many(self, items: Sequence[tuple[str, Any]]) -> Any:
        self.created += [n for n, _ in items]
        return self.inner.create_many(items)

    def write_many(self, items: Sequence[tuple[str, Any]]) -> Any:
        self.created += [n for n, _ in items]
        return self.inner.write_many(items)

    def replace(self, name: str, data: Any, if_version: str) -> Any:
        self.replaced.append(name)
        return self.inner.replace(name, data, if_version)

    def delete(self, name: str, expires: float | None = None) -> Any:
        self.deleted.append(name)
        return self.inner.delete(name, expires)

    def delete_many(self, names: Sequence[str], expires: float | None = None) -> Any:
        self.deleted += names
        return self.inner.delete_many(names, expires)
