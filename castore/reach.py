"""What snapshots need: reading every document and tree, and closing over bases. Used by prune,
check, usage and copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import inf

from castore.errors import ObjectNotFoundError
from castore.frame import Header
from castore.load import read_snapshot, read_tree
from castore.objects import digest_of_name
from castore.repository import Repository
from castore.snapshot import MAX_DOCUMENT, Snapshot, SnapshotName, parse_name
from castore.tree import Tree


@dataclass(slots=True)
class Stored:
    """One object as a listing and its header say: ``size`` of the frame in bytes."""

    size: int
    modified: float
    version: str
    header: Header | None


@dataclass(slots=True)
class Roots:
    """Snapshots read so far. Documents and trees never change, so each is read once."""

    repository: Repository
    documents: dict[str, Snapshot] = field(default_factory=dict)
    needs: dict[str, frozenset[str]] = field(default_factory=dict)

    def read(
        self, folder: str, grace: float = inf, now: float = 0.0
    ) -> dict[SnapshotName, frozenset[str]]:
        """What each snapshot under ``folder`` needs: its tree and that one's blobs.

        Only documents whose ``grace`` is not over at ``now``. One that vanishes meanwhile, or
        whose grace ends, is left out (``snapshots``: it is in ``forgotten`` by then), since
        another prune may have taken what it needs. Anything else that cannot be read raises:
        what a damaged snapshot needs is not known, so nothing may be deleted beside it.
        """
        result = {}
        for stat in self.repository.backend.list(folder):
            name = parse_name(stat.name)
            if name is None or stat.size == 0 or stat.modified + grace < now:
                continue
            try:
                document = self._document(name, stat.name)
            except ObjectNotFoundError:
                continue
            try:
                result[name] = self.need(document.tree)
            except ObjectNotFoundError:
                if self._stands(stat.name, grace):
                    raise
        return result

    def _stands(self, path: str, grace: float) -> bool:
        """Whether a document is a root still."""
        backend = self.repository.backend
        try:
            return backend.stat(path).modified + grace >= backend.now()
        except ObjectNotFoundError:
            return False

    def _document(self, name: SnapshotName, path: str) -> Snapshot:
        if name.path not in self.documents:
            data = self.repository.backend.get(path, 0, MAX_DOCUMENT + 1)
            self.documents[name.path] = read_snapshot(data, name)
        return self.documents[name.path]

    def need(self, tree: str) -> frozenset[str]:
        """The tree's digest and its blobs'."""
        if tree not in self.needs:
            content: Tree = read_tree(self.repository.store, tree)
            self.needs[tree] = frozenset((tree, *content.blobs()))
        return self.needs[tree]


def list_objects(
    repository: Repository,
    known: Mapping[str, Stored] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Stored]:
    """Every object with its header as it is now; headers are reused where the version is the same.

    A damaged header is None: such an object has no base to close over, and `check` tells of it.
    """
    known = known or {}
    result: dict[str, Stored] = {}
    unread = []
    for stat in repository.store.list():
        digest = digest_of_name(stat.name)
        before = known.get(digest)
        same = before is not None and before.version == stat.version
        result[digest] = Stored(
            stat.size, stat.modified, stat.version, before.header if before and same else None
        )
        if not same:
            unread.append(digest)
    width = 1 if repository.backend.kind == "local" else repository.backend.parallel

    def one(digest: str) -> Header | None:
        progress(1)
        return repository.store.current_headers([digest])[digest]

    with ThreadPoolExecutor(width) as pool:
        for digest, header in zip(unread, pool.map(one, unread), strict=True):
            result[digest].header = header
    return result


def closure(objects: Mapping[str, Stored], roots: Iterable[str]) -> set[str]:
    """``roots`` and all bases below them; a visited set ends loops."""
    seen: set[str] = set()
    todo = list(roots)
    while todo:
        digest = todo.pop()
        if digest in seen:
            continue
        seen.add(digest)
        stored = objects.get(digest)
        if stored and stored.header and stored.header.base:
            todo.append(stored.header.base)
    return seen
