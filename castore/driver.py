"""Drivers: what lays a documented folder structure on top of snapshots.

A driver is a class with the shape of `Driver`, found through the entry-point group
``castore.drivers``. `FolderDriver` is the smallest one: a folder as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from os import PathLike
from typing import Protocol, runtime_checkable

from castore.errors import InvalidInputError, lacks
from castore.repository import Repository
from castore.snapshot import SnapshotName
from castore.source import Draft, scan
from castore.tree import File

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


@dataclass(frozen=True, slots=True)
class Shown:
    """One file of a layout that nobody has written.

    Parameters
    ----------
    load : callable
        Gives the content when it is asked for: a `File` of some tree of the repository, or bytes
        that the driver makes.
    time : int
        When what it shows was committed, microseconds since the epoch.
    mark : str
        Where ``load`` makes bytes at some cost: what they follow from. For equal marks they are
        made once.
    """

    load: Callable[[], File | bytes]
    time: int
    mark: str = ""


@runtime_checkable
class Viewer(Protocol):
    """A driver that can also tell its layout without writing it; one need not."""

    def view(self, repository: Repository, namespace: str) -> Mapping[str, Shown]:
        """The files of a namespace's layout as of now, all of them, by path from its root.

        No path may begin with an element that names a snapshot in ``castore://`` (``latest``, 4
        to 16 characters of 0-9 and a-f, anything with a ``=``). Documents and trees are best
        asked of ``repository`` each time: it keeps what cannot change. Asked anew at each look.
        """


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
            try:
                driver: Driver = entry.load()()
            except ModuleNotFoundError as e:
                raise InvalidInputError(f"the driver {name!r} cannot be loaded: {lacks(e)}") from e
            return driver
    raise InvalidInputError(
        f"no driver {name!r} is installed; there are: {', '.join(driver_names())}"
    )


def find_viewer(name: str) -> Viewer | None:
    """The driver called ``name``, None where it is not installed or is no `Viewer`."""
    driver = find_driver(name) if name in driver_names() else None
    return driver if isinstance(driver, Viewer) else None
