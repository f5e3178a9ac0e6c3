"""A whole layout, wherever it is: a folder, an fsspec URL, or a snapshot."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Protocol

from castore import BackendError, File, NotFoundError, Repository
from castore.backends import without_secrets
from castore.workers import Lent
from castore_pools.addresses import default_repository, split_castore
from castore_pools.sources import (
    KEPT,
    DiskSource,
    SnapshotSource,
    Source,
    UrlSource,
    url_errors,
)


class Place(Protocol):
    """Files by their path below a root."""

    where: str

    def paths(self, below: str = "") -> list[str]:
        """Every file (in the folder ``below``), sorted; links are not followed."""

    def source(self, path: str) -> Source:
        """One of the files. `NotFoundError` where it is missing."""


class FolderPlace:
    """A local folder."""

    def __init__(self, root: str | os.PathLike[str]):
        self.where = os.fspath(root)
        if not os.path.isdir(self.where):
            raise NotFoundError(f"{self.where} is not a folder")

    def paths(self, below: str = "") -> list[str]:
        """As promised, but for repositories in the folder and what a crashed writer left."""
        found = []
        top = os.path.join(self.where, below)
        for at, folders, files in os.walk(top, onerror=_unreadable):
            if "config.json" in files and _is_repository(os.path.join(at, "config.json")):
                folders.clear()
                continue
            here = os.path.relpath(at, self.where)
            names = [n for n in files if not _is_temporary(n)]
            found += [n if here == "." else f"{here}/{n}" for n in names]
        return sorted(p for p in found if not os.path.islink(os.path.join(self.where, p)))

    def source(self, path: str) -> Source:
        return DiskSource(os.path.join(self.where, path))


def _is_repository(config: str) -> bool:
    """Whether a ``config.json`` is a repository's: see docs/format.md."""
    with open(config, "rb") as file:
        data = file.read(4096)
    return b'"kind":"config"' in data and b'"hash":"blake3-256"' in data


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith((".tmp", ".part"))


def _unreadable(error: OSError) -> None:
    if isinstance(error, FileNotFoundError):
        return  # a folder that is not there holds nothing
    raise BackendError(f"{error.filename} cannot be read: {error.strerror}") from error


class UrlPlace:
    """A folder behind an fsspec URL; pickles without secrets."""

    def __init__(self, url: str, storage_options: dict[str, Any] | None = None):
        self.where, self._options = url.rstrip("/"), storage_options

    def __reduce__(self) -> tuple[Any, ...]:
        return UrlPlace, (without_secrets(self.where), without_secrets(self._options))

    def paths(self, below: str = "") -> list[str]:
        import fsspec

        try:
            fs, root = fsspec.url_to_fs(self.where, **(self._options or {}))
            found = fs.find(f"{root.rstrip('/')}/{below}".rstrip("/"))
        except FileNotFoundError:
            return []
        except url_errors() as e:
            raise BackendError(f"{self.where} cannot be listed: {e}") from e
        head = root.rstrip("/") + "/"
        return sorted(p.removeprefix(head) for p in found if p.startswith(head))

    def source(self, path: str) -> Source:
        return UrlSource(f"{self.where}/{path}", self._options)


class SnapshotPlace:
    """What one or several snapshots hold; of one path in several, the first snapshot's counts."""

    def __init__(
        self,
        repository: Repository,
        snapshots: Iterable[str],
        below: str = "",
        keep: int = KEPT,
    ):
        self._keep = keep
        self._lent = Lent(repository)  # opened where it is read, by a worker too
        self._files: dict[str, File] = {}
        names = list(snapshots)
        for name in names:
            for path, file in repository.tree(f"{name}:{below}" if below else name).files():
                self._files.setdefault(path, file)
        self.where = f"castore://{(names or [''])[0].replace('@', '/')}"

    def paths(self, below: str = "") -> list[str]:
        head = below + "/" if below else ""
        return sorted(p for p in self._files if p.startswith(head))

    def source(self, path: str) -> Source:
        file = self._files.get(path)
        if file is None:
            raise NotFoundError(f"there is no file {path!r} in {self.where}")
        return SnapshotSource(self._lent.repository, file, f"{self.where}/{path}", self._keep)


def open_place(
    address: str | os.PathLike[str],
    storage_options: dict[str, Any] | None = None,
    keep: int = KEPT,
    repository: Repository | None = None,
) -> Place:
    """The layout at a folder, an fsspec URL, or ``castore://<namespace>/<snapshot>``.

    ``keep`` bounds the bytes that each opened file of a snapshot keeps. ``repository`` is that of
    ``castore://``, by default the one of ``CASTORE_REPOSITORY``.
    """
    text = os.fspath(address)
    if text.startswith("castore://"):
        namespace, snapshot, below = split_castore(text)
        held = repository or default_repository()
        return SnapshotPlace(held, [f"{namespace}@{snapshot}"], below, keep)
    if "://" in text:
        return UrlPlace(text, storage_options)
    return FolderPlace(text)
