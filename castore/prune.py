"""Prune: delete objects that no snapshot needs, beside active writers.

The protocol is docs/format.md, "Writers, forget and prune"; each step is a function of its own,
so that tests can freeze a prune between any two. Grace only saves uploads: safety rests on the
lock (local) and on pending, sweep and expiring deletes (elsewhere).
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from castore.backend import UnansweredError
from castore.errors import (
    AlreadyExistsError,
    BackendError,
    CorruptObjectError,
    InvalidInputError,
    ObjectNotFoundError,
)
from castore.objects import object_name
from castore.publish import (
    PRUNE,
    Sweep,
    close_sweep,
    fence,
    read_sweep,
    until_answered,
    wait_idle,
)
from castore.reach import Roots, Stored, closure, list_objects
from castore.repository import LOCK_TIMEOUT, Repository
from castore.snapshot import SnapshotName, parse_name

GRACE = 14 * 86_400.0
SWEEP = 3_600.0  # seconds a sweep is announced for
PAUSE = 3  # overdue limits between two sweeps, or slow writers never get through
_FENCES_KEPT = 366 * 86_400.0
_LEFTOVERS_KEPT = 86_400.0


@dataclass(slots=True)
class PruneReport:
    """What went, or with ``dry_run`` would go. Sizes are stored bytes.

    ``victims``: digest and size of each object deleted; ``expired``: forgotten snapshots whose
    grace is over; ``failed``: name and reason of each delete that did not happen.
    """

    dry_run: bool
    objects: int = 0
    bytes: int = 0
    kept_objects: int = 0
    kept_bytes: int = 0
    expired: list[SnapshotName] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    victims: list[tuple[str, int]] = field(default_factory=list)


@dataclass(slots=True)
class Plan:
    """What one look at the repository allows to delete."""

    victims: list[str]
    expired: list[SnapshotName]
    objects: dict[str, Stored]


def prune(
    repository: Repository,
    *,
    dry_run: bool = False,
    grace: float = GRACE,
    offline: bool = False,
    sweep: float = SWEEP,
    progress: Callable[[int], None] = lambda _: None,
) -> PruneReport:
    """Delete unreferenced objects older than ``grace`` seconds by the store's clock.

    Parameters
    ----------
    offline : bool
        The caller vouches that nobody else writes: needed where the store honours no conditions
        or the repository lies on a network file system without working locks.
    progress : callable
        Told the number of objects looked at, as they are looked at.

    Raises
    ------
    IntegrityError, FormatError
        A snapshot, a tree or the header of an object that stays cannot be read: what it needs
        is not known, nothing was deleted.
    BackendError
        The store failed, or honours no conditions and ``offline`` is not set.
    """
    if grace < 0:
        raise InvalidInputError(f"grace of {grace} seconds: expected zero or more")
    backend = repository.backend
    marks = Roots(repository)
    first = look(repository, marks, grace, None, progress)
    report = PruneReport(dry_run)
    if dry_run or not (first.victims or first.expired or _leftovers(repository)):
        _account(report, first, first.victims)
        report.expired = first.expired
        return report
    if not offline and not repository.many_writers:
        raise BackendError(
            f"{backend.url} cannot keep a prune and a writer apart (no conditional writes, or a"
            " network file system), so data could be lost: make sure that nobody writes and pass"
            " --offline"
        )
    if backend.kind == "local":
        with backend.lock(exclusive=True, timeout=LOCK_TIMEOUT):
            _sweep(repository, marks, first, grace, report, Deletes())
    elif repository.many_writers:
        prune_remote(repository, marks, first, grace, report, sweep)
    else:
        _sweep(repository, marks, first, grace, report, Deletes())
    return report


def look(
    repository: Repository,
    marks: Roots,
    grace: float,
    known: dict[str, Stored] | None,
    progress: Callable[[int], None] = lambda _: None,
) -> Plan:
    """List snapshots, *then* forgotten, *then* objects with their headers; mark; close over bases.

    In this order a snapshot that is forgotten meanwhile is seen in one of the two lists.
    """
    listed = marks.read("snapshots")
    now = repository.backend.now()
    forgotten = marks.read("forgotten", grace, now)
    expired = [
        n
        for n in _old(repository, "forgotten", now - grace)
        if n not in listed and n not in forgotten
    ]
    objects = list_objects(repository, known, progress)
    now = repository.backend.now()
    needed = frozenset[str]().union(*listed.values(), *forgotten.values())
    young = [d for d, o in objects.items() if o.modified + grace > now]
    keep = _closure(repository, objects, [*needed, *young])
    return Plan([d for d in objects if d not in keep], expired, objects)


def _closure(repository: Repository, objects: dict[str, Stored], roots: Sequence[str]) -> set[str]:
    """`closure`, with a second look at damaged headers: of what stays the base must be known."""
    keep = closure(objects, roots)
    while blind := [d for d in keep if d in objects and objects[d].header is None]:
        for digest in blind:
            try:
                header = repository.store.header(digest)
            except CorruptObjectError as e:
                raise CorruptObjectError(
                    f"{e}: it stays, and its base is not known: nothing was deleted; run 'castore"
                    " check', then repair it or forget what needs it",
                    name=digest,
                ) from e
            if header is None:
                del objects[digest]  # another prune took it meanwhile
            else:
                objects[digest].header = header
        keep = closure(objects, roots)
    return keep


def prune_remote(
    repository: Repository,
    marks: Roots,
    first: Plan,
    grace: float,
    report: PruneReport,
    length: float,
) -> None:
    """Announce a sweep, wait for or fence every pending commit, look again, delete, close."""
    backend, patience = repository.backend, repository.patience
    mine = announce(repository, length)
    deletes = Deletes(mine.end)
    try:
        if settle_pending(repository, mine) and backend.now() <= mine.end:
            _sweep(repository, marks, first, grace, report, deletes)
    except BaseException:
        if not deletes.open:
            close_sweep(backend, mine)
        raise
    while deletes.open and backend.now() <= mine.end + patience.margin:
        patience.sleep(patience.poll)
    close_sweep(backend, mine)


@dataclass(slots=True)
class Deletes:
    """``end``: until when deletes count; ``open``: whether one may still come into effect."""

    end: float | None = None
    open: bool = False


def announce(repository: Repository, length: float) -> Sweep:
    """Put a sweep with a random id into ``prune.json``, after any other and the pause."""
    backend, patience = repository.backend, repository.patience
    while True:
        current = wait_idle(backend, patience)
        now = backend.now()
        pause = current.end + PAUSE * patience.overdue - now
        if current.version and pause > 0:
            patience.say(
                f"the last sweep of {backend.url} ended a short while ago, and slow writers need"
                f" the pause: waiting {pause:.0f} s (end this and prune later, if you like)"
            )
            patience.sleep(pause)
            continue
        id, end = secrets.token_hex(16), now + length
        try:
            return Sweep(id, end, backend.replace(PRUNE, Sweep.encode(id, end), current.version))
        except AlreadyExistsError:
            continue
        except UnansweredError:
            after = read_sweep(backend)
            if after.id == id:
                return after


def settle_pending(repository: Repository, sweep: Sweep) -> bool:
    """Wait until every pending commit is gone; fence those without a heartbeat.

    False when the sweep's end came first.
    """
    backend, patience = repository.backend, repository.patience
    for stat in list(backend.list("pending")):
        name = parse_name(stat.name)
        if name is None:
            continue
        while True:
            now = backend.now()
            if now > sweep.end:
                return False
            try:
                beat = backend.stat(stat.name).modified
            except ObjectNotFoundError:
                break
            if now > beat + patience.overdue:
                fence(backend, name, None, patience)
                until_answered(partial(backend.delete, stat.name), patience)
                break
            patience.sleep(patience.poll)
    return True


def _sweep(
    repository: Repository,
    marks: Roots,
    first: Plan,
    grace: float,
    report: PruneReport,
    deletes: Deletes,
) -> None:
    """Look again and delete what both looks agree on."""
    plan = look(repository, marks, grace, first.objects)
    _delete(repository, [n.forgotten for n in plan.expired], deletes, report)
    report.expired = plan.expired
    agreed = set(first.victims)
    victims = [d for d in plan.victims if d in agreed]
    gone = delete_objects(repository, plan.objects, victims, deletes, report)
    _account(report, plan, gone)
    _delete(repository, _leftovers(repository), deletes, report)


def delete_objects(
    repository: Repository,
    objects: dict[str, Stored],
    victims: Sequence[str],
    deletes: Deletes,
    report: PruneReport,
) -> list[str]:
    """Delete deltas before bases; a base stays when one of its deltas could not be deleted.

    Gives what went. `Backend.delete_many` makes each wave durable before the next begins.
    """
    waves: dict[int, list[str]] = defaultdict(list)
    for digest in victims:
        header = objects[digest].header
        waves[header.depth if header else 0].append(digest)
    gone: list[str] = []
    stay: set[str] = set()
    for depth in sorted(waves, reverse=True):
        wave = [d for d in waves[depth] if d not in stay]
        failed = _delete(repository, [object_name(d) for d in wave], deletes, report)
        bad = {n.rpartition("/")[2] for n in failed}
        gone += [d for d in wave if d not in bad]
        stay = closure(objects, [*stay, *bad])
    return gone


def _delete(
    repository: Repository, names: Sequence[str], deletes: Deletes, report: PruneReport
) -> list[str]:
    if not names:
        return []
    before, deletes.open = deletes.open, True
    outcomes: list[BaseException | None] = repository.backend.delete_many(names, deletes.end)
    failed: list[str] = []
    for name, error in zip(names, outcomes, strict=True):
        if error is None:
            continue
        if not isinstance(error, BackendError):
            raise error
        failed.append(name)
        before |= isinstance(error, UnansweredError)
        report.failed.append((name, str(error)))
    deletes.open = before
    return failed


def _old(repository: Repository, folder: str, before: float) -> list[SnapshotName]:
    stats = repository.backend.list(folder)
    names = [parse_name(s.name) for s in stats if s.modified < before]
    return [n for n in names if n is not None]


def _leftovers(repository: Repository) -> list[str]:
    """Fences past their year and temporary files past a day."""
    backend = repository.backend
    now = backend.now()
    fences = [
        s.name for s in backend.list("snapshots") if s.size == 0 and s.modified + _FENCES_KEPT < now
    ]
    return fences + [s.name for s in backend.list("tmp") if s.modified + _LEFTOVERS_KEPT < now]


def _account(report: PruneReport, plan: Plan, gone: Iterable[str]) -> None:
    report.victims = sorted((d, plan.objects[d].size) for d in gone)
    report.objects = len(report.victims)
    report.bytes = sum(size for _, size in report.victims)
    report.kept_objects = len(plan.objects) - report.objects
    report.kept_bytes = sum(o.size for o in plan.objects.values()) - report.bytes
