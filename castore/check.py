"""Check: find damage in a repository. It never deletes and never repairs; only `repair` does.

The looking is done in jobs (`castore.look`), here or by an executor's workers; what follows from
what they saw is decided here, in one order, so who did the work makes no difference. Memory grows
by the tables of `castore.table` alone, some 100 bytes an object (280 while they are sorted), and by
names of snapshots and digests of their trees. A part (`castore.parts`) has in its tables its own
objects and their bases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import numpy as np

from castore import look
from castore.errors import (
    CastoreError,
    CorruptObjectError,
    InvalidInputError,
    ObjectNotFoundError,
)
from castore.frame import Header, check_frame
from castore.look import (
    ALONE,
    ALONE_BYTES,
    BATCH,
    BATCH_BYTES,
    Fault,
    Kind,
    Looked,
    fault_of,
    forest,
)
from castore.needed import who_needs
from castore.parts import Part
from castore.repository import Repository
from castore.snapshot import SnapshotName, parse_name
from castore.state import VerifiedState
from castore.table import NONE, Mask, Needs, Places, Table, list_table, raw_of
from castore.workers import Lent, results

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """One defect: what is wrong with which object, and every snapshot and path that needs it."""

    kind: Kind
    object: str
    detail: str
    needed_by: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class CheckReport:
    """What a check looked at. ``unstable``: objects that read wrong once, then right.

    Of a part: its own objects, all snapshots, and no ``unreferenced`` (a delta in another part may
    be all that needs an object).
    """

    snapshots: int = 0
    objects: int = 0
    bytes_read: int = 0
    unreferenced: int = 0
    unstable: list[str] = field(default_factory=list)


def check(
    repository: Repository,
    *,
    read_data: bool = False,
    sample: float | None = None,
    since: int | None = None,
    state: str | None = None,
    layout: bool = False,
    part: tuple[int, int] | None = None,
    progress: Callable[[int], None] = lambda _: None,
    report: CheckReport | None = None,
    executor: Executor | None = None,
) -> Iterator[Problem]:
    """Look at documents, trees, names, headers and chains; on request at every stored byte.

    Problems are the same, in the same order, whoever does the work: documents as they are listed,
    then objects by name, then layouts.

    The parts of a repository that nobody changes tell together what one check of it tells: the
    same kinds of the same objects (several parts may tell of one base), needed by the same, once
    those of all parts are united; and their ``report.objects`` add up. With ``sample``, each part
    reads its share. A part's memory is that of its own objects and their bases, plus a name and a
    digest for each snapshot: it lists its own objects alone, and reads all documents and trees.

    Parameters
    ----------
    read_data : bool
        Decode and hash every object.
    sample : float, optional
        Decode and hash this share (0 to 1] of the objects, chosen at random.
    since : int, optional
        Only what snapshots from this time (microseconds) on need.
    state : str, optional
        A file that keeps what was verified, so that an interrupted run can go on.
    layout : bool
        Also let each snapshot's driver verify what its layout promises.
    part : (int, int), optional
        K and N: only part K (from 1) of N, at most 256.
    progress : callable
        Told stored bytes as they are read.
    report : CheckReport, optional
        Filled in.
    executor : concurrent.futures.Executor, optional
        Who does the reading: threads, processes, or machines (Dask's ``Client.get_executor()``).
        Secrets do not travel: see `castore.workers`.

    Raises
    ------
    InvalidInputError
        There is no such sample or part, or ``state`` is a file of something else.
    BackendError
        The store as a whole cannot be reached, or the executor's workers cannot reach it or keep
        dying; trouble with single objects is a Problem.
    """
    if sample is not None and not 0 < sample <= 1:
        raise InvalidInputError(f"sample of {sample}: expected a share over 0 and up to 1")
    chosen = Part(*part) if part else Part()
    yield from _Check(repository, report or CheckReport(), since, progress, executor, chosen).run(
        read_data, sample, state, layout
    )


def _batches(items: Iterable[T], size: int = BATCH) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def _cuts(places: Places) -> Iterator[Places]:
    return (places[i : i + BATCH] for i in range(0, len(places), BATCH))


class _Check:
    _table: Table
    _needed: Mask
    _alive: Mask
    _short: list[tuple[int, int, str]]

    def __init__(
        self,
        repository: Repository,
        report: CheckReport,
        since: int | None,
        progress: Callable[[int], None],
        executor: Executor | None,
        part: Part,
    ):
        self._repository, self._report, self._since = repository, report, since
        self._progress, self._executor, self._lent = progress, executor, Lent(repository)
        self._part = part
        self._trees: dict[str, list[SnapshotName]] = defaultdict(list)
        self._bad: dict[str, Fault] = {}
        self._unread: set[str] = set()

    def run(
        self, read_data: bool, sample: float | None, state: str | None, layout: bool
    ) -> Iterator[Problem]:
        yield from self._documents()
        needs, trees = self._read_trees()
        self._structure(needs, trees, versions=state is not None)
        if read_data or sample is not None:
            self._data(sample, state)
        self._tree_lengths()
        yield from self._problems()
        if layout:
            yield from self._layouts()

    # -- documents

    def _documents(self) -> Iterator[Problem]:
        strange: list[Problem] = []
        batches = list(_batches(self._names(strange)))
        yield from strange
        for names, looked in zip(
            batches,
            results(self._executor, look.documents, ((self._lent, names) for names in batches)),
            strict=True,
        ):
            self._report.unstable += looked.unstable
            for name, found in zip(names, looked.found, strict=True):
                if isinstance(found, Fault):
                    if self._part.holds_name(name.path):
                        yield Problem(found.kind, name.path, found.detail, ((str(name), ""),))
                elif found is not None:
                    self._trees[found].append(name)
                    self._report.snapshots += 1

    def _names(self, strange: list[Problem]) -> Iterator[SnapshotName]:
        for stat in self._repository.backend.list("snapshots"):
            name = parse_name(stat.name)
            if name is None and self._part.holds_name(stat.name):
                strange.append(Problem("malformed", stat.name, "not the name of a snapshot"))
            elif name and stat.size and (self._since is None or name.time >= self._since):
                yield name

    def _read_trees(self) -> tuple[Needs, list[str]]:
        """What the trees need, and the trees' digests by their numbers."""
        needs, trees, part = Needs(), sorted(self._trees), self._part
        own = [tree for tree in trees if part.holds(tree)]
        needs.add(raw_of(own), np.zeros(len(own), np.int64), 0)
        jobs = ((self._lent, batch, part) for batch in _batches(trees, 16))
        number = 0
        for looked in results(self._executor, look.trees, jobs):
            self._report.unstable += looked.unstable
            for found in looked.found:
                if isinstance(found, Fault):
                    self._bad[trees[number]] = found
                    self._unread.add(trees[number])
                else:
                    needs.add(*found, number)
                number += 1
        return needs, trees

    # -- structure

    def _structure(self, needs: Needs, trees: Sequence[str], versions: bool) -> None:
        listed = self._part.list(self._repository.backend)
        self._table, strange = list_table(listed, versions)
        for name in strange:
            self._bad.setdefault(name, Fault("malformed", "not the name of an object"))
        table, rows = self._table, needs.table()
        places = table.places(rows["digest"])
        here = places != NONE
        self._needed = table.mask(places[here])
        wanted = np.arange(len(table)) if self._since is None else np.flatnonzero(self._needed)
        self._headers(wanted)
        for digest in rows["digest"][~here]:
            self._absent(digest.ljust(32, b"\0").hex(), "a snapshot needs it and it is not there")
        self._report.objects = len(wanted)
        self._alive = table.closure(table.mask(places[here]))
        self._chains()
        if self._since is None and self._part.alone:
            self._report.unreferenced = int(len(table) - np.count_nonzero(self._alive))
        wanting = table.lengths[places] < rows["length"] if len(table) else here
        short = np.flatnonzero(here & wanting)
        short = short[table.known[places[short]]]
        self._short = [
            (int(places[i]), int(rows["length"][i]), trees[rows["tree"][i]]) for i in short
        ]

    def _tree_lengths(self) -> None:
        """No tree may want more of a blob than there is; a wrong blob is not the tree's fault."""
        for place, length, tree in self._short:
            blob = self._table.digest(place)
            if blob not in self._bad:
                has = self._table.lengths[place]
                detail = f"it wants {length} bytes of {blob}, which has {has}"
                self._bad.setdefault(tree, Fault("malformed", detail))

    def _headers(self, todo: Places) -> None:
        """Headers of ``todo`` and of all bases below them, each judged by itself."""
        table = self._table
        while len(todo):
            for cut, found in self._look(look.headers, todo):
                self._judge(cut, found)
            todo = table.below(todo)
            while not len(todo) and table.incomplete and not self._part.alone:
                todo = self._elsewhere()
        table.lose()

    def _elsewhere(self) -> Places:
        """Bases in other parts, which were not listed, join the table; gives what is below them."""
        table, gone = self._table, list[int]()
        new = table.adopt()
        for cut, found in self._look(look.elsewhere, new):
            there = np.array([f is not None for f in found])
            gone += cut[~there].tolist()
            table.sizes[cut[there]] = [f.size for f in found if f is not None]
            self._judge(cut[there], [f.header for f in found if f is not None])
        table.drop(gone)
        return table.below(new)

    def _look(
        self, job: Callable[[Lent, list[str]], Looked[T]], places: Places
    ) -> Iterator[tuple[Places, list[T]]]:
        jobs = ((self._lent, self._table.named(cut)) for cut in _cuts(places))
        looks = results(self._executor, job, jobs)
        for cut, looked in zip(_cuts(places), looks, strict=True):
            self._report.unstable += looked.unstable
            yield cut, looked.found

    def _judge(self, places: Places, found: Sequence[Header | Fault | None]) -> None:
        self._table.learn(places, [h if isinstance(h, Header) else None for h in found])
        for place, header in zip(places.tolist(), found, strict=True):
            if isinstance(header, Fault):
                self._blame(place, header)
            elif header is None:
                if self._needed[place]:
                    self._blame(place, Fault("missing", "it vanished while the check ran"))
            elif header.frame_length != self._table.sizes[place]:
                stored = f"{self._table.sizes[place]} bytes stored"
                detail = f"{stored}, its header says {header.frame_length}"
                self._blame(place, Fault("corrupt", detail))

    def _blame(self, place: int, fault: Fault) -> None:
        self._bad.setdefault(self._table.digest(place), fault)

    def _absent(self, digest: str, detail: str) -> None:
        """Judge an object that was not listed: it may have come since, or not be told."""
        try:
            if self._repository.store.header(digest) is None:
                self._bad.setdefault(digest, Fault("missing", detail))
        except (CastoreError, OSError) as e:
            self._bad.setdefault(digest, fault_of(e))

    def _chains(self) -> None:
        """A delta's base must be there, of one length, and of less depth (so chains end).

        What nobody needs may lack its base: a commit or copy that died leaves such behind.
        """
        table = self._table
        for place, base in sorted(table.lost.items()):
            if self._alive[place]:
                self._absent(base, "it is the base of a stored delta")
        for place in table.unsound().tolist():
            base = table.digest(table.bases[place])
            detail = f"its base {base} has another length or no less depth"
            self._blame(place, Fault("malformed", detail))

    # -- data

    def _data(self, sample: float | None, state: str | None) -> None:
        table = self._table
        pool = np.arange(len(table)) < table.listed
        if self._since is not None:
            pool &= self._alive
        pool[[p for p in map(table.place, self._bad) if p != NONE]] = False
        chosen = np.flatnonzero(pool)
        if sample is not None and len(chosen):
            count = max(1, round(sample * len(chosen)))
            chosen = np.sort(np.random.default_rng().choice(chosen, count, replace=False))
        of = "" if self._part.alone else f" part {self._part}"
        with VerifiedState(state, self._repository.id + of) as done:
            if done.going_on:
                kept = ((table.digest(p), table.version(p)) for p in chosen.tolist())
                chosen = chosen[~done.has(kept)]

            def told(digest: str, size: int) -> None:
                self._progress(size)
                if state is not None:
                    done.add(digest, table.version(table.place(digest)))

            trouble = self._suspects(self._read(chosen, told))
            for digest in sorted(trouble, key=lambda d: (len(self._table.chain(d)), d)):
                self._trouble(digest)
            done.finish()

    def _read(self, chosen: Places, told: Callable[[str, int], None]) -> list[str]:
        """Read the chosen objects' data; gives those that met trouble."""
        trouble: list[str] = []
        found: Iterator[look.Read]
        if self._executor is None:
            chains = forest(self._table, chosen, ALONE, ALONE_BYTES)
            found = (look.data(self._lent, some, told) for some in chains)
        else:
            chains = forest(self._table, chosen, BATCH, BATCH_BYTES)
            found = results(self._executor, look.data, ((self._lent, some) for some in chains))
        for read in found:
            trouble += read.trouble
            for digest, size in read.good:
                self._report.bytes_read += size
                if self._executor is not None:
                    told(digest, size)
        return trouble

    def _suspects(self, trouble: list[str]) -> set[str]:
        """What met trouble, and the bases in other parts below that and below what is bad."""
        below = (self._table.chain(digest)[1:] for digest in [*trouble, *self._bad])
        far = {base for bases in below for base in bases if self._table.is_far(base)}
        return far.difference(self._bad).union(trouble)

    def _trouble(self, digest: str) -> None:
        """Read again what read wrong, and lay the blame where in the chain it belongs."""
        store = self._repository.store
        told = any(base in self._bad for base in self._table.chain(digest)[1:])
        try:
            check_frame(store.frame(digest), digest)
            if not told:
                store.read(digest)
        except CorruptObjectError as e:
            self._bad.setdefault(
                e.name if self._table.place(e.name) != NONE else digest, fault_of(e)
            )
        except (CastoreError, OSError) as e:
            culprit = look.out_of_reach(store, self._table.chain(digest)) or digest
            place = self._table.place(culprit)
            alive = place != NONE and self._alive[place]
            if alive or not isinstance(e, ObjectNotFoundError):
                self._bad.setdefault(culprit, fault_of(e))
        else:
            if not told and not self._table.is_far(digest):
                self._report.unstable.append(digest)

    # -- telling

    def _problems(self) -> Iterator[Problem]:
        if not self._bad:
            return
        store, table = self._repository.store, self._table
        needed = who_needs(store, table, self._trees, self._unread, self._bad)
        others = {t for t in self._unread if not self._part.holds(t) and table.place(t) == NONE}
        others.difference_update(table.lost.values())  # no trees of ours, and no bases here
        for name, fault in sorted(self._bad.items()):
            if name not in others:
                yield Problem(fault.kind, name, fault.detail, tuple(needed.get(name, ())))

    def _layouts(self) -> Iterator[Problem]:
        own = [n for ns in self._trees.values() for n in ns if self._part.holds_name(n.path)]
        jobs = ((self._lent, name) for name in own)
        for name, found in zip(own, results(self._executor, look.layout, jobs), strict=True):
            for what, detail, path in found:
                yield Problem("layout", what, detail, ((str(name), path),))
