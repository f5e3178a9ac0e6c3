"""Where the files of one receipt are read from: a folder, any fsspec URL, or a snapshot.

Only names that the layout fixes are ever read, never one that a receipt gives.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from castore import (
    BackendError,
    CastoreError,
    FormatError,
    InvalidInputError,
    NotFoundError,
    ObjectNotFoundError,
    Repository,
    SnapshotName,
)
from castore.backend import Backend, check_name
from castore.backends import open_backend
from castore.workers import Lent
from castore_receipts.destination import (
    CHECKPOINTS,
    DRIVER,
    FINAL,
    OWN_REPOSITORY,
    RECEIPT,
    STATE,
)

MAX_FILE = 8 << 30
"""Bytes of the largest file that is read."""

_AT_ONCE = 8

_STEP = re.compile(r"step_[0-9]{7,19}")
_RUN = re.compile(r"evaluation_[0-9]{4,19}")
_SNAPSHOT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*@[0-9a-z]+")


class Source(Protocol):
    """The files of one receipt. ``name`` is for people, ``folder`` the last part of its path."""

    name: str
    folder: str
    holds_state: bool

    def read(self, file: str) -> bytes:
        """All bytes; `ObjectNotFoundError`, `BackendError` or `IntegrityError` otherwise."""

    def sizes(self, folder: str) -> dict[str, int]:
        """The bytes of every file below ``folder``, by relative path; empty where it is not."""


class FolderSource:
    """A folder on a backend; symbolic links in it are refused by the local one."""

    holds_state = False

    def __init__(self, backend: Backend, path: str):
        self._backend, self._path = backend, path
        self.name = f"{backend.url.rstrip('/')}/{path}".rstrip("/")
        self.folder = self.name.rpartition("/")[2]

    def read(self, file: str) -> bytes:
        name = f"{self._path}/{file}".lstrip("/")
        size = self._backend.stat(name).size
        if size > MAX_FILE:
            raise FormatError(f"{self.name}/{file}: {size} bytes, at most {MAX_FILE} are read")
        return self._backend.get(name)

    def sizes(self, folder: str) -> dict[str, int]:
        path = f"{self._path}/{folder}".lstrip("/")
        if self._backend.kind == "local":
            _refuse_odd(f"{self._backend.url}/{path}")
        return {s.name[len(path) + 1 :]: s.size for s in self._backend.list(path)}


class SnapshotSource:
    """One folder of a snapshot; every byte is verified by the repository as it is read."""

    def __init__(self, repository: Repository, snapshot: SnapshotName):
        self._lent = Lent(repository)  # opened where it is read, by a worker too
        self._files = dict(repository.tree(snapshot).files())
        self.holds_state = any(p.startswith(f"{STATE}/") for p in self._files)
        found = [p for p in self._files if p.rpartition("/")[2] == RECEIPT]
        if len(found) != 1:
            raise InvalidInputError(f"{snapshot} holds {len(found)} receipts, expected 1")
        self._path = found[0].rpartition("/")[0]
        self.folder = self._path.rpartition("/")[2]
        self.name = f"{snapshot}:{self._path}"

    def read(self, file: str) -> bytes:
        paths = (f"{self._path}/{file}".lstrip("/"), f"{STATE}/{self.folder}/{file}")
        entry = next((self._files[p] for p in paths if p in self._files), None)
        if entry is None:
            raise ObjectNotFoundError(f"{self.name}/{file} is not in the snapshot")
        if entry.size > MAX_FILE:
            raise FormatError(f"{self.name}/{file}: {entry.size} bytes, at most {MAX_FILE}")
        return b"".join(self._lent.repository.read_file(entry))

    def sizes(self, folder: str) -> dict[str, int]:
        head = f"{self._path}/{folder}/".lstrip("/")
        return {p[len(head) :]: f.size for p, f in self._files.items() if p.startswith(head)}


def sources(
    location: str | os.PathLike[str],
    repository: Repository | None = None,
    storage_options: dict[str, Any] | None = None,
) -> tuple[list[Source], bool]:
    """The receipts at a location, and whether they are all of their run.

    A location is the folder of one receipt, a destination (all of its receipts; those of its own
    repository where it has no folders), a repository (all snapshots of receipts in it), a folder
    of destinations and repositories, or with ``repository`` a snapshot's name.

    Raises
    ------
    NotFoundError
        There is nothing of the kind.
    """
    text = os.fspath(location)
    text = "." if text == RECEIPT else text.removesuffix(f"/{RECEIPT}")
    if repository is not None and _SNAPSHOT.fullmatch(text):
        return [SnapshotSource(repository, repository.resolve(text))], False
    backend = open_backend(text, storage_options)
    found = _run(backend, storage_options)
    if found:
        return found, True
    if _has(backend, RECEIPT):
        return [FolderSource(backend, "")], False
    found = _runs(backend, storage_options)
    if found:
        return found, True
    if next(iter(backend.list("", limit=1)), None) is None:
        raise NotFoundError(f"there is nothing at {backend.url}: check the path or URL")
    return [FolderSource(backend, "")], False


class BrokenSource:
    """A snapshot that cannot be opened: every read tells why."""

    holds_state = True
    folder = ""

    def __init__(self, name: str, error: CastoreError):
        self.name, self._error = name, error

    def read(self, file: str) -> bytes:
        raise self._error

    def sizes(self, folder: str) -> dict[str, int]:
        raise self._error


def snapshot_sources(repository: Repository) -> list[Source]:
    """Every receipt of a repository, oldest first within each namespace."""
    names = [n for n in repository.snapshots() if n.key.startswith(("receipt.", "final."))]
    names.sort(key=lambda n: (n.namespace, n.time))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        opened = list(pool.map(lambda n: _open(repository, n), names))
    return [source for source in opened if source is not None]


def _open(repository: Repository, name: SnapshotName) -> Source | None:
    """A snapshot of this driver; None for another's."""
    try:
        if repository.snapshot(name).driver != DRIVER:
            return None
        return SnapshotSource(repository, name)
    except CastoreError as e:
        return BrokenSource(str(name), e)


def _has(backend: Backend, name: str) -> bool:
    """Whether something stands there, also what cannot be read: reading it tells why."""
    try:
        backend.stat(name)
    except ObjectNotFoundError:
        return False
    except BackendError:
        if not _is_link(backend, name):
            raise
    return True


def _refuse_odd(folder: str) -> None:
    """`BackendError` for a link, pipe or the like at ``folder`` or anywhere below it.

    A backend does not list them, so they would stand there unseen.
    """
    if os.path.islink(folder):
        raise _LINK
    for at, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = f"{at}/{name}"
            if os.path.islink(path) or not (os.path.isdir(path) or os.path.isfile(path)):
                raise BackendError(
                    f"{path!r:.400} is neither a file nor a folder: look who put it there, and move"
                    " it away"
                )


def _is_link(backend: Backend, path: str) -> bool:
    return backend.kind == "local" and os.path.islink(f"{backend.url}/{path}")


def _run(backend: Backend, options: dict[str, Any] | None) -> list[Source]:
    """All receipts of a destination, or of the repository that stands there or in it."""
    folders = _folders(backend)
    if folders:
        return folders
    for inside in ("", f"/{OWN_REPOSITORY}"):
        if _has(backend, f"{inside}/config.json".lstrip("/")):
            url = f"{backend.url.rstrip('/')}{inside}"
            return snapshot_sources(Repository.open(url, storage_options=options))
    return []


def _folders(backend: Backend) -> list[Source]:
    """The folders of a destination: those with the layout's names, and others with a receipt."""
    steps = _named(backend, CHECKPOINTS, _STEP)
    steps.sort(key=lambda f: (len(f), f))
    paths = [f"{CHECKPOINTS}/{f}" for f in steps]
    paths += [f"{FINAL}/{f}" for f in sorted(_named(backend, FINAL, _RUN))]
    found: list[Source] = [FolderSource(backend, p) for p in paths]
    found += [BrokenSource(f"{backend.url}/{p}", _LINK) for p in _links(backend)]
    return found + [BrokenSource(f"{backend.url}/{p}", e) for p, e in _illegal(backend)]


def _named(backend: Backend, parent: str, pattern: re.Pattern[str]) -> list[str]:
    if _is_link(backend, parent):
        return []
    names = [n for n in backend.folders(parent) if is_legal(n)]
    return [n for n in names if pattern.fullmatch(n) or _has(backend, f"{parent}/{n}/{RECEIPT}")]


def is_legal(name: str) -> bool:
    """Whether a backend reads what has this name."""
    try:
        check_name(name)
    except InvalidInputError:
        return False
    return True


def _illegal(backend: Backend) -> list[tuple[str, CastoreError]]:
    """Folders with names that a backend does not read, such as a file manager's copies."""
    parents = [p for p in (CHECKPOINTS, FINAL) if not _is_link(backend, p)]
    found = [f"{p}/{n}" for p in parents for n in backend.folders(p) if not is_legal(n)]
    what = "no folder of the layout has such a name: rename it or move it away"
    return [(p, FormatError(what)) for p in found]


def _links(backend: Backend) -> list[str]:
    """Symbolic links in place of the layout's folders, which are not followed."""
    if backend.kind != "local":
        return []
    found = []
    for parent in (CHECKPOINTS, FINAL):
        at = f"{backend.url}/{parent}"
        if os.path.islink(at):
            found.append(parent)
        elif os.path.isdir(at):
            names = sorted(os.listdir(at))
            found += [f"{parent}/{n}" for n in names if os.path.islink(f"{at}/{n}")]
    return found


_LINK = BackendError(
    "a symbolic link stands where a folder should, and is not followed: look who put it there"
)


def _runs(backend: Backend, options: dict[str, Any] | None) -> list[Source]:
    """The receipts of every destination and repository directly below."""
    url = backend.url.rstrip("/")
    children = [open_backend(f"{url}/{n}", options) for n in backend.folders("")]
    return [source for child in children for source in _run(child, options)]
