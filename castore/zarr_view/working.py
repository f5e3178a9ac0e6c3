"""A snapshot with changes staged upon it, and the commit of them; keys and bytes, no zarr.

A key is a path of the snapshot, relative to ``path``. What is staged hides what is committed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice, takewhile

from castore.digest import Buffer
from castore.errors import AlreadyExistsError, InvalidInputError
from castore.publish import newest_name
from castore.ranges import Blobs, Extent
from castore.repository import Repository
from castore.snapshot import SnapshotName, check_namespace
from castore.source import Draft, SourceEntry
from castore.tree import Entry, File, Folder, Tree, check_path
from castore.zarr_view.staging import Span, Staging, check_key, marked


@dataclass(frozen=True)
class Base:
    """A snapshot's tree, and its files below ``path`` by key; without a name it is empty.

    ``said`` is how a staging folder names it.
    """

    said: str
    name: SnapshotName | None = None
    entries: Mapping[str, Entry] = field(default_factory=dict)
    files: Mapping[str, File] = field(default_factory=dict)
    keys: tuple[str, ...] = ()

    @staticmethod
    def of(said: str, name: SnapshotName | None, tree: Tree, path: str) -> Base:
        head = f"{path}/" if path else ""
        files = {p[len(head) :]: f for p, f in tree.files() if p.startswith(head)}
        return Base(said, name, tree.entries, files, tuple(sorted(files)))


class Working:
    """The values of a snapshot, and changes to them.

    Parameters
    ----------
    repository : Repository
    namespace : str
        Where commits go.
    snapshot : SnapshotName, str or None
        What to stand on. None: what the staging folder was begun upon, else the newest of the
        namespace, else nothing. Empty text: nothing.
    path : str
        The folder of the snapshot whose files are the values; the rest of it stays as it is.
    staging : Staging

    Raises
    ------
    InvalidInputError
        The staging folder holds changes to something else.
    """

    def __init__(
        self,
        repository: Repository,
        namespace: str,
        snapshot: SnapshotName | str | None,
        path: str,
        staging: Staging,
    ):
        self.repository, self.namespace = repository, check_namespace(namespace)
        self.path = check_path(path) if path else ""
        self.staging, self._blobs = staging, Blobs(repository.store)
        name = self._chosen(snapshot)
        self.base = self._base(name, repository.tree(name) if name is not None else Tree())
        self._check_base()

    def _chosen(self, snapshot: SnapshotName | str | None) -> SnapshotName | None:
        if isinstance(snapshot, SnapshotName):
            return snapshot
        if snapshot is not None:
            return self.repository.resolve(snapshot) if snapshot else None
        place, _, held = (self.staging.base() or "").rpartition(" ")
        if place != self._place():
            return newest_name(self.repository.backend, self.namespace)
        namespace, _, name = held.partition("/")
        return SnapshotName(namespace, name) if name else None

    def _place(self) -> str:
        return f"{self.repository.id} {self.namespace} {self.path or '.'}"

    def _base(self, name: SnapshotName | None, tree: Tree) -> Base:
        said = f"{name.namespace}/{name.name}" if name else "-"
        return Base.of(f"{self._place()} {said}", name, tree, self.path)

    def _check_base(self, *, claim: bool = False) -> None:
        """`InvalidInputError` where the staging folder stands on something else (by now)."""
        mine = self.base.said
        held = self.staging.claim(mine) if claim else self.staging.base()
        if held not in (None, mine):
            raise InvalidInputError(
                f"{self.staging.folder} holds changes to {held!r}, and this store stands on"
                f" {mine!r}: it was committed meanwhile, or belongs to another store; open the"
                " store again, or give it another folder"
            )

    def same(self, other: Working) -> bool:
        """Whether both show the same values, written ones too where they stage in one folder."""
        mine, theirs = self.staging, other.staging
        quiet = mine.folder is None and theirs.folder is None
        shared = mine.shared and theirs.shared and mine.folder == theirs.folder
        return self.base.said == other.base.said and (quiet or shared)

    def claim(self) -> None:
        """Bind the staging folder to the base, so that another process opens the same."""
        self._check_base(claim=True)

    # -- reading

    def read(self, key: str, span: Span) -> bytes | None:
        """Bytes of a value, verified; None only where there is no such key.

        Raises
        ------
        ObjectNotFoundError, CorruptObjectError
            It is in the snapshot, and its bytes are lost or damaged.
        """
        self._look()
        staged = self.staging.read(key, span)
        if staged is not None:
            return staged
        file = self._committed(key)
        if file is None:
            return None
        return self._blobs.read(Extent.of(file), *span(file.size))

    def size(self, key: str) -> int | None:
        """Bytes of a value, or None."""
        self._look()
        staged = self.staging.size(key)
        if staged is not None:
            return staged
        file = self._committed(key)
        return None if file is None else file.size

    def _committed(self, key: str) -> File | None:
        base = self.base
        return None if self.staging.is_gone(base.said, key) else base.files.get(key)

    def _look(self) -> None:
        """Where other processes stage too, one of them may have committed."""
        if self.staging.shared and self.staging.base() not in (None, self.base.said):
            with self.staging.lock():  # a thread of our own may be in the middle of it
                self._check_base()

    def keys(self, prefix: str = "") -> list[str]:
        """All keys that begin with ``prefix``, sorted."""
        self._look()
        base = self.base
        gone = self.staging.gone(base.said)
        found = {k for k in _starting(base.keys, prefix) if not gone(k)}
        found.update(k for k in self.staging.staged() if k.startswith(prefix))
        return sorted(found)

    # -- changing

    def version(self, key: str) -> str:
        """What changes whenever the value does, by whomever: for `write` and `delete`."""
        staged = self.staging.version(key)
        if staged is not None:
            return staged
        return "none" if self._committed(key) is None else self.base.said

    def write(
        self, key: str, data: Buffer, *, new: bool = False, replaces: str | None = None
    ) -> bool:
        """Stage a value; with ``new`` only where there is none. Whether it was staged.

        Raises
        ------
        InvalidInputError
            No snapshot can hold such a key, or the staging folder is another's by now.
        AlreadyExistsError
            The value's version is not ``replaces`` any more: nothing was staged.
        """
        check_key(key)
        with self.staging.lock():
            self._check_base(claim=True)
            if new and self._committed(key) is not None:
                return False
            self._check_version(key, replaces)
            return self.staging.write(key, data, new=new)

    def delete(self, key: str, *, replaces: str | None = None) -> None:
        """Stage a deletion; a key that is not there is no error. ``replaces`` as for `write`."""
        with self.staging.lock():
            if self.staging.shared:
                self._check_base()
            self._check_version(key, replaces)
            if key in self.base.files:
                self._check_base(claim=True)
                self.staging.mark_gone(self.base.said, key)
            self.staging.drop(key)

    def _check_version(self, key: str, replaces: str | None) -> None:
        if replaces is not None and self.version(key) != replaces:
            raise AlreadyExistsError(
                f"{key!r} was written by somebody else after it was read to be changed (two"
                " writers of one shard?): nothing was written; write that part again"
            )

    def commit(self, labels: Mapping[str, str]) -> SnapshotName:
        """Make a snapshot of the base with all changes, and stand on it.

        Raises
        ------
        AlreadyExistsError
            The namespace's newest snapshot is not what was written upon: nothing is committed,
            and the changes stay staged.
        """
        base = self.base  # another thread may commit as well: one of the two is refused
        self._check_base()
        self._check_newest(newest_name(self.repository.backend, self.namespace))
        staged = self.staging.sources()
        marks = self.staging.marks(base.said)
        parents = (str(base.name),) if base.name else ()
        draft = Draft(
            self._entries(base, staged, marks), key="zarr", labels=labels, parents=parents
        )
        made = self.repository.commit(draft, namespace=self.namespace)
        self._check_alone(made.name, base.name)
        with self._lock():
            self.base = self._base(made.name, made.tree)
            self.staging.move(base.said, marks, self.base.said, staged)
        return made.name

    def _lock(self) -> AbstractContextManager[None]:
        """The staging folder's lock; where nothing was staged there is nothing to hold."""
        return nullcontext() if self.staging.folder is None else self.staging.lock()

    def _entries(
        self, base: Base, staged: Mapping[str, SourceEntry], marks: frozenset[str]
    ) -> dict[str, SourceEntry]:
        gone = marked(marks)
        head = f"{self.path}/" if self.path else ""
        lost = {head + k for k in base.files if gone(k)}
        kept: dict[str, SourceEntry] = {p: e for p, e in base.entries.items() if p not in lost}
        return _laid({**kept, **{head + k: f for k, f in staged.items()}})

    def _check_newest(self, newest: SnapshotName | None) -> None:
        mine = self.base.name
        expected = mine if mine is not None and mine.namespace == self.namespace else None
        if newest != expected:
            raise self._conflict(newest)

    def _check_alone(self, made: SnapshotName, since: SnapshotName | None) -> None:
        """Of two that commit upon one base at the same moment, at most one stays."""
        least = since.time if since is not None and since.namespace == self.namespace else 0
        names = self.repository.snapshots(self.namespace)
        other = next((n for n in takewhile(lambda n: n.time > least, names) if n != made), None)
        if other is not None:
            self.repository.forget(made)
            raise self._conflict(other)

    def _conflict(self, newest: SnapshotName | None) -> AlreadyExistsError:
        return AlreadyExistsError(
            f"this store stands on {self.base.name or 'nothing'}, and the newest snapshot of"
            f" namespace {self.namespace!r} is {newest or 'gone'}: nothing was committed; open a"
            " store on the newest and write to that, or commit to a namespace of your own"
        )


def _starting(keys: Sequence[str], prefix: str) -> Iterator[str]:
    """Those of sorted ``keys`` that begin with ``prefix``."""
    first = bisect_left(keys, prefix)
    return takewhile(lambda k: k.startswith(prefix), islice(keys, first, None))


def _laid(entries: Mapping[str, SourceEntry]) -> dict[str, SourceEntry]:
    """``entries`` without empty folders that have something in them now."""
    used = {p[:i] for p in entries for i in range(len(p)) if p[i] == "/"}
    return {p: e for p, e in entries.items() if not (isinstance(e, Folder) and p in used)}
