"""Drivers: what lays a documented folder structure on top of snapshots.

A driver is a class with the shape of `Driver`, found through the entry-point group
``castore.drivers``. `FolderDriver` is the smallest one: a folder as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import entry_points
from os import PathLike
from typing import Protocol

from castore.errors import InvalidInputError
from castore.repository import Repository
from castore.snapshot import SnapshotName
from castore.source import Draft, scan

GROUP = "castore.drivers"


class Driver(Protocol):
    """One kind of experiment record. ``name`` stands in the snapshots it makes."""

    name: str

    def collect(self, root: str | PathLike[str]) -> Iterator[Draft]:
        """The snapshots a layout on disk amounts to, oldest first. `LayoutError` if it is none."""

    def materialize(
        self, repository: Repository, snapshot: SnapshotName, target: str | PathLike[str]
    ) -> None:
        """Write a snapshot as the documented layout."""

    def verify(self, repository: Repository, snapshot: SnapshotName) -> Iterator[tuple[str, str]]:
        """Recompute what the layout promises; gives path and defect of each broken promise."""


class FolderDriver:
    """A folder, as it is; its promise is the SHA-256 of each file."""

    name = "folder"

    def collect(self, root: str | PathLike[str]) -> Iterator[Draft]:
        yield Draft(scan([root]))

    def materialize(
        self, repository: Repository, snapshot: SnapshotName, target: str | PathLike[str]
    ) -> None:
        repository.checkout(snapshot, target)

    def verify(self, repository: Repository, snapshot: SnapshotName) -> Iterator[tuple[str, str]]:
        for path, file in repository.tree(snapshot).files():
            sha = hashlib.sha256()
            for part in repository.read_file(file):
                sha.update(part)
            if sha.hexdigest() != file.sha256:
                yield path, f"SHA-256 {sha.hexdigest()}, the tree says {file.sha256}"


def driver_names() -> list[str]:
    """The installed drivers, the built-in one included."""
    return sorted({FolderDriver.name, *(e.name for e in entry_points(group=GROUP))})


def find_driver(name: str) -> Driver:
    """The driver called ``name``; `InvalidInputError` that lists the installed ones otherwise."""
    if name == FolderDriver.name:
        return FolderDriver()
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            driver: Driver = entry.load()()
            return driver
    raise InvalidInputError(
        f"no driver {name!r} is installed; there are: {', '.join(driver_names())}"
    )
