"""A store in a dictionary with a clock of its own, for schedules made by hand or by a model.

Every call first goes through ``before``; every answer of a write through ``after``. So a test can
freeze an actor between any two calls, let others act, move the clock, or lose an answer.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from castore.backend import MISSING, ExpiredError, Stat, UnansweredError
from castore.digest import Buffer
from castore.errors import AlreadyExistsError, BackendError, ObjectNotFoundError


@dataclass
class World:
    """What all actors share: names with content, time and version, and the store's clock."""

    clock: float = 1_000_000.0
    names: dict[str, tuple[bytes, float, str]] = field(default_factory=dict)
    writes: int = 0

    def put(self, name: str, data: Buffer) -> str:
        self.writes += 1
        version = str(self.writes)
        self.names[name] = bytes(data), self.clock, version
        return version


class ModelBackend:
    """One actor's view of a `World`; see `castore.backend.Backend` for the contract.

    Parameters
    ----------
    world : World
    before : callable
        Called with method and name before each call acts.
    after : callable
        Called with method and name after a write acted; what it raises the actor gets.
    """

    kind = "model"
    parallel = 1
    url = "model://world"

    def __init__(
        self,
        world: World,
        before: Callable[[str, str], None] = lambda method, name: None,
        after: Callable[[str, str], None] = lambda method, name: None,
    ):
        self.world, self.before, self.after = world, before, after

    def get(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        self.before("get", name)
        return self._found(name)[0][start or 0 : stop]

    def get_versioned(self, name: str) -> tuple[bytes, str]:
        self.before("get_versioned", name)
        data, _, version = self._found(name)
        return data, version

    def stat(self, name: str) -> Stat:
        self.before("stat", name)
        return self._stat(name)

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> Iterator[Stat]:
        self.before("list", prefix)
        names = sorted(
            n
            for n in self.world.names
            if n.startswith(f"{prefix}/" if prefix else "") and (after is None or n > after)
        )
        return iter([self._stat(n) for n in names[:limit]])

    def folders(self, prefix: str) -> builtins.list[str]:
        head = f"{prefix}/" if prefix else ""
        below = (n[len(head) :] for n in self.world.names if n.startswith(head))
        return sorted({b.partition("/")[0] for b in below if "/" in b})

    def create(self, name: str, data: Buffer) -> str:
        self.before("create", name)
        if name in self.world.names:
            raise AlreadyExistsError(name)
        version = self.world.put(name, data)
        self.after("create", name)
        return version

    def create_many(self, items: Sequence[tuple[str, Buffer]]) -> builtins.list[str | None]:
        result: builtins.list[str | None] = []
        for name, data in items:
            try:
                result.append(self.create(name, data))
            except AlreadyExistsError:
                result.append(None)
            except UnansweredError:
                result.append(self.world.names[name][2] if name in self.world.names else None)
        return result

    def write_many(
        self, items: Sequence[tuple[str, Sequence[Buffer]]]
    ) -> builtins.list[str | None]:
        return self.create_many([(name, b"".join(parts)) for name, parts in items])

    def sync(self, names: Iterable[str]) -> None:
        """Nothing to sync."""

    def replace(self, name: str, data: Buffer, if_version: str) -> str:
        self.before("replace", name)
        current = self.world.names[name][2] if name in self.world.names else MISSING
        if current != if_version:
            raise AlreadyExistsError(name)
        version = self.world.put(name, data)
        self.after("replace", name)
        return version

    def delete(self, name: str, expires: float | None = None) -> None:
        self.before("delete", name)
        if expires is not None and self.world.clock > expires:
            raise ExpiredError(name)
        self.world.names.pop(name, None)
        self.after("delete", name)

    def delete_many(
        self, names: Sequence[str], expires: float | None = None
    ) -> builtins.list[BaseException | None]:
        outcomes: builtins.list[BaseException | None] = []
        for name in names:
            try:
                self.delete(name, expires)
                outcomes.append(None)
            except BackendError as e:
                outcomes.append(e)
        return outcomes

    def now(self) -> float:
        self.before("now", "")
        return self.world.clock

    def lock(self, *, exclusive: bool, timeout: float) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def probe(self) -> bool:
        return True

    def prepare(self, *, shared: bool) -> None:
        """Nothing to make."""

    def _found(self, name: str) -> tuple[bytes, float, str]:
        if name not in self.world.names:
            raise ObjectNotFoundError(name)
        return self.world.names[name]

    def _stat(self, name: str) -> Stat:
        data, modified, version = self._found(name)
        return Stat(name, len(data), modified, version)
