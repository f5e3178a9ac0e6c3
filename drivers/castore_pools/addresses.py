"""Addresses, and the files at them.

An address is a local path, a URL that fsspec knows, or ``castore://<namespace>/<snapshot>/<path>``
in the repository that ``CASTORE_REPOSITORY`` names (snapshot: ``latest`` or an id's beginning).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from castore import File, InvalidInputError, NotFoundError, Repository, Tree
from castore_pools.sources import DiskSource, SnapshotSource, Source, UrlSource

_SCHEME = "castore://"


def open_source(
    address: str | os.PathLike[str],
    storage_options: dict[str, Any] | None = None,
    repository: Repository | None = None,
) -> Source:
    """The file at ``address``.

    Parameters
    ----------
    address : str or path
    storage_options : dict, optional
        For an fsspec URL.
    repository : Repository, optional
        For ``castore://``; `CASTORE_REPOSITORY` by default.

    Raises
    ------
    NotFoundError, BackendError
    InvalidInputError
        A ``castore://`` address that is none.
    """
    text = os.fspath(address)
    if text.startswith(_SCHEME):
        namespace, snapshot, path = split_castore(text)
        return snapshot_source(repository or default_repository(), f"{namespace}@{snapshot}", path)
    if "://" in text:
        return UrlSource(text, storage_options)
    return DiskSource(text)


def open_sources(
    addresses: Sequence[str | os.PathLike[str]], storage_options: dict[str, Any] | None = None
) -> list[Source]:
    """`open_source` of several, at the same time; a snapshot that they share is looked up once."""
    trees: dict[str, Tree] = {}
    lock, repository = threading.Lock(), None
    if any(os.fspath(a).startswith(_SCHEME) for a in addresses):
        repository = default_repository()

    def one(address: str | os.PathLike[str]) -> Source:
        text = os.fspath(address)
        if repository is None or not text.startswith(_SCHEME):
            return open_source(text, storage_options)
        namespace, snapshot, path = split_castore(text)
        name = f"{namespace}@{snapshot}"
        with lock:
            if name not in trees:
                trees[name] = repository.tree(name)
        return _from_tree(repository, trees[name], name, path)

    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        return list(pool.map(one, addresses))


def snapshot_source(repository: Repository, snapshot: str, path: str) -> SnapshotSource:
    """One file of a snapshot."""
    return _from_tree(repository, repository.tree(snapshot), snapshot, path)


def _from_tree(repository: Repository, tree: Tree, snapshot: str, path: str) -> SnapshotSource:
    entry = tree.entries.get(path)
    if not isinstance(entry, File):
        raise NotFoundError(f"there is no file {path!r} in {snapshot} of {repository.url}")
    return SnapshotSource(repository, entry, f"{_SCHEME}{snapshot.replace('@', '/')}/{path}")


def split_castore(address: str) -> tuple[str, str, str]:
    """Namespace, snapshot and path of ``castore://...``; the path may be empty."""
    namespace, _, rest = address.removeprefix(_SCHEME).partition("/")
    snapshot, _, path = rest.partition("/")
    if not namespace or not snapshot:
        raise InvalidInputError(f"{address!r}: expected castore://<namespace>/<snapshot>/<path>")
    return namespace, snapshot, path.strip("/")


def default_repository() -> Repository:
    """The repository of ``CASTORE_REPOSITORY``."""
    url = os.environ.get("CASTORE_REPOSITORY", "")
    if not url:
        raise InvalidInputError(
            "castore:// needs a repository: set CASTORE_REPOSITORY to its path or URL"
        )
    return Repository.open(url)
