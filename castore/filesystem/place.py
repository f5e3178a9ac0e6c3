"""What lies below one root of the view, as of one moment. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from castore.driver import Shown
from castore.snapshot import SnapshotName
from castore.tree import Entry, Folder, Link

Node: TypeAlias = Entry | Shown
Folders: TypeAlias = Mapping[str, Sequence[str]]
"""The names in each folder, by its path; the root's is empty."""

_HOPS = 40  # links on the way to a file, as many as Linux follows


@dataclass(frozen=True, slots=True)
class Place:
    """A tree of a snapshot, or a layout.

    ``root`` is its path in the view, ``entries`` are relative to that; ``time`` in microseconds
    since the epoch; ``snapshot`` is None for a layout.
    """

    root: str
    entries: Mapping[str, Node]
    folders: Folders
    time: int
    snapshot: SnapshotName | None = None

    def name(self, path: str) -> str:
        """The path in the view."""
        return f"{self.root}/{path}" if path else self.root

    def follow(self, path: str) -> str | None:
        """``path`` less all links, those on its way included; None where they lead nowhere.

        Links are followed within the place alone, never out of it.
        """
        rest, at, hops = path.split("/")[::-1] if path else [], "", 0
        while rest:
            part = rest.pop()
            if part in ("", "."):
                continue
            if part == "..":
                if not at:
                    return None
                at = at.rpartition("/")[0]
                continue
            here = f"{at}/{part}" if at else part
            entry = self.entries.get(here)
            if not isinstance(entry, Link):
                at = here
                continue
            hops += 1
            if hops > _HOPS or entry.target.startswith("/"):
                return None
            rest += entry.target.split("/")[::-1]
        return at if at in self.folders or at in self.entries else None


def folders_of(entries: Mapping[str, Node]) -> dict[str, list[str]]:
    """The folders that follow from paths, each with its names sorted."""
    found: dict[str, dict[str, None]] = {"": {}}
    for path, entry in entries.items():
        if isinstance(entry, Folder):
            found.setdefault(path, {})
        at = path
        while at:
            parent, _, name = at.rpartition("/")
            names = found.setdefault(parent, {})
            if name in names:
                break
            names[name] = None
            at = parent
    return {path: sorted(names) for path, names in found.items()}
