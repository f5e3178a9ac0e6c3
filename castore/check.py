"""Check: find damage in a repository. It never deletes and never repairs; only `repair` does."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

from castore.checkout import workers
from castore.digest import Buffer
from castore.driver import find_driver
from castore.errors import (
    BackendError,
    CastoreError,
    CorruptObjectError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    ObjectNotFoundError,
)
from castore.frame import Header, check_frame, parse_header
from castore.load import read_snapshot, read_tree
from castore.objects import digest_of_name, object_name
from castore.reach import Stored
from castore.repository import Repository
from castore.snapshot import Snapshot, SnapshotName, parse_name
from castore.state import VerifiedState
from castore.tree import Tree
from castore.walk import Walker

T = TypeVar("T")
Kind = Literal["missing", "corrupt", "unreadable", "malformed", "layout"]


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
) -> Iterator[Problem]:
    """Look at documents, trees, names, headers and chains; on request at every stored byte.

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

    Raises
    ------
    BackendError
        The store as a whole cannot be reached; trouble with single objects is a Problem.
    """
    if sample is not None and not 0 < sample <= 1:
        raise InvalidInputError(f"sample of {sample}: expected a share over 0 and up to 1")
    yield from _Check(repository, report or CheckReport(), since, progress).run(
        read_data, sample, state, layout
    )


class _Check:
    def __init__(
        self,
        repository: Repository,
        report: CheckReport,
        since: int | None,
        progress: Callable[[int], None],
    ):
        self._repository, self._report, self._since = repository, report, since
        self._progress = progress
        self._trees: dict[str, list[SnapshotName]] = defaultdict(list)
        self._needed: set[str] = set()
        self._lengths: dict[str, tuple[int, str]] = {}
        self._objects: dict[str, Stored] = {}
        self._bad: dict[str, tuple[Kind, str]] = {}

    def run(
        self, read_data: bool, sample: float | None, state: str | None, layout: bool
    ) -> Iterator[Problem]:
        yield from self._documents()
        self._read_trees()
        self._structure()
        if read_data or sample is not None:
            self._data(sample, state)
        self._tree_lengths()
        yield from self._problems()
        if layout:
            yield from self._layouts()

    # -- documents

    def _documents(self) -> Iterator[Problem]:
        for stat in self._repository.backend.list("snapshots"):
            name = parse_name(stat.name)
            if name is None:
                yield Problem("malformed", stat.name, "not the name of a snapshot")
                continue
            if stat.size == 0 or (self._since is not None and name.time < self._since):
                continue
            problem = self._document(name)
            if problem:
                yield problem

    def _document(self, name: SnapshotName) -> Problem | None:
        def read() -> Snapshot:
            return read_snapshot(self._repository.backend.get(name.path), name)

        needed = ((str(name), ""),)
        try:
            document = self._twice(name.path, read)
        except ObjectNotFoundError:
            return None
        except (IntegrityError, FormatError, BackendError) as e:
            return Problem(_kind(e), name.path, str(e), needed)
        self._report.snapshots += 1
        if document.namespace != name.namespace:
            return Problem("malformed", name.path, f"says namespace {document.namespace!r}", needed)
        self._trees[document.tree].append(name)
        return None

    def _twice(self, what: str, read: Callable[[], T]) -> T:
        """``read()``, once more if it gave something damaged: a bad read is not a bad object."""
        try:
            return read()
        except (IntegrityError, FormatError):
            result = read()
            self._report.unstable.append(what)
            return result

    def _read_trees(self) -> None:
        for digest in self._trees:
            self._needed.add(digest)
            try:
                tree = self._twice(digest, partial(read_tree, self._repository.store, digest))
            except (CastoreError, OSError) as e:
                self._bad[digest] = _kind(e), str(e)
                continue
            self._needed.update(tree.blobs())
            for blob, length in tree.blob_lengths().items():
                self._lengths[blob] = max(self._lengths.get(blob, (0, "")), (length, digest))

    # -- structure

    def _structure(self) -> None:
        for stat in self._repository.store.list():
            digest = digest_of_name(stat.name)
            if stat.name != object_name(digest):
                self._bad.setdefault(stat.name, ("malformed", "not the name of an object"))
                continue
            self._objects[digest] = Stored(stat.size, stat.modified, stat.version, None)
        wanted = self._objects if self._since is None else self._needed
        self._headers([d for d in wanted if d in self._objects])
        for digest in self._needed - self._objects.keys():
            self._absent(digest, "a snapshot needs it and it is not there")
        self._report.objects = len(wanted)
        alive = self._above(self._needed)
        for digest in wanted:
            self._chain(digest, digest in alive)
        if self._since is None:
            self._report.unreferenced = len(self._objects.keys() - alive)

    def _tree_lengths(self) -> None:
        """No tree may want more of a blob than there is; a wrong blob is not the tree's fault."""
        for blob, (length, tree) in self._lengths.items():
            stored = self._objects.get(blob)
            if blob in self._bad or not stored or not stored.header:
                continue
            if stored.header.content_length < length:
                has = stored.header.content_length
                detail = f"it wants {length} bytes of {blob}, which has {has}"
                self._bad.setdefault(tree, ("malformed", detail))

    def _current(self, digests: Sequence[str]) -> dict[str, Header | None]:
        """Headers as they are now; None where one is missing, damaged, newer or unreadable."""
        store = self._repository.store
        try:
            return store.current_headers(digests)
        except (FormatError, BackendError):
            result: dict[str, Header | None] = {}
            for digest in digests:
                try:
                    result.update(store.current_headers([digest]))
                except (FormatError, BackendError):
                    result[digest] = None
            return result

    def _headers(self, digests: Sequence[str]) -> None:
        """Headers of ``digests`` and of all bases below them, each judged by itself."""
        todo = list(digests)
        seen = set(todo)
        while todo:
            found = self._current(todo)
            below = []
            for digest, header in found.items():
                stored = self._objects[digest]
                stored.header = header
                if header is None:
                    self._judge_header(digest)
                elif header.frame_length != stored.size:
                    detail = f"{stored.size} bytes stored, its header says {header.frame_length}"
                    self._bad.setdefault(digest, ("corrupt", detail))
                if header and header.base in self._objects and header.base not in seen:
                    seen.add(header.base)
                    below.append(header.base)
            todo = below

    def _judge_header(self, digest: str) -> None:
        name = object_name(digest)
        try:
            header = self._twice(
                name, lambda: parse_header(self._repository.backend.get(name, 0, 64), digest)
            )
            self._objects[digest].header = header
        except ObjectNotFoundError:
            if digest in self._needed:
                self._bad.setdefault(digest, ("missing", "it vanished while the check ran"))
        except (CastoreError, OSError) as e:
            self._bad.setdefault(digest, (_kind(e), str(e)))

    def _absent(self, digest: str, detail: str) -> None:
        """Judge an object that was not listed: it may have come since, or not be told."""
        try:
            if self._repository.store.header(digest) is None:
                self._bad.setdefault(digest, ("missing", detail))
        except (CastoreError, OSError) as e:
            self._bad.setdefault(digest, (_kind(e), str(e)))

    def _chain(self, digest: str, alive: bool) -> None:
        """A delta's base must be there, of one length, and of less depth (so chains end).

        What nobody needs may lack its base: a commit or copy that died leaves such behind.
        """
        stored = self._objects.get(digest)
        header = stored.header if stored else None
        if header is None or not header.base or digest in self._bad:
            return
        below = self._objects.get(header.base)
        if below is None:
            if alive:
                self._absent(header.base, "it is the base of a stored delta")
        elif below.header and (
            below.header.content_length != header.content_length
            or below.header.depth >= header.depth
        ):
            self._bad[digest] = (
                "malformed",
                f"its base {header.base} has another length or no less depth",
            )

    def _above(self, roots: Iterable[str]) -> set[str]:
        """``roots`` and every base below them."""
        seen: set[str] = set()
        todo = list(roots)
        while todo:
            digest = todo.pop()
            if digest not in seen:
                seen.add(digest)
                stored = self._objects.get(digest)
                if stored and stored.header and stored.header.base:
                    todo.append(stored.header.base)
        return seen

    # -- data

    def _data(self, sample: float | None, state: str | None) -> None:
        pool = self._objects if self._since is None else self._above(self._needed)
        chosen = sorted(d for d in pool if d in self._objects and d not in self._bad)
        if sample is not None:
            count = max(1, round(sample * len(chosen))) if chosen else 0
            chosen = sorted(random.SystemRandom().sample(chosen, count))
        with VerifiedState(state, self._repository.id) as done:
            todo = [d for d in chosen if not done.has(d, self._objects[d].version)]

            def sink(digest: str, content: Buffer, frame: bytes) -> None:
                self._report.bytes_read += len(frame)
                self._progress(len(frame))
                done.add(digest, self._objects[digest].version)

            Walker(self._repository.store, todo, sink, self._trouble).run(
                self._forest(todo), workers(self._repository.backend), self._length
            )
            done.finish()

    def _length(self, digest: str) -> int:
        header = self._objects[digest].header
        return header.content_length if header else 0

    def _trouble(self, digest: str, error: CastoreError) -> None:
        """Read again what read wrong, and lay the blame where in the chain it belongs."""
        alive = self._above(self._needed)
        told = any(b in self._bad for b in self._above([digest]) - {digest})
        try:
            if told:
                check_frame(self._repository.store.frame(digest), digest)
            else:
                self._repository.store.read(digest)
        except CorruptObjectError as e:
            self._bad.setdefault(e.name if e.name in self._objects else digest, (_kind(e), str(e)))
        except (CastoreError, OSError) as e:
            culprit = self._out_of_reach(digest)
            if culprit in alive or not isinstance(e, ObjectNotFoundError):
                self._bad.setdefault(culprit, (_kind(e), str(e)))
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
        seen: list[str] = []
        while digest and digest not in seen:
            seen.append(digest)
            stored = self._objects.get(digest)
            digest = stored.header.base if stored and stored.header else ""
        return seen

    def _forest(self, digests: Sequence[str]) -> list[list[str]]:
        """Each chain's root followed by all that hangs on it, depth first."""
        children: dict[str, list[str]] = defaultdict(list)
        roots = []
        chosen = set(digests)
        for digest in digests:
            header = self._objects[digest].header
            if header and header.base in chosen:
                children[header.base].append(digest)
            else:
                roots.append(digest)
        groups = []
        for root in roots:
            group, todo = [], [root]
            while todo:
                at = todo.pop()
                group.append(at)
                todo += children.get(at, [])
            groups.append(group)
        return groups

    # -- telling

    def _problems(self) -> Iterator[Problem]:
        if not self._bad:
            return
        needed = self._who_needs(set(self._bad))
        for name, (kind, detail) in sorted(self._bad.items()):
            yield Problem(kind, name, detail, tuple(needed.get(name, ())))

    def _who_needs(self, bad: set[str]) -> dict[str, list[tuple[str, str]]]:
        """For each bad object all snapshots and paths that need it, directly or as a base."""
        result: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for digest, names in self._trees.items():
            for b in self._above([digest]) & bad:
                result[b] += [(str(n), "") for n in names]
            if digest in bad:
                continue
            try:
                tree: Tree = read_tree(self._repository.store, digest)
            except CastoreError:  # it was read before: the store fails now and then
                continue
            for path, file in tree.files():
                for b in self._above(file.blobs()) & bad:
                    result[b] += [(str(n), path) for n in names]
        return result

    def _layouts(self) -> Iterator[Problem]:
        for names in self._trees.values():
            for name in names:
                yield from self._layout(name)

    def _layout(self, name: SnapshotName) -> Iterator[Problem]:
        try:
            driver = find_driver(self._repository.snapshot(name).driver)
            for path, detail in driver.verify(self._repository, name):
                yield Problem("layout", path, detail, ((str(name), path),))
        except InvalidInputError as e:
            yield Problem("layout", name.path, str(e), ((str(name), ""),))
        except (IntegrityError, NotFoundError, FormatError) as e:
            yield Problem("layout", name.path, f"could not be verified: {e}", ((str(name), ""),))


def _kind(error: BaseException) -> Kind:
    if isinstance(error, ObjectNotFoundError):
        return "missing"
    if isinstance(error, FormatError):
        return "malformed"
    return "corrupt" if isinstance(error, IntegrityError) else "unreadable"
