"""Check: find damage in a repository. It never deletes and never repairs; only `repair` does.

The looking is done in jobs (`castore.look`), here or by an executor's workers; what follows from
what they saw is decided here, in one order, so who did the work makes no difference. Memory grows
by the tables of `castore.table` alone, some 100 bytes an object, and by names of snapshots.
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
from castore.driver import find_driver
from castore.errors import (
    CastoreError,
    CorruptObjectError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    ObjectNotFoundError,
)
from castore.frame import Header, check_frame
from castore.load import read_tree
from castore.look import ALONE, ALONE_BYTES, BATCH, BATCH_BYTES, Fault, Kind, fault_of, forest
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
    """What a check looked at. ``unstable``: objects that read wrong once, then right."""

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
    progress: Callable[[int], None] = lambda _: None,
    report: CheckReport | None = None,
    executor: Executor | None = None,
) -> Iterator[Problem]:
    """Look at documents, trees, names, headers and chains; on request at every stored byte.

    Problems are the same, in the same order, whoever does the work: documents as they are listed,
    then objects by name, then layouts.

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
    progress : callable
        Told stored bytes as they are read.
    report : CheckReport, optional
        Filled in.
    executor : concurrent.futures.Executor, optional
        Who does the reading: threads, processes, or machines (Dask's ``Client.get_executor()``).
        Secrets do not travel: see `castore.workers`.

    Raises
    ------
    BackendError
        The store as a whole cannot be reached, or the executor's workers cannot reach it or keep
        dying; trouble with single objects is a Problem.
    """
    if sample is not None and not 0 < sample <= 1:
        raise InvalidInputError(f"sample of {sample}: expected a share over 0 and up to 1")
    yield from _Check(repository, report or CheckReport(), since, progress, executor).run(
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
    ):
        self._repository, self._report, self._since = repository, report, since
        self._progress, self._executor, self._lent = progress, executor, Lent(repository)
        self._trees: dict[str, list[SnapshotName]] = defaultdict(list)
        self._bad: dict[str, Fault] = {}

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
                    yield Problem(found.kind, name.path, found.detail, ((str(name), ""),))
                elif found is not None:
                    self._trees[found].append(name)
                    self._report.snapshots += 1

    def _names(self, strange: list[Problem]) -> Iterator[SnapshotName]:
        for stat in self._repository.backend.list("snapshots"):
            name = parse_name(stat.name)
            if name is None:
                strange.append(Problem("malformed", stat.name, "not the name of a snapshot"))
            elif stat.size and (self._since is None or name.time >= self._since):
                yield name

    def _read_trees(self) -> tuple[Needs, list[str]]:
        """What the trees need, and the trees' digests by their numbers."""
        needs, trees = Needs(), sorted(self._trees)
        needs.add(raw_of(trees), np.zeros(len(trees), np.int64), 0)
        jobs = ((self._lent, batch) for batch in _batches(trees, 16))
        number = 0
        for looked in results(self._executor, look.trees, jobs):
            self._report.unstable += looked.unstable
            for found in looked.found:
                if isinstance(found, Fault):
                    self._bad[trees[number]] = found
                else:
                    needs.add(*found, number)
                number += 1
        return needs, trees

    # -- structure

    def _structure(self, needs: Needs, trees: Sequence[str], versions: bool) -> None:
        self._table, strange = list_table(self._repository.store.list(), versions)
        for name in strange:
            self._bad.setdefault(name, Fault("malformed", "not the name of an object"))
        table, rows = self._table, needs.table()
        places = table.places(rows["digest"])
        here = places != NONE
        self._needed = np.zeros(len(table), np.bool_)
        self._needed[places[here]] = True
        wanted = np.arange(len(table)) if self._since is None else np.flatnonzero(self._needed)
        self._headers(wanted)
        for digest in rows["digest"][~here]:
            self._absent(digest.ljust(32, b"\0").hex(), "a snapshot needs it and it is not there")
        self._report.objects = len(wanted)
        self._alive = table.closure(self._needed)
        self._chains(wanted)
        if self._since is None:
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
        seen = np.zeros(len(table), np.bool_)
        while len(todo):
            seen[todo] = True
            jobs = ((self._lent, table.named(cut)) for cut in _cuts(todo))
            for cut, looked in zip(
                _cuts(todo), results(self._executor, look.headers, jobs), strict=True
            ):
                self._report.unstable += looked.unstable
                self._judge(cut, looked.found)
            below = table.bases[todo]
            below = np.unique(below[below != NONE])
            todo = below[~seen[below]]

    def _judge(self, places: Places, found: Sequence[Header | Fault | None]) -> None:
        self._table.learn(places, [h if isinstance(h, Header) else None for h in found])
        for place, header in zip(places.tolist(), found, strict=True):
            if isinstance(header, Fault):
                self._blame(place, header)
            elif header is None:
                if self._needed[place]:
                    self._blame(place, Fault("missing", "it vanished while the check ran"))
            elif header.frame_length != self._table.sizes[place]:
                size = self._table.sizes[place]
                detail = f"{size} bytes stored, its header says {header.frame_length}"
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

    def _chains(self, wanted: Places) -> None:
        """A delta's base must be there, of one length, and of less depth (so chains end).

        What nobody needs may lack its base: a commit or copy that died leaves such behind.
        """
        table = self._table
        for place, base in sorted(table.lost.items()):
            if self._alive[place] and table.digest(place) not in self._bad:
                self._absent(base, "it is the base of a stored delta")
        deltas = wanted[table.bases[wanted] != NONE]
        bases = table.bases[deltas]
        wrong = (table.lengths[bases] != table.lengths[deltas]) | (
            table.depths[bases] >= table.depths[deltas]
        )
        for place in deltas[table.known[bases] & wrong].tolist():
            base = table.digest(table.bases[place])
            detail = f"its base {base} has another length or no less depth"
            self._blame(place, Fault("malformed", detail))

    # -- data

    def _data(self, sample: float | None, state: str | None) -> None:
        table = self._table
        pool = np.ones(len(table), np.bool_) if self._since is None else self._alive.copy()
        pool[[p for p in map(table.place, self._bad) if p != NONE]] = False
        chosen = np.flatnonzero(pool)
        if sample is not None and len(chosen):
            count = max(1, round(sample * len(chosen)))
            chosen = np.sort(np.random.default_rng().choice(chosen, count, replace=False))
        with VerifiedState(state, self._repository.id) as done:
            if done.going_on:
                kept = ((table.digest(p), table.version(p)) for p in chosen.tolist())
                chosen = chosen[~done.has(kept)]

            def told(digest: str, size: int) -> None:
                self._progress(size)
                if state is not None:
                    done.add(digest, table.version(table.place(digest)))

            trouble = self._read(chosen, told)
            for digest in sorted(trouble, key=lambda d: (len(self._down(d)), d)):
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

    def _trouble(self, digest: str) -> None:
        """Read again what read wrong, and lay the blame where in the chain it belongs."""
        store = self._repository.store
        told = any(base in self._bad for base in self._down(digest)[1:])
        try:
            if told:
                check_frame(store.frame(digest), digest)
            else:
                store.read(digest)
        except CorruptObjectError as e:
            self._bad.setdefault(
                e.name if self._table.place(e.name) != NONE else digest, fault_of(e)
            )
        except (CastoreError, OSError) as e:
            culprit = self._out_of_reach(digest)
            place = self._table.place(culprit)
            alive = place != NONE and self._alive[place]
            if alive or not isinstance(e, ObjectNotFoundError):
                self._bad.setdefault(culprit, fault_of(e))
        else:
            if not told:
                self._report.unstable.append(digest)

    def _out_of_reach(self, digest: str) -> str:
        """The first object of a chain that the store does not give."""
        for at in self._down(digest):
            try:
                self._repository.store.frame(at)
            except (CastoreError, OSError):
                return at
        return digest

    def _down(self, digest: str) -> list[str]:
        """``digest`` and its bases, as far as headers tell."""
        places = list(self._table.down(self._table.place(digest)))
        if not places:
            return [digest]
        lost = self._table.lost.get(places[-1])
        return self._table.named(places) + ([lost] if lost else [])

    # -- telling

    def _problems(self) -> Iterator[Problem]:
        if not self._bad:
            return
        needed = self._who_needs()
        for name, fault in sorted(self._bad.items()):
            yield Problem(fault.kind, name, fault.detail, tuple(needed.get(name, ())))

    def _who_needs(self) -> dict[str, list[tuple[str, str]]]:
        """For each bad object all snapshots and paths that need it, directly or as a base."""
        result: dict[str, list[tuple[str, str]]] = defaultdict(list)
        affected = self._affected()
        for digest, names in self._trees.items():
            for b in self._bad_below([digest], affected):
                result[b] += [(str(n), "") for n in names]
            if digest in self._bad:
                continue
            try:
                tree = read_tree(self._repository.store, digest)
            except CastoreError:  # it was read before: the store fails now and then
                continue
            for path, file in tree.files():
                for b in self._bad_below(file.blobs(), affected):
                    result[b] += [(str(n), path) for n in names]
        return result

    def _affected(self) -> Mask:
        """The bad objects and all that stands on them."""
        mask = np.zeros(len(self._table), np.bool_)
        mask[[p for p in map(self._table.place, self._bad) if p != NONE]] = True
        mask[[p for p, base in self._table.lost.items() if base in self._bad]] = True
        return self._table.standing_on(mask)

    def _bad_below(self, digests: Sequence[str], affected: Mask) -> set[str]:
        places = self._table.places(raw_of(digests))
        if not len(affected):
            return set(digests) & self._bad.keys()
        chosen = np.flatnonzero((places == NONE) | affected[places])
        return {b for i in chosen.tolist() for b in self._down(digests[i]) if b in self._bad}

    def _layouts(self) -> Iterator[Problem]:
        jobs = ((self._lent, name) for names in self._trees.values() for name in names)
        for found in results(self._executor, _layout, jobs):
            yield from found


def _layout(lent: Lent, name: SnapshotName) -> list[Problem]:
    """A job: what the snapshot's driver finds broken."""
    found: list[Problem] = []
    try:
        driver = find_driver(lent.repository.snapshot(name).driver)
        for path, detail in driver.verify(lent.repository, name):
            found.append(Problem("layout", path, detail, ((str(name), path),)))
    except InvalidInputError as e:
        found.append(Problem("layout", name.path, str(e), ((str(name), ""),)))
    except (IntegrityError, NotFoundError, FormatError) as e:
        detail = f"could not be verified: {e}"
        found.append(Problem("layout", name.path, detail, ((str(name), ""),)))
    return found
