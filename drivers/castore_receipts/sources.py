"""Where the files of one receipt are read from: a folder, any fsspec URL, or a snapshot.

Only names that the layout fixes are ever read, never one that a receipt gives.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from castore import (
    CastoreError,
    FormatError,
    InvalidInputError,
    NotFoundError,
    ObjectNotFoundError,
    Repository,
    SnapshotName,
)
from castore.backend import Backend
from castore.backends import open_backend
from castore_receipts.destination import CHECKPOINTS, DRIVER, FINAL, RECEIPT, STATE

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


class SnapshotSource:
    """One folder of a snapshot; every byte is verified by the repository as it is read."""

    def __init__(self, repository: Repository, snapshot: SnapshotName):
        self._repository = repository
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
        return b"".join(self._repository.read_file(entry))


def sources(
    location: str | os.PathLike[str],
    repository: Repository | None = None,
    storage_options: dict[str, Any] | None = None,
) -> tuple[list[Source], bool]:
    """The receipts at a location, and whether they are all of their run.

    A location is the folder of one receipt, a destination (all of its receipts), a folder of
    destinations, a repository (all snapshots of receipts in it), or with ``repository`` a
    snapshot's name.

    Raises
    ------
    NotFoundError
        There is nothing of the kind.
    """
    text = os.fspath(location).removesuffix(f"/{RECEIPT}")
    if repository is not None and _SNAPSHOT.fullmatch(text):
        return [SnapshotSource(repository, repository.resolve(text))], False
    backend = open_backend(text, storage_options)
    found = _folders(backend)
    if found:
        return list(found), True
    if _has(backend, RECEIPT):
        return [FolderSource(backend, "")], False
    if _has(backend, "config.json"):
        return snapshot_sources(Repository.open(text, storage_options=storage_options)), True
    runs = _runs(backend, text, storage_options)
    if runs:
        return list(runs), True
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
    try:
        backend.stat(name)
    except ObjectNotFoundError:
        return False
    return True


def _folders(backend: Backend) -> list[FolderSource]:
    """The folders of a destination that hold something under the layout's names."""
    steps = [f for f in backend.folders(CHECKPOINTS) if _STEP.fullmatch(f)]
    runs = [f for f in backend.folders(FINAL) if _RUN.fullmatch(f)]
    steps.sort(key=lambda f: (len(f), f))
    paths = [*(f"{CHECKPOINTS}/{f}" for f in steps), *(f"{FINAL}/{f}" for f in sorted(runs))]
    return [FolderSource(backend, p) for p in paths]


def _runs(backend: Backend, url: str, options: dict[str, Any] | None) -> list[FolderSource]:
    """The receipts of every destination directly below."""
    children = [open_backend(f"{url.rstrip('/')}/{n}", options) for n in backend.folders("")]
    return [source for child in children for source in _folders(child)]
