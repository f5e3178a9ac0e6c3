"""The documented files of a root, as real files: a view of what the repository holds.

A file is replaced or removed only while its SHA-256 is that of a committed file; whatever else
stands under its name is somebody's edit, or foreign, and is kept and told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, TypeAlias

from castore import (
    AlreadyExistsError,
    BackendError,
    CorruptObjectError,
    InvalidInputError,
    ObjectNotFoundError,
)
from castore.backend import MISSING
from castore.digest import Buffer
from castore_experiments.files import Files
from castore_experiments.layout import in_root, parse
from castore_experiments.local_files import LocalFiles, Staged
from castore_experiments.options import Materialize

Outcome: TypeAlias = Literal["written", "same", "kept", "removed", "missing"]
Parts: TypeAlias = Callable[[], Iterable[Buffer]]
"""Gives a file's content piece by piece, anew at each call."""

_TRIES = 5


class View:
    """Writes and removes documented files.

    Parameters
    ----------
    files : Files
    committed : callable
        Whether a SHA-256 (64 hex) is that of a file some snapshot has, or had, under a path
        relative to ``checkpoints/``: ``committed(path, sha256)``.
    """

    def __init__(self, files: Files, committed: Callable[[str, str], bool]):
        self._files, self._committed = files, committed
        self._known: dict[str, tuple[str, str]] = {}

    @property
    def folder(self) -> Path | None:
        """The root's folder, None for a remote root."""
        return Path(self._files.url) if isinstance(self._files, LocalFiles) else None

    def stage(self, path: str, data: Buffer) -> Staged | None:
        """Write ``data`` beside ``path`` already, for a `write` to come; None on a remote root."""
        if not isinstance(self._files, LocalFiles):
            return None
        return self._files.stage(_name(path), data)

    def write(
        self,
        path: str,
        data: Buffer | Parts,
        sha256: str | None = None,
        staged: Staged | None = None,
    ) -> Outcome:
        """Make ``path`` (relative to ``checkpoints/``) hold ``data``; whole, durable on return.

        Parameters
        ----------
        path : str
        data : bytes-like, or callable
            A callable gives parts, which are written as they come (local) and must have ``sha256``,
            or the file does not get its name.
        sha256 : str
            Of ``data``. May be left out for bytes, and is believed for bytes.
        staged : Staged, optional
            ``data`` as `stage` wrote it.

        Returns
        -------
        outcome
            ``written``; ``same``: it stood there; ``kept``: another content stands there that was
            never committed, and nothing was changed.

        Raises
        ------
        InvalidInputError
            ``path`` is no document of the layout, or parts come without ``sha256``.
        CorruptObjectError
            The parts have another SHA-256; nothing was changed.
        BackendError
        """
        name, wanted = _name(path), sha256 or _sha256(data)
        for _ in range(_TRIES):
            current, version = self._look(name)
            if current == wanted:
                return "same"
            if current is not None and not self._committed(path, current):
                return "kept"
            try:
                version = self._put(name, path, data, wanted, version, staged)
            except AlreadyExistsError:
                staged = None
                continue
            self._known[name] = version, wanted
            return "written"
        raise BackendError(f"{self._files.url}/{name}: another program keeps changing it")

    def _put(
        self,
        name: str,
        path: str,
        data: Buffer | Parts,
        wanted: str,
        version: str,
        staged: Staged | None,
    ) -> str:
        if staged is not None and isinstance(self._files, LocalFiles):
            return self._files.replace(name, staged, version)
        content = _checked(path, data(), wanted) if callable(data) else data
        return self._files.replace(name, content, version)

    def remove(self, path: str) -> Outcome:
        """Take ``path`` away: ``removed``, ``missing``, or ``kept`` (never committed)."""
        name = _name(path)
        current, _ = self._look(name)
        if current is None:
            return "missing"
        if not self._committed(path, current):
            return "kept"
        self._files.delete(name)
        self._known.pop(name, None)
        return "removed"

    def look(self, path: str) -> str | None:
        """SHA-256 of what stands at ``path``, None if nothing does.

        A digest taken before is believed only while the file is the same by inode, times and size
        (local) or entity tag (S3).
        """
        return self._look(_name(path))[0]

    def weights(self) -> list[str]:
        """Paths of the weight files that stand in the root, sorted."""
        prefix = in_root("")
        paths = (s.name.removeprefix(prefix) for s in self._files.list(in_root("models")))
        return [p for p in paths if (found := parse(p)) is not None and found.kind == "weights"]

    def _look(self, name: str) -> tuple[str | None, str]:
        """SHA-256 and version of what stands there."""
        try:
            version = self._files.stat(name).version
            known = self._known.get(name)
            if known is None or known[0] != version:
                known = self._hashed(name)
                self._known[name] = known
        except ObjectNotFoundError:
            self._known.pop(name, None)
            return None, MISSING
        return known[1], known[0]

    def _hashed(self, name: str) -> tuple[str, str]:
        """Version and SHA-256 of one and the same content."""
        if not isinstance(self._files, LocalFiles):
            data, version = self._files.get_versioned(name)
            return version, hashlib.sha256(data).hexdigest()
        for _ in range(_TRIES):
            version, sha = self._files.stat(name).version, hashlib.sha256()
            for part in self._files.read_parts(name):
                sha.update(part)
            if self._files.stat(name).version == version:
                return version, sha.hexdigest()
        raise BackendError(f"{self._files.url}/{name}: another program keeps changing it")


def wanted_weights(materialize: Materialize, newest: str | None, every: Iterable[str]) -> set[str]:
    """Which weight files are to be real: none, the ``newest`` of the latest hash, or all."""
    if materialize == "all":
        return {*every}
    return {newest} if materialize == "latest" and newest is not None else set()


def _name(path: str) -> str:
    if parse(path) is None:
        raise InvalidInputError(f"{path!r} is no document of the experiments layout")
    return in_root(path)


def _sha256(data: Buffer | Parts) -> str:
    if callable(data):
        raise InvalidInputError("parts need the SHA-256 of the whole")
    return hashlib.sha256(data).hexdigest()


def _checked(path: str, parts: Iterable[Buffer], wanted: str) -> Iterator[Buffer]:
    """``parts``, and an error at their end if they are not what was promised."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part)
        yield part
    if sha.hexdigest() != wanted:
        raise CorruptObjectError(
            f"{path}: SHA-256 {sha.hexdigest()}, expected {wanted}: 'castore check' looks into it",
            name=path,
            expected=wanted,
            actual=sha.hexdigest(),
        )
