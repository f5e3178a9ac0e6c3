"""The base a caller names for the files of a commit, looked up when its turn comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from castore import bases
from castore.errors import FormatError, IntegrityError, InvalidInputError, ObjectNotFoundError
from castore.source import BaseFile
from castore.tree import File, Tree


class Hints:
    """For a path the base that was named for it, or None; each snapshot's tree is read once.

    Parameters
    ----------
    tree : callable
        Gives the tree of a snapshot by its name, ``NAMESPACE@ID``, or raises.
    base : str, mapping or None
        ``SNAPSHOT[:PATH]`` for all files, or for each path that or a file. In a snapshot named
        alone, the same path, else the nearest in its series.
    """

    def __init__(
        self,
        tree: Callable[[str], Tree],
        base: str | Mapping[str, str | File | BaseFile] | None,
    ):
        self._read, self._base = tree, base
        self._trees: dict[str, Tree | None] = {}

    def _tree(self, snapshot: str) -> Tree | None:
        """None where it is damaged: that costs bytes. A snapshot that is not there is an error."""
        if snapshot not in self._trees:
            try:
                self._trees[snapshot] = self._read(snapshot)
            except (ObjectNotFoundError, IntegrityError, FormatError):
                self._trees[snapshot] = None
        return self._trees[snapshot]

    def __call__(self, path: str) -> File | None:
        text = self._base if isinstance(self._base, str | None) else self._base.get(path)
        if isinstance(text, BaseFile):
            return text.file
        if text is None or isinstance(text, File):
            return text
        snapshot, _, at = text.partition(":")
        tree = self._tree(snapshot)
        if tree is None:
            return None
        entries = tree.entries
        found = entries.get(f"{at}/{path}" if at else path) or entries.get(at)
        if found is None and at and not any(p.startswith(at.rstrip("/") + "/") for p in entries):
            raise InvalidInputError(f"base {text!r}: there is no {at!r} in that snapshot")
        if found is None and not at:
            series = bases.series_of(path)
            files = (p for p, _ in tree.files() if bases.series_of(p) == series)
            found = entries.get(bases.nearest_in_series(path, files) or "")
        return found if isinstance(found, File) else None
