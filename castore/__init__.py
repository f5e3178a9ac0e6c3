"""castore: a content-addressed store for machine-learning checkpoints.

    from castore import Repository
    repository = Repository.init("store")
    commit = repository.commit(["run"], namespace="me")
    repository.checkout(commit.name, "copy-of-run")

Importing this package is cheap: what needs numpy is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from castore.errors import (
    AlreadyExistsError,
    BackendError,
    CastoreError,
    CorruptObjectError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    LayoutError,
    NotFoundError,
    ObjectNotFoundError,
    ReceiptMismatchError,
    RepositoryNotFoundError,
    SnapshotNotFoundError,
    UntrustedPickleError,
)

if TYPE_CHECKING:
    from castore.commit import Options
    from castore.repository import Commit, Repository
    from castore.snapshot import Snapshot, SnapshotName
    from castore.source import BaseFile, Draft, MemoryFile, disk_file, scan
    from castore.tree import File, Folder, Link, Slice, Tree

__version__ = "0.1.0"

_HOMES = {
    "BaseFile": "castore.source",
    "Commit": "castore.repository",
    "Draft": "castore.source",
    "File": "castore.tree",
    "Folder": "castore.tree",
    "Link": "castore.tree",
    "MemoryFile": "castore.source",
    "Options": "castore.commit",
    "Repository": "castore.repository",
    "Slice": "castore.tree",
    "Snapshot": "castore.snapshot",
    "SnapshotName": "castore.snapshot",
    "Tree": "castore.tree",
    "disk_file": "castore.source",
    "scan": "castore.source",
}

__all__ = [
    "AlreadyExistsError",
    "BackendError",
    "BaseFile",
    "CastoreError",
    "Commit",
    "CorruptObjectError",
    "Draft",
    "File",
    "Folder",
    "FormatError",
    "IntegrityError",
    "InvalidInputError",
    "LayoutError",
    "Link",
    "MemoryFile",
    "NotFoundError",
    "ObjectNotFoundError",
    "Options",
    "ReceiptMismatchError",
    "Repository",
    "RepositoryNotFoundError",
    "Slice",
    "Snapshot",
    "SnapshotName",
    "SnapshotNotFoundError",
    "Tree",
    "UntrustedPickleError",
    "__version__",
    "disk_file",
    "scan",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
