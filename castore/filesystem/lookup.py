"""Paths to places. What may change is looked up anew each time; what cannot is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from castore.backend import Backend
from castore.cache import Cache
from castore.driver import Shown, Viewer, find_viewer
from castore.errors import InvalidInputError, SnapshotNotFoundError
from castore.filesystem import address
from castore.filesystem.address import LATEST, Address
from castore.filesystem.content import Content, Made
from castore.filesystem.place import Folders, Place, folders_of
from castore.load import read_tree
from castore.ranges import Blobs
from castore.repository import Repository
from castore.snapshot import Snapshot, SnapshotName, check_namespace
from castore.tree import File, Tree

_DOCUMENTS = 32 << 20  # bytes of snapshot documents kept
_ENTRIES = 400_000  # files and slices of the trees kept
_MADE = 64 << 20  # bytes kept that drivers made
_LOOKED_AT = 100  # snapshots of a namespace that are asked whether they have a layout
_TRIES = 5  # of a look whose snapshots are forgotten meanwhile


@dataclass(frozen=True, slots=True)
class _Indexed:
    tree: Tree
    folders: Folders

    def __len__(self) -> int:
        return sum(1 + len(f.slices) for _, f in self.tree.files()) + len(self.folders)


class Remembering(Repository):
    """A repository that reads each snapshot document and tree once, as long as it has room."""

    def __init__(self, backend: Backend, id: str):
        super().__init__(backend, id)
        self._documents: Cache[SnapshotName, Snapshot] = Cache(
            _DOCUMENTS, lambda s: len(s.encode())
        )
        self._indexed: Cache[str, _Indexed] = Cache(_ENTRIES, len)

    def snapshot(self, name: SnapshotName | str) -> Snapshot:
        """As `Repository.snapshot`."""
        found = self.resolve(name) if isinstance(name, str) else name
        return self._documents.get(found, lambda: super(Remembering, self).snapshot(found))

    def tree(self, snapshot: SnapshotName | Snapshot | str) -> Tree:
        """As `Repository.tree`."""
        if isinstance(snapshot, str):
            return super().tree(snapshot)
        return self.indexed(snapshot).tree

    def indexed(self, snapshot: SnapshotName | Snapshot) -> _Indexed:
        """A snapshot's tree with its folders."""
        document = snapshot if isinstance(snapshot, Snapshot) else self.snapshot(snapshot)
        return self._indexed.get(document.tree, lambda: self._index(document.tree))

    def _index(self, digest: str) -> _Indexed:
        tree = read_tree(self.store, digest, keep=False)  # kept here, with its folders
        return _Indexed(tree, folders_of(tree.entries))


class _Moment(Remembering):
    """The same repository, each namespace as it was when it was first listed here."""

    def __init__(self, whole: Remembering):
        super().__init__(whole.backend, whole.id)
        self._documents, self._indexed = whole._documents, whole._indexed
        self._listed: dict[tuple[str, int | None], list[SnapshotName]] = {}

    def snapshots(
        self, namespace: str | None = None, limit: int | None = None
    ) -> Iterator[SnapshotName]:
        """As `Repository.snapshots`."""
        if namespace is None:
            return super().snapshots(None, limit)
        key = namespace, limit
        if key not in self._listed:
            self._listed[key] = list(super().snapshots(namespace, limit))
        return iter(self._listed[key])


class Lookup:
    """One process's access to one repository.

    A namespace, ``latest``, a label and a layout are looked up at each call. A whole id stands for
    one document for ever, so it is looked up once.
    """

    def __init__(self, repository: Repository, limit: int):
        self.repository = Remembering(repository.backend, repository.id)
        self.blobs = Blobs(self.repository.store, limit)
        self._ids: dict[tuple[str, str], SnapshotName] = {}
        self._viewers: dict[str, Viewer | None] = {}
        self._made: Cache[tuple[str, str, str], Content] = Cache(_MADE, lambda c: c.size)

    # -- what there is

    def names(self, namespace: str) -> list[SnapshotName]:
        """A namespace's snapshots, newest first; of equal documents the newest alone.

        `FileNotFoundError` if there are none.
        """
        try:
            found = list(self.repository.snapshots(check_namespace(namespace)))
        except InvalidInputError as e:
            raise FileNotFoundError(f"castore://{namespace}: {e}") from e
        if not found:
            raise FileNotFoundError(self._none(namespace))
        return list({n.id: n for n in reversed(found)}.values())[::-1]

    def newest(self, namespace: str) -> SnapshotName:
        """A namespace's newest snapshot; `FileNotFoundError` if there is none."""
        try:
            return self.repository.resolve(f"{check_namespace(namespace)}@{LATEST}")
        except (InvalidInputError, SnapshotNotFoundError) as e:
            raise FileNotFoundError(self._none(namespace)) from e

    def _none(self, namespace: str) -> str:
        return (
            f"castore://{namespace}: {self.repository.url} holds no snapshot in such a namespace:"
            " 'castore snapshots' lists what there is"
        )

    # -- places

    def place(self, where: Address) -> Place:
        """What an address is relative to; `FileNotFoundError` if there is no such thing.

        Looked up again where a snapshot was forgotten between two steps.
        """
        look = self._snapshot if where.snapshot else self._layout
        for _ in range(_TRIES):
            try:
                return look(where)
            except SnapshotNotFoundError as e:
                self._ids.pop((where.namespace, where.snapshot), None)
                gone = e
        raise FileNotFoundError(f"castore://{where.root}: {gone}") from gone

    def _snapshot(self, where: Address) -> Place:
        name = self._find(where.namespace, where.snapshot)
        indexed = self.repository.indexed(name)
        return Place(where.root, indexed.tree.entries, indexed.folders, name.time, name)

    def _find(self, namespace: str, part: str) -> SnapshotName:
        if part == LATEST:
            return self.newest(namespace)
        wanted = address.label(part)
        if wanted is not None:
            return self._labelled(namespace, *wanted)
        known = self._ids.get((namespace, part))
        if known is not None:
            return known
        try:
            found = self.repository.resolve(f"{check_namespace(namespace)}@{part}")
        except (InvalidInputError, SnapshotNotFoundError) as e:
            raise FileNotFoundError(f"castore://{namespace}/{part}: {e}") from e
        if part in (found.id, found.name):
            self._ids[namespace, part] = found
        return found

    def _labelled(self, namespace: str, key: str, value: str) -> SnapshotName:
        for name in self.names(namespace):
            try:
                labels = self.repository.snapshot(name).labels
            except SnapshotNotFoundError:  # forgotten meanwhile
                continue
            if labels.get(key) == value:
                return name
        raise FileNotFoundError(
            f"castore://{namespace}: no snapshot has the label {key}={value}: 'castore snapshots'"
            " lists what there is"
        )

    def _layout(self, where: Address) -> Place:
        namespace = where.namespace
        moment = _Moment(self.repository)
        try:
            newest = next(moment.snapshots(check_namespace(namespace), limit=1), None)
        except InvalidInputError as e:
            raise FileNotFoundError(f"castore://{namespace}: {e}") from e
        if newest is None:
            raise FileNotFoundError(self._none(namespace))
        viewer = self._viewer(moment.snapshot(newest).driver) or self._earlier(moment, namespace)
        entries = viewer.view(moment, namespace) if viewer else {}
        for path in entries:
            if address.names_snapshot(namespace, path.partition("/")[0]):
                raise InvalidInputError(
                    f"castore://{namespace}: the driver shows {path!r}, which names a snapshot"
                )
        return Place(namespace, entries, folders_of(entries), newest.time)

    def _earlier(self, moment: Repository, namespace: str) -> Viewer | None:
        """The view of the newest snapshot that has one, where the very newest has none.

        Such as a folder that somebody committed beside an experiment's saves.
        """
        names = list(moment.snapshots(namespace, limit=_LOOKED_AT))
        with ThreadPoolExecutor(self.repository.backend.parallel) as pool:
            drivers = pool.map(lambda n: moment.snapshot(n).driver, names)
        return next(filter(None, map(self._viewer, dict.fromkeys(drivers))), None)

    def _viewer(self, driver: str) -> Viewer | None:
        """Looking for what is installed takes longer than a look at a layout: done once."""
        if driver not in self._viewers:
            self._viewers[driver] = find_viewer(driver)
        return self._viewers[driver]

    def content(self, place: Place, path: str, shown: Shown) -> Content:
        """What a driver shows under a path; bytes with a mark are made once for that mark.

        `FileNotFoundError` for what was forgotten since the layout was looked up.
        """
        try:
            if not shown.mark:
                return _content(shown)
            return self._made.get((place.root, path, shown.mark), lambda: _content(shown))
        except SnapshotNotFoundError as e:
            raise FileNotFoundError(f"castore://{place.name(path)}: {e}") from e


def _content(shown: Shown) -> Content:
    found = shown.load()
    if isinstance(found, File):
        return found
    return Made(found, hashlib.sha256(found).hexdigest())
