"""A repository: one URL that holds ``config.json``, ``objects/`` and ``snapshots/``.

with a folder of checkpoints in ./run:
    repository = Repository.init("s3://bucket/store")
    name = repository.commit(["run"], namespace="me")
    repository.checkout(str(name), "copy-of-run")
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from os import PathLike
from typing import Any

from castore import checkout as checkout_
from castore import document, forget
from castore.backend import Backend, Stat
from castore.backends import open_backend
from castore.commit import Options
from castore.errors import (
    AlreadyExistsError,
    BackendError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    ObjectNotFoundError,
    RepositoryNotFoundError,
    SnapshotNotFoundError,
)
from castore.hints import Hints
from castore.load import read_file, read_snapshot, read_tree
from castore.objects import ObjectStore
from castore.publish import (
    Patience,
    newest_name,
    publish_local,
    publish_remote,
    until_answered,
)
from castore.save import precheck, save
from castore.snapshot import MAX_DOCUMENT, Snapshot, SnapshotName, check_namespace, parse_name
from castore.source import Draft, is_within, scan
from castore.tree import File, Tree

CONFIG = "config.json"
LOCK_TIMEOUT = 600.0


def _silent(_: int) -> None:
    """No progress wanted."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What a commit did: the snapshot's name, its document and tree, bytes newly stored."""

    name: SnapshotName
    snapshot: Snapshot
    tree: Tree
    added: int


class Repository:
    """Snapshots of folders, every byte once. Make one with `init` or `open`.

    Readers never lock or wait. Safe for many threads and processes at once; works after a fork.
    """

    def __init__(self, backend: Backend, id: str, patience: Patience = Patience()):
        self.backend, self.id, self.patience = backend, id, patience
        self.store = ObjectStore(backend)
        self._probed: bool | None = None

    def __repr__(self) -> str:
        return f"Repository({self.backend.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Repository, (self.backend, self.id, self.patience)

    @property
    def url(self) -> str:
        return self.backend.url

    # -- life

    @staticmethod
    def init(
        url: str | PathLike[str],
        *,
        storage_options: dict[str, Any] | None = None,
        shared: bool = False,
    ) -> Repository:
        """Make an empty repository.

        Parameters
        ----------
        url : str or path
            A local path, ``s3://bucket/prefix``, or any fsspec URL.
        storage_options : dict, optional
            Passed to the fsspec file system; never stored or shown.
        shared : bool
            Local: let the folder's group write (setgid, group-writable, whatever the umask).

        Raises
        ------
        AlreadyExistsError
            There is a repository, or something else, at this URL.
        """
        backend = open_backend(str(url), storage_options)
        taken = next(iter(backend.list("", limit=1)), None) if _exists(backend) else None
        if taken is not None:
            what = "a repository" if _has_config(backend) else f"something else ({taken.name})"
            raise AlreadyExistsError(f"{backend.url} already holds {what}: nothing was changed")
        backend.prepare(shared=shared)
        id = uuid.uuid4().hex
        backend.create(CONFIG, document.encode("config", {"hash": "blake3-256", "id": id}))
        return Repository(backend, id)

    @staticmethod
    def open(
        url: str | PathLike[str], *, storage_options: dict[str, Any] | None = None
    ) -> Repository:
        """The repository at ``url``.

        Raises
        ------
        RepositoryNotFoundError
            The store says that there is none.
        FormatError
            It is of a newer format; nothing was touched.
        BackendError
            The store cannot be reached or refuses: never mistaken for "none".
        """
        backend = open_backend(str(url), storage_options)
        try:
            data = backend.get(CONFIG, 0, MAX_DOCUMENT + 1)
        except ObjectNotFoundError:
            raise _none(backend) from None
        except BackendError as e:
            if backend.kind == "local" and isinstance(
                e.__cause__, FileNotFoundError | NotADirectoryError
            ):
                raise _none(backend) from e
            raise
        where = f"{backend.url}/{CONFIG}"
        body = document.decode(data, "config", ["hash", "id"], where)
        if body["hash"] != "blake3-256" or not isinstance(body["id"], str):
            raise FormatError(f"{where}: unknown hash {body['hash']!r}: upgrade castore")
        return Repository(backend, body["id"])

    # -- reading

    def namespaces(self) -> list[str]:
        """All namespaces that hold snapshots, sorted."""
        return self.backend.folders("snapshots")

    def snapshots(
        self, namespace: str | None = None, limit: int | None = None
    ) -> Iterator[SnapshotName]:
        """Names of snapshots, newest first within each namespace; no document is read."""
        for ns in [check_namespace(namespace)] if namespace else self.namespaces():
            listed = _listed(self.backend, f"snapshots/{ns}", limit)
            names = (parse_name(stat.name) for stat in listed if stat.size > 0)
            yield from islice((n for n in names if n is not None), limit)

    def snapshot(self, name: SnapshotName | str) -> Snapshot:
        """The document of a snapshot; a name is checked against its digest."""
        found = self.resolve(name) if isinstance(name, str) else name
        try:
            data = self.backend.get(found.path, 0, MAX_DOCUMENT + 1)
        except ObjectNotFoundError:
            raise SnapshotNotFoundError(
                f"{found} is not in {self.url} (forgotten meanwhile?)"
            ) from None
        return read_snapshot(data, found)

    def resolve(self, text: str) -> SnapshotName:
        """The snapshot that ``text`` names.

        ``latest``, ``NAMESPACE@latest``, ``NAMESPACE@PREFIX`` or a unique prefix (4 characters
        or more) of an id.

        Raises
        ------
        SnapshotNotFoundError
            None, or several, match.
        """
        namespace, at, rest = text.rpartition("@")
        spaces = [check_namespace(namespace)] if at else self.namespaces()
        if rest == "latest":
            newest = [n for n in (newest_name(self.backend, s) for s in spaces) if n]
            if not newest:
                raise SnapshotNotFoundError(
                    f"{self.url} holds no snapshot{f' of {namespace!r}' if at else ''}"
                )
            return max(newest, key=lambda n: (n.time, n))
        if len(rest) < 4:
            raise SnapshotNotFoundError(
                f"{text!r}: give 'latest' or at least 4 characters of an id"
            )
        found = [
            n for s in spaces for n in self.snapshots(s) if n.id.startswith(rest) or n.name == rest
        ]
        if len({(n.namespace, n.id) for n in found}) != 1:  # equal ones are one document
            some = ", ".join(map(str, found[:5]))
            raise SnapshotNotFoundError(
                f"{text!r} names {len(found)} snapshots of {self.url}{': ' + some if some else ''}:"
                " 'castore snapshots' lists them"
            )
        return found[0]

    def tree(self, snapshot: SnapshotName | Snapshot | str) -> Tree:
        """The tree of a snapshot (``SNAPSHOT`` or ``SNAPSHOT:PATH``), verified.

        Raises
        ------
        SnapshotNotFoundError, ObjectNotFoundError, CorruptObjectError, FormatError
        """
        path = ""
        if isinstance(snapshot, str):
            snapshot, _, path = snapshot.partition(":")
        document = snapshot if isinstance(snapshot, Snapshot) else self.snapshot(snapshot)
        whole = read_tree(self.store, document.tree)
        if not path:
            return whole
        part = whole.below(path.strip("/"))
        if not part.entries:
            raise NotFoundError(f"there is no {path!r} in {snapshot}: 'castore ls' lists its paths")
        return part

    def read(
        self, snapshot: SnapshotName | str, path: str, start: int = 0, stop: int | None = None
    ) -> bytes:
        """Bytes ``[start, stop)`` of one file; only the blobs it touches are read, and verified."""
        tree = self.tree(snapshot)
        entry = tree.entries.get(path)
        if not isinstance(entry, File):
            raise NotFoundError(f"there is no file {path!r} in {snapshot}")
        return b"".join(self.read_file(entry, start, stop))

    def read_file(self, file: File, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """The bytes of a file of some tree, verified, slice by slice."""
        return read_file(self.store, file, start, stop)

    def checkout(
        self,
        snapshot: SnapshotName | str,
        target: str | PathLike[str],
        *,
        force: bool = False,
        sha256: bool = False,
        progress: Callable[[int], None] = _silent,
    ) -> Tree:
        """Write a snapshot, or ``SNAPSHOT:PATH`` of it, into a folder; see `castore.checkout`."""
        root = self._local_root()
        if root is not None and is_within(target, root):
            raise InvalidInputError(f"{target} lies in the repository itself: choose another")
        tree = self.tree(snapshot)
        checkout_.checkout(
            self.store, tree, str(target), force=force, sha256=sha256, progress=progress
        )
        return tree

    # -- writing

    def commit(
        self,
        what: Draft | Sequence[str | PathLike[str]],
        *,
        namespace: str = "main",
        labels: Mapping[str, str] | None = None,
        base: str | None = None,
        options: Options = Options(),
        progress: Callable[[int], None] = _silent,
    ) -> Commit:
        """Store files and make a snapshot of them; durable on return, or nothing happened.

        Parameters
        ----------
        what : Draft, or paths
            One folder gives its content, several paths keep their last names.
        namespace : str
        labels : mapping, optional
        base : str, optional
            ``SNAPSHOT[:PATH]`` to delta-code against.
        options : Options
        progress : callable
            Told source bytes as they are read.

        Raises
        ------
        InvalidInputError
            A name, label or kind of file that cannot be stored, or a file that changed meanwhile.
        BackendError
            The store or a source could not be read or written.
        """
        check_namespace(namespace)
        draft = what if isinstance(what, Draft) else Draft(scan(what, self._local_root()))
        draft = replace(draft, labels={**draft.labels, **(labels or {})}, base=base or draft.base)
        precheck(draft, namespace)
        self._probe()
        with self.shared_lock():
            earlier = self._earlier(namespace)
            hint = Hints(self.tree, draft.base)
            saved = save(self.store, draft, namespace, earlier, hint, options, progress)
            name = self.publish(saved.snapshot, saved.need, saved.heal)
        return Commit(name, saved.snapshot, saved.tree, saved.added)

    def republish(self, snapshot: Snapshot) -> SnapshotName:
        """Commit a document whose tree this repository holds: elsewhere, or once more.

        Raises
        ------
        ObjectNotFoundError
            Something it needs is gone: nothing was committed.
        """
        self._probe()
        with self.shared_lock():
            return self._again(snapshot)

    def _again(self, snapshot: Snapshot) -> SnapshotName:
        tree = read_tree(self.store, snapshot.tree)
        return self.publish(snapshot, [snapshot.tree, *tree.blobs()], list)

    def publish(
        self, snapshot: Snapshot, need: Sequence[str], heal: Callable[[Sequence[str]], list[str]]
    ) -> SnapshotName:
        """Make a document visible once all it needs is verified; the shared lock is held (local).

        ``heal`` is given digests that are broken, and gives back those it could not mend.
        """
        data, ns, key = snapshot.encode(), snapshot.namespace, snapshot.key
        if self.backend.kind == "local":
            return publish_local(self.store, data, ns, key, need, heal)
        return publish_remote(self.store, data, ns, key, need, heal, self.patience)

    def forget(self, snapshot: SnapshotName | str) -> SnapshotName:
        """Take a snapshot off the list; its objects stay for the grace period at least."""
        name = self.resolve(snapshot) if isinstance(snapshot, str) else snapshot
        forget.forget(self.backend, name, self.patience)
        return name

    def forgotten(self) -> Iterator[SnapshotName]:
        """What `unforget` can bring back."""
        for stat in self.backend.list("forgotten"):
            name = parse_name(stat.name)
            if name is not None:
                yield name

    def unforget(self, snapshot: SnapshotName | str) -> SnapshotName:
        """Commit a forgotten snapshot's document again, under a fresh name.

        Where an earlier attempt has done so and broke off, that name is given.

        Raises
        ------
        SnapshotNotFoundError
            It is not among the forgotten.
        ObjectNotFoundError
            Something it needs is gone: nothing was committed.
        """
        name = snapshot if isinstance(snapshot, SnapshotName) else self.resolve_forgotten(snapshot)
        self._probe()
        with self.shared_lock():
            try:
                data = self.backend.get(name.forgotten, 0, MAX_DOCUMENT + 1)
                document = read_snapshot(data, name)
            except ObjectNotFoundError:
                raise SnapshotNotFoundError(
                    f"{name} is not among the forgotten of {self.url}"
                ) from None
            fresh = self._elsewhere(name) or self._again(document)
            until_answered(lambda: self.backend.delete(name.forgotten), self.patience)
        return fresh

    def _elsewhere(self, name: SnapshotName) -> SnapshotName | None:
        """The same document under another name: what an `unforget` that broke off left.

        Under the same name it does not count: a `forget` may be about to delete that.
        """
        return next(
            (n for n in self.snapshots(name.namespace) if n.id == name.id and n != name), None
        )

    def resolve_forgotten(self, text: str) -> SnapshotName:
        """The forgotten snapshot that ``[NAMESPACE@]PREFIX`` names, as `resolve` does."""
        namespace, at, rest = text.rpartition("@")
        found = [
            n
            for n in self.forgotten()
            if n.id.startswith(rest) and len(rest) >= 4 and (not at or n.namespace == namespace)
        ]
        if len({(n.namespace, n.id) for n in found}) != 1:  # equal ones are one document
            raise SnapshotNotFoundError(
                f"{text!r} names {len(found)} forgotten snapshots of {self.url}"
            )
        return found[0]

    # -- within

    def _earlier(self, namespace: str) -> dict[str, File]:
        """The newest snapshot's files; an unreadable one gives no bases, not a failed commit."""
        newest = newest_name(self.backend, namespace)
        try:
            return dict(self.tree(newest).files()) if newest else {}
        except (NotFoundError, FormatError, IntegrityError):
            return {}

    def shared_lock(self) -> AbstractContextManager[None]:
        """What a local writer holds from before its first look-up until its snapshot is durable."""
        if self.backend.kind == "local":
            return self.backend.lock(exclusive=False, timeout=LOCK_TIMEOUT)
        return nullcontext()

    @property
    def many_writers(self) -> bool:
        """Whether the store honours conditions, so that several may write and prune at once."""
        return self._probe()

    def _probe(self) -> bool:
        if self._probed is None:
            self._probed = self.backend.probe()
            if not self._probed:
                logging.getLogger("castore").warning(
                    "%s: this store cannot keep two writers apart: write from one process at a"
                    " time; 'castore prune' needs --offline",
                    self.url,
                )
        return self._probed

    def _local_root(self) -> str | None:
        return self.url if self.backend.kind == "local" else None


def _listed(backend: Backend, folder: str, limit: int | None) -> Iterator[Stat]:
    """All of a folder; in pages where only some ``limit`` of it will be taken."""
    page = max(limit, 100) if limit is not None else None
    after: str | None = None
    while True:
        count = 0
        for stat in backend.list(folder, after=after, limit=page):
            yield stat
            after, count = stat.name, count + 1
        if page is None or count < page:
            return


def _exists(backend: Backend) -> bool:
    return backend.kind != "local" or os.path.isdir(backend.url)


def _has_config(backend: Backend) -> bool:
    try:
        backend.get(CONFIG, 0, 1)
    except ObjectNotFoundError:
        return False
    return True


def _none(backend: Backend) -> RepositoryNotFoundError:
    return RepositoryNotFoundError(
        f"there is no castore repository at {backend.url}: check the URL, or make one with"
        f" 'castore init -r {backend.url}'"
    )
