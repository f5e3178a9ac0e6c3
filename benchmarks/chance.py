"""Storage that goes wrong by chance, for long runs: a backend, a root's files, and the dice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import castore.repository
import castore_experiments.files
import castore_experiments.local_files
from castore import BackendError
from castore.backends import open_backend
from castore.testing.faulty import Call, Fault, FaultyBackend, Kind
from castore.testing.proxy import KINDS
from castore.testing.proxy import Kind as WireKind

K = TypeVar("K", Kind, WireKind)

WIRE = [k for k in KINDS if k != "hang"]
_READS: tuple[Kind, ...] = ("fail", "fail", "delay")
_CONTENT: tuple[Kind, ...] = (*_READS, "flip", "truncate")
_WRITES: tuple[Kind, ...] = ("fail", "lose", "lose_before", "delay")


@dataclass
class Dice:
    """Says which calls go wrong; ``rate`` may be set at any time."""

    seed: int
    rate: float = 0.0
    thrown: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def spared(self) -> bool:
        """Whether a read goes well at the second try, as every client makes one."""
        return self._random.random() >= self.rate

    def throw(self, method: str, kinds: Sequence[K]) -> K | None:
        """What goes wrong at this call, None for nothing."""
        if self._random.random() >= self.rate:
            return None
        kind = self._random.choice(kinds)
        self.thrown[f"{method} {kind}"] += 1
        return kind


class RandomFaults(FaultyBackend):
    """A backend whose every call may go wrong."""

    def __init__(self, inner: Any, dice: Dice):
        super().__init__(inner, hook=lambda _: self.calls.clear())
        self._dice = dice

    def _due(self, call: Call) -> Fault | None:
        kinds = _WRITES
        if call.method in ("get", "get_versioned", "stat", "list", "folders", "now", "lock"):
            content = call.method == "get" and call.name.startswith(("objects/", "snapshots/"))
            kinds = _CONTENT if content else _READS
            if self._dice.spared():
                return None
        kind = self._dice.throw(call.method, kinds)
        return Fault(kind, seconds=0.2) if kind else None


def faulty_files(dice: Dice) -> type[Any]:
    """The class of a local root's files, whose every call may be refused."""

    class Faulty(castore_experiments.local_files.LocalFiles):
        def _or_fail(self, method: str, name: str) -> None:
            reads = method in ("get", "stat")
            if not (reads and dice.spared()) and dice.throw(f"root {method}", ("fail",)):
                raise BackendError(f"injected at {method}({name!r})")

        def get_versioned(self, name: str) -> tuple[bytes, str]:
            self._or_fail("get", name)
            return super().get_versioned(name)

        def stat(self, name: str) -> Any:
            self._or_fail("stat", name)
            return super().stat(name)

        def stage(self, name: str, data: Any) -> Any:
            self._or_fail("stage", name)
            return super().stage(name, data)

        def delete(self, name: str) -> None:
            self._or_fail("delete", name)
            super().delete(name)

    return Faulty


@contextmanager
def storage_faults(dice: Dice) -> Iterator[None]:
    """Whatever is opened within misbehaves, also after."""

    def opened(url: Any, options: Any = None) -> Any:
        return RandomFaults(open_backend(url, options), dice)

    patched: list[tuple[Any, str, Any]] = [
        (castore.repository, "open_backend", opened),
        (castore_experiments.files, "open_backend", opened),
        (castore_experiments.local_files, "LocalFiles", faulty_files(dice)),
    ]
    before = [getattr(module, name) for module, name, _ in patched]
    for module, name, new in patched:
        setattr(module, name, new)
    try:
        yield
    finally:
        for (module, name, _), old in zip(patched, before, strict=True):
            setattr(module, name, old)
