"""How a snapshot becomes visible, so that a prune beside it can never take what it needs.

The protocol is docs/format.md, "Writers, forget and prune". Each step is a small function over a
`Backend`, so that tests can stop a writer between any two of its calls.

Local: the caller holds the shared lock from before it looked up its first object; `publish_local`
verifies and creates. Elsewhere: `publish_remote` announces itself under ``pending/``, waits out
a sweep, verifies every object, and creates the snapshot with one request.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from castore import document
from castore.backend import MISSING, Backend, UnansweredError
from castore.errors import AlreadyExistsError, BackendError, ObjectNotFoundError
from castore.frame import Header
from castore.objects import ObjectStore
from castore.snapshot import FENCE, MAX_DOCUMENT, SnapshotName, name_of, parse_name

PRUNE = "prune.json"
MARGIN = 60.0  # seconds after a sweep's end before anyone may close it
OVERDUE = 15 * 60.0  # seconds without a heartbeat before a pending is fenced
_ATTEMPTS = 15
_DAY = 86_400_000_000

T = TypeVar("T")
Heal = Callable[[Sequence[str]], list[str]]


@dataclass(frozen=True, slots=True)
class Sweep:
    """The state of ``prune.json``: a sweep with a random id and its end, or idle (no id).

    When idle, ``end`` is when the last sweep was closed. Seconds by the store's clock.
    """

    id: str
    end: float
    version: str

    @property
    def on(self) -> bool:
        return self.id != ""

    @staticmethod
    def encode(id: str, end: float) -> bytes:
        return document.encode("prune", {"id": id, "end": end})


def _quiet(_: str) -> None:
    """Nobody asked why it waits."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Time as the protocol sees it; tests pass their own. ``say`` is told why something waits.

    ``clock`` is this machine's own, for heartbeats: only differences of it count.
    """

    sleep: Callable[[float], None] = time.sleep
    margin: float = MARGIN
    overdue: float = OVERDUE
    poll: float = 1.0
    tries: int = 120
    say: Callable[[str], None] = _quiet
    clock: Callable[[], float] = time.monotonic


def until_answered(act: Callable[[], T], patience: Patience) -> T:
    """``act()`` until an answer comes; `UnansweredError` when none does for long."""
    for _ in range(patience.tries - 1):
        try:
            return act()
        except UnansweredError:
            patience.sleep(patience.poll)
    return act()


def read_sweep(backend: Backend) -> Sweep:
    """What ``prune.json`` says now; missing means that no sweep ever ran."""
    try:
        data, version = backend.get_versioned(PRUNE)
    except ObjectNotFoundError:
        return Sweep("", 0.0, MISSING)
    body = document.decode(data, "prune", ["id", "end"], PRUNE)
    return Sweep(str(body["id"]), float(body["end"]), version)


def wait_idle(backend: Backend, patience: Patience) -> Sweep:
    """Return when no sweep is on; close one whose end and margin have passed."""
    told = ""
    while (sweep := read_sweep(backend)).on:
        left = sweep.end + patience.margin - backend.now()
        if left < 0:
            close_sweep(backend, sweep)
            continue
        if sweep.id != told:
            told = sweep.id
            patience.say(f"a prune of {backend.url} is under way: waiting, at most {left:.0f} s")
        patience.sleep(patience.poll)
    return sweep


def close_sweep(backend: Backend, sweep: Sweep) -> None:
    """Idle from now on, unless ``prune.json`` has moved on meanwhile."""
    try:
        backend.replace(PRUNE, Sweep.encode("", backend.now()), sweep.version)
    except (AlreadyExistsError, UnansweredError):
        return


def fresh_name(
    backend: Backend, data: bytes, namespace: str, key: str, after: int = 0
) -> SnapshotName:
    """A name newer than every other of the namespace, fences and forgotten ones included.

    So it was never used before, however coarse the store's clock is. Newer than ``after``, too:
    the time of a name whose pending was found taken, by one who commits the same document or died.

    Raises
    ------
    BackendError
        The newest name is over a day ahead of the store's clock.
    """
    now = int(backend.now() * 1_000_000)
    newest = _first(backend, f"snapshots/{namespace}")
    if newest is not None and newest.time > now + _DAY:
        raise BackendError(
            f"the newest snapshot of {namespace!r} is named {(newest.time - now) / _DAY:.1f} days"
            f" ahead of the clock of {backend.url}: set the clock right, or forget {newest}"
        )
    forgotten = _first(backend, f"forgotten/{namespace}")
    used = [n.time + 1 for n in (newest, forgotten) if n is not None and n.time <= now + _DAY]
    at = max(now, after + 1, *used)
    return name_of(data, namespace, key, at)


def _first(backend: Backend, folder: str) -> SnapshotName | None:
    names = (parse_name(stat.name) for stat in backend.list(folder, limit=1))
    return next(names, None)


def newest_name(backend: Backend, namespace: str) -> SnapshotName | None:
    """The first name that is a snapshot's; one request of one key, but for fences in front."""
    after: str | None = None
    limit = 1
    while True:
        stats = list(backend.list(f"snapshots/{namespace}", after=after, limit=limit))
        for stat in stats:
            name = parse_name(stat.name)
            if name is not None and stat.size > 0:
                return name
        if len(stats) < limit:
            return None
        after, limit = stats[-1].name, 100


def verify(
    store: ObjectStore,
    need: Sequence[str],
    heal: Heal,
    pulse: Callable[[], None],
    looked: dict[str, Header | None] | None = None,
) -> list[str]:
    """Look at every object of ``need`` and its bases as they are now; heal what is broken.

    Gives what is broken still. ``pulse`` is called from time to time. ``looked`` is filled with
    the headers last looked at, bases included.
    """
    for _ in range(3):
        broken = store.broken(need, pulse, looked)
        if not broken:
            return []
        lost = heal(broken)
        pulse()
        if lost:
            return lost
    return store.broken(need, pulse, looked)


def publish_local(
    store: ObjectStore, data: bytes, namespace: str, key: str, need: Sequence[str], heal: Heal
) -> SnapshotName:
    """Create the snapshot once all it stands on is durable; the caller holds the shared lock.

    Another writer may have named a moment ago what this one found, bases included, and not have
    made the names durable yet.
    """
    backend = store.backend
    looked: dict[str, Header | None] = {}
    _refuse_lost(backend, verify(store, need, heal, lambda: None, looked))
    store.sync(looked)
    for _ in range(_ATTEMPTS):
        name = fresh_name(backend, data, namespace, key)
        if create_snapshot(backend, name, data) == "committed":
            return name
    raise BackendError(f"{backend.url}: no free snapshot name in {_ATTEMPTS} attempts: try again")


def publish_remote(
    store: ObjectStore,
    data: bytes,
    namespace: str,
    key: str,
    need: Sequence[str],
    heal: Heal,
    patience: Patience,
) -> SnapshotName:
    """Announce, wait out a sweep, verify everything, create; start over when fenced."""
    backend, taken = store.backend, 0
    for _ in range(_ATTEMPTS):
        name = fresh_name(backend, data, namespace, key, taken)
        pending = Pending.announce(backend, name, patience)
        if pending is None:
            taken = name.time
            continue
        if read_sweep(backend).on:
            pending.withdraw()
            wait_idle(backend, patience)
            continue
        lost = verify(store, need, heal, pending.beat)
        if lost:
            pending.withdraw()
            _refuse_lost(backend, lost)
        outcome = create_snapshot(backend, name, data, patience)
        pending.withdraw()
        if outcome == "committed":
            return name
    raise BackendError(
        f"{backend.url}: fenced {_ATTEMPTS} times by prunes: this writer is slower than their"
        " limit for overdue commits"
    )


class Pending:
    """This writer's mark under ``pending/``; it, or a pruner whose fence stands, deletes it."""

    def __init__(
        self, backend: Backend, name: SnapshotName, data: bytes, version: str, patience: Patience
    ):
        self._backend, self._name, self._data, self._version = backend, name, data, version
        self._every, self._clock = patience.overdue / 10, patience.clock
        self._last = self._clock()

    @staticmethod
    def announce(backend: Backend, name: SnapshotName, patience: Patience) -> Pending | None:
        """The mark, or None when the name is taken."""
        data = secrets.token_hex(16).encode()
        try:
            version = until_answered(lambda: backend.create(name.pending, data), patience)
        except AlreadyExistsError:
            try:
                found, version = backend.get_versioned(name.pending)
            except ObjectNotFoundError:
                return None
            if found != data:
                return None
        return Pending(backend, name, data, version, patience)

    def beat(self) -> None:
        """Rewrite the mark if it is time; one that is gone was fenced: the create will see."""
        if self._clock() - self._last < self._every:
            return
        try:
            self._version = self._backend.replace(self._name.pending, self._data, self._version)
        except AlreadyExistsError:
            return
        except UnansweredError:
            try:
                self._version = self._backend.stat(self._name.pending).version
            except ObjectNotFoundError:
                return
        self._last = self._clock()

    def withdraw(self) -> None:
        """Take the mark away, however often it takes to hear so."""
        for _ in range(5):
            try:
                self._backend.delete(self._name.pending)
                return
            except UnansweredError:
                continue


def create_snapshot(
    backend: Backend, name: SnapshotName, data: bytes, patience: Patience = Patience()
) -> Literal["committed", "fenced"]:
    """Create the document with one request; without an answer, fence the name and look."""
    try:
        backend.create(name.path, data)
        return "committed"
    except AlreadyExistsError:
        return _look(backend, name, data)
    except UnansweredError:
        return fence(backend, name, data, patience)


def fence(
    backend: Backend, name: SnapshotName, data: bytes | None, patience: Patience
) -> Literal["committed", "fenced"]:
    """Spend the name with zero bytes, unless a document stands there (then it was committed).

    Raises
    ------
    UnansweredError
        No answer for long: whether the snapshot was made is not known.
    """
    try:
        try:
            until_answered(lambda: backend.create(name.path, FENCE), patience)
        except AlreadyExistsError:
            return _look(backend, name, data)
    except BackendError as e:  # a refusal says as little about the first request as silence
        raise UnansweredError(
            f"{backend.url} does not answer: whether {name} was committed is not known; look with"
            f" 'castore snapshots' once the store answers again ({e})"
        ) from e
    return "fenced"


def _look(
    backend: Backend, name: SnapshotName, data: bytes | None
) -> Literal["committed", "fenced"]:
    """Who was first under a taken name. What has vanished since was committed, and forgotten."""
    try:
        found = backend.get(name.path, 0, MAX_DOCUMENT + 1)
    except ObjectNotFoundError:
        return "committed"
    return "committed" if found and data in (None, found) else "fenced"


def _refuse_lost(backend: Backend, lost: Sequence[str]) -> None:
    if lost:
        raise ObjectNotFoundError(
            f"{len(lost)} objects the snapshot needs are missing from {backend.url} or damaged, and"
            f" could not be put back, {lost[0]} for one: nothing was committed; if they were sent a"
            " moment ago, the store or a proxy before it changes uploads (aws-chunked)"
        )
