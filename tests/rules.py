"""castore with one rule of "Writers, forget and prune" taken out, for the schedules to find.

A scheduler that does not find the loss proves nothing about the code that keeps the rule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from castore import forget, objects, prune, publish
from castore.backend import Backend
from castore.errors import AlreadyExistsError
from castore.load import read_snapshot, read_tree
from castore.objects import ObjectStore
from castore.prune import Deletes, Plan
from castore.publish import Patience, Pending, Sweep, until_answered
from castore.reach import Roots, Stored, list_objects
from castore.repository import Repository
from castore.snapshot import SnapshotName
from castore.testing.schedules import ScheduledBackend


@dataclass(frozen=True, slots=True)
class Change:
    """``place.name`` is ``value`` while the rule is out."""

    place: Any
    name: str
    value: Any


@contextlib.contextmanager
def without(rule: str) -> Iterator[None]:
    """castore without one rule of `RULES`."""
    with contextlib.ExitStack() as stack:
        for change in RULES[rule]():
            before = change.place.__dict__[change.name]
            stack.callback(setattr, change.place, change.name, before)
            setattr(change.place, change.name, change.value)
        yield


# -- writers


def _verify_nothing() -> list[Change]:
    return [Change(publish, "verify", lambda *args: [])]


def _own_uploads_trusted() -> list[Change]:
    verify = publish.verify

    def others_only(store: ObjectStore, need: Iterable[str], *rest: Any) -> list[str]:
        return verify(store, [d for d in need if d not in store._known], *rest)

    return [Change(publish, "verify", others_only)]


def _bases_not_verified() -> list[Change]:
    def present_only(store: ObjectStore, digests: Any, pulse: Any, headers: Any = None) -> Any:
        found = store.current_headers(digests, pulse)
        return [d for d in digests if found[d] is None]

    return [Change(ObjectStore, "broken", present_only)]


def _depth_not_looked_at() -> list[Change]:
    return [Change(objects, "_may_follow", lambda base, above: True)]


def _no_fences() -> list[Change]:
    return [Change(prune, "fence", lambda *args: "fenced")]


def _fence_not_looked_at() -> list[Change]:
    return [Change(publish, "_look", lambda *args: "committed")]


def _create_with_retry() -> list[Change]:
    def create(
        backend: Backend, name: SnapshotName, data: bytes, patience: Patience = Patience()
    ) -> str:
        try:
            until_answered(lambda: backend.create(name.path, data), patience)
        except AlreadyExistsError:
            return publish._look(backend, name, data)
        return "committed"

    return [Change(publish, "create_snapshot", create)]


def _sweep_read_before_pending() -> list[Change]:
    announce, read_sweep = Pending.announce, publish.read_sweep
    asked: set[Backend] = set()

    def late(backend: Backend, name: SnapshotName, patience: Patience) -> Pending | None:
        publish.wait_idle(backend, patience)
        asked.add(backend)
        return announce(backend, name, patience)

    def read(backend: Backend) -> Sweep:
        if backend in asked:  # the look that should come after the pending
            asked.discard(backend)
            return Sweep("", 0.0, "")
        return read_sweep(backend)

    return [Change(Pending, "announce", staticmethod(late)), Change(publish, "read_sweep", read)]


def _no_lock() -> list[Change]:
    return [Change(Repository, "shared_lock", lambda self: contextlib.nullcontext())]


# -- forget


def _unforget_by_a_move() -> list[Change]:
    def move(self: Repository, name: SnapshotName) -> SnapshotName:
        data = self.backend.get(name.forgotten)
        read_tree(self.store, read_snapshot(data, name).tree)
        with contextlib.suppress(AlreadyExistsError):
            until_answered(lambda: self.backend.create(name.path, data), self.patience)
        until_answered(lambda: self.backend.delete(name.forgotten), self.patience)
        return name

    return [Change(Repository, "unforget", move)]


def _deleted_before_remembered() -> list[Change]:
    def forgets(backend: Backend, name: SnapshotName, patience: Patience) -> None:
        data = backend.get(name.path)
        until_answered(lambda: backend.delete(name.path), patience)
        while not forget._remember(backend, name, data):
            patience.sleep(patience.poll)

    return [Change(forget, "forget", forgets)]


# -- prune


def _bases_not_closed_over() -> list[Change]:
    def roots_only(stored: Mapping[str, Stored], roots: Iterable[str]) -> set[str]:
        return set(roots)

    return [Change(prune, "closure", roots_only)]


class _ReadOnce(Roots):
    """Snapshots as the first look saw them."""

    def __init__(self, repository: Repository):
        super().__init__(repository)
        self.first: Any = None

    def read(self, folder: str, grace: float = inf, now: float = 0.0) -> Any:
        if folder != "snapshots":
            return super().read(folder, grace, now)
        if self.first is None:
            self.first = super().read(folder)
        return self.first


def _snapshots_listed_once() -> list[Change]:
    return [Change(prune, "Roots", _ReadOnce)]


def _objects_listed_once() -> list[Change]:
    listing = list_objects

    def once(repository: Repository, known: Any = None, progress: Any = lambda _: None) -> Any:
        return dict(known) if known is not None else listing(repository, known, progress)

    return [Change(prune, "list_objects", once)]


def _forgotten_before_snapshots() -> list[Change]:
    look = prune.look

    def turned(
        repository: Repository, marks: Any, grace: float, known: Any, progress: Any = lambda _: None
    ) -> Plan:
        now = repository.backend.now()
        early = marks.read("forgotten", grace, now)
        return look(repository, _Early(marks, early), grace, known, progress)

    return [Change(prune, "look", turned)]


class _Early(Roots):
    """Roots that know already what is forgotten."""

    def __init__(self, marks: Roots, forgotten: Any):
        super().__init__(marks.repository)
        self._forgotten = forgotten

    def read(self, folder: str, grace: float = inf, now: float = 0.0) -> Any:
        return super().read(folder) if folder == "snapshots" else self._forgotten


def _deletes_never_expire() -> list[Change]:
    act = ScheduledBackend.delete_now
    return [
        Change(ScheduledBackend, "delete_now", lambda self, name, expires: act(self, name, None))
    ]


class _Closed(Deletes):
    """Deletes of which none is ever open."""

    @property
    def open(self) -> bool:
        return False

    @open.setter
    def open(self, value: bool) -> None:
        """An unanswered one is as good as an answered one."""


def _no_margin_after_unanswered() -> list[Change]:
    return [Change(prune, "Deletes", _Closed)]


def _constant_id() -> list[Change]:
    class Constant:
        @staticmethod
        def token_hex(n: int) -> str:
            return "0" * (2 * n)

    return [Change(prune, "secrets", Constant)]


def _no_wait_for_pending() -> list[Change]:
    return [Change(prune, "settle_pending", lambda repository, sweep: True)]


RULES: Mapping[str, Callable[[], list[Change]]] = {
    "every object is verified": _verify_nothing,
    "own uploads are verified too": _own_uploads_trusted,
    "bases are verified": _bases_not_verified,
    "a base is less deep than its delta": _depth_not_looked_at,
    "bases closed over what stays": _bases_not_closed_over,
    "snapshots listed again": _snapshots_listed_once,
    "objects listed again": _objects_listed_once,
    "snapshots before forgotten": _forgotten_before_snapshots,
    "remembered before deleted": _deleted_before_remembered,
    "fences": _no_fences,
    "a fence is looked at": _fence_not_looked_at,
    "a single create without retry": _create_with_retry,
    "deletes expire": _deletes_never_expire,
    "margin after an unanswered delete": _no_margin_after_unanswered,
    "the random id": _constant_id,
    "unforget is a commit": _unforget_by_a_move,
    "pending before prune.json": _sweep_read_before_pending,
    "prune waits for pending": _no_wait_for_pending,
    "the shared lock": _no_lock,
}
