"""A backend that fails, crashes, lies or loses answers at chosen calls, and logs them all.

    faulty = FaultyBackend(inner, [Fault("lose", at=3, method="create")])

What is above it must then report the right error, lose nothing, and leave no half-made thing.
"""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, TypeVar

from castore.backend import Backend, Stat, UnansweredError
from castore.digest import Buffer
from castore.errors import AlreadyExistsError, BackendError

T = TypeVar("T")

Kind = Literal["fail", "crash", "crash_after", "lose", "lose_before", "truncate", "flip", "delay"]


class Crash(BaseException):
    """The process died here; not an `Exception`, so that no handler mends it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and at which calls.

    Parameters
    ----------
    kind
        ``fail``: `BackendError` instead of acting. ``crash``, ``crash_after``: `Crash` before or
        after acting. ``lose``, ``lose_before``: `UnansweredError`, having acted or not.
        ``truncate``, ``flip``: what a read returns loses its last byte, or has a bit turned.
        ``delay``: it acts after ``seconds``.
    at
        The first call it hits, counted from 1 among those that match.
    times
        How many matching calls it hits from there on.
    method, name
        Only calls of this method; only names that start with this text.
    """

    kind: Kind
    at: int = 1
    times: int = 1
    method: str | None = None
    name: str = ""
    seconds: float = 0.05

    def matches(self, call: Call) -> bool:
        """Whether ``call`` is one that counts."""
        return self.method in (None, call.method) and call.name.startswith(self.name)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a method; ``name`` is the name, folder or prefix it is about."""

    method: str
    name: str


class FaultyBackend:
    """``inner`` with the faults of ``plan``.

    The many-methods reach ``inner`` one item at a time, each a call of its own, so that a crash
    may fall between two of them. ``hook`` is run before each call: a schedule made by hand waits
    or acts there. ``calls`` is the log.
    """

    def __init__(
        self,
        inner: Backend,
        plan: Sequence[Fault] = (),
        hook: Callable[[Call], None] = lambda _: None,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.inner, self.plan, self.hook, self._sleep = inner, list(plan), hook, sleep
        self.url, self.kind, self.parallel = inner.url, inner.kind, inner.parallel
        self.calls: builtins.list[Call] = []
        self._seen = [0] * len(self.plan)

    def get(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """As `Backend.get`."""
        return self._call("get", name, lambda: self.inner.get(name, start, stop))

    def get_versioned(self, name: str) -> tuple[bytes, str]:
        """As `Backend.get_versioned`."""
        return self._call("get_versioned", name, lambda: self.inner.get_versioned(name))

    def create(self, name: str, data: Buffer) -> str:
        """As `Backend.create`."""
        return self._call("create", name, lambda: self.inner.create(name, data))

    def create_many(self, items: Sequence[tuple[str, Buffer]]) -> builtins.list[str | None]:
        """As `Backend.create_many`, but ends at the first failure."""
        return [self._create_one(name, data) for name, data in items]

    def _create_one(self, name: str, data: Buffer) -> str | None:
        return self._call("create_many", name, lambda: self.inner.create_many([(name, data)])[0])

    def write_many(
        self, items: Sequence[tuple[str, Sequence[Buffer]]]
    ) -> builtins.list[str | None]:
        """As `Backend.write_many`, but ends at the first failure."""
        return [self._write_one(name, parts) for name, parts in items]

    def _write_one(self, name: str, parts: Sequence[Buffer]) -> str | None:
        return self._call("write_many", name, lambda: self.inner.write_many([(name, parts)])[0])

    def sync(self, names: Iterable[str]) -> None:
        """As `Backend.sync`."""
        wanted = list(names)
        self._call("sync", wanted[0] if wanted else "", lambda: self.inner.sync(wanted))

    def replace(self, name: str, data: Buffer, if_version: str) -> str:
        """As `Backend.replace`."""
        return self._call("replace", name, lambda: self.inner.replace(name, data, if_version))

    def stat(self, name: str) -> Stat:
        """As `Backend.stat`."""
        return self._call("stat", name, lambda: self.inner.stat(name))

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> Iterator[Stat]:
        """As `Backend.list`; one call, however many pages."""
        return iter(self._call("list", prefix, lambda: list(self.inner.list(prefix, after, limit))))

    def folders(self, prefix: str) -> builtins.list[str]:
        """As `Backend.folders`."""
        return self._call("folders", prefix, lambda: self.inner.folders(prefix))

    def delete(self, name: str, expires: float | None = None) -> None:
        """As `Backend.delete`."""
        self._call("delete", name, lambda: self.inner.delete(name, expires))

    def delete_many(
        self, names: Sequence[str], expires: float | None = None
    ) -> builtins.list[BaseException | None]:
        """As `Backend.delete_many`; `Crash` is raised, other faults are outcomes."""
        return [self._delete_one(name, expires) for name in names]

    def _delete_one(self, name: str, expires: float | None) -> BaseException | None:
        def act() -> BaseException | None:
            return self.inner.delete_many([name], expires)[0]

        try:
            return self._call("delete_many", name, act)
        except BackendError as e:
            return e

    def now(self) -> float:
        """As `Backend.now`."""
        return self._call("now", "", self.inner.now)

    def lock(self, *, exclusive: bool, timeout: float) -> AbstractContextManager[None]:
        """As `Backend.lock`."""
        return self._call("lock", "", lambda: self.inner.lock(exclusive=exclusive, timeout=timeout))

    def probe(self) -> bool:
        """As `Backend.probe`."""
        return self._call("probe", "", self.inner.probe)

    def prepare(self, *, shared: bool) -> None:
        """As `Backend.prepare`."""
        self._call("prepare", "", lambda: self.inner.prepare(shared=shared))

    def _call(self, method: str, name: str, act: Callable[[], T]) -> T:
        call = Call(method, name)
        self.calls.append(call)
        self.hook(call)
        fault = self._due(call)
        kind = fault.kind if fault else None
        where = f"injected at {method}({name!r})"
        if fault and kind == "delay":
            self._sleep(fault.seconds)
        if kind == "crash":
            raise Crash(where)
        if kind == "fail":
            raise BackendError(where)
        if kind == "lose_before":
            raise UnansweredError(where)
        try:
            result = act()
        except AlreadyExistsError:
            if kind != "lose":
                raise
        if kind == "crash_after":
            raise Crash(where)
        if kind == "lose":
            raise UnansweredError(where)
        return _spoiled(result, kind)

    def _due(self, call: Call) -> Fault | None:
        due: Fault | None = None
        for i, fault in enumerate(self.plan):
            if fault.matches(call):
                self._seen[i] += 1
                if due is None and fault.at <= self._seen[i] < fault.at + fault.times:
                    due = fault
        return due


def _spoiled(result: T, kind: Kind | None) -> T:
    """``result`` with its bytes damaged, where it holds any."""
    if kind not in ("truncate", "flip"):
        return result
    if isinstance(result, bytes):
        last = b"" if kind == "truncate" else _turned(result[-1:])
        return result[:-1] + last  # type: ignore[return-value]
    if isinstance(result, tuple) and result and isinstance(result[0], bytes):
        return (_spoiled(result[0], kind), *result[1:])  # type: ignore[return-value]
    return result


def _turned(last: bytes) -> bytes:
    return bytes([last[0] ^ 1]) if last else b""
