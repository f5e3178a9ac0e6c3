"""What goes into a commit: files on disk read safely, and content from memory."""

from __future__ import annotations

import os
import stat as st
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from castore.digest import Buffer
from castore.errors import BackendError, InvalidInputError
from castore.tree import DEEPEST, File, Folder, Link


class Reader:
    """An open source: ``read`` gives exactly the bytes asked for, into a private buffer."""

    def __init__(self, source: DiskFile):
        self._source = source
        try:
            # Not blocking: a pipe that took the file's place would be waited for.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._fd = os.open(source.path, flags)
        except OSError as e:
            raise BackendError(f"{source.path} cannot be read: {e.strerror}") from e
        self.check()

    def read(self, start: int, stop: int) -> bytes:
        parts: list[bytes] = []
        while start < stop:
            try:
                part = os.pread(self._fd, stop - start, start)
            except OSError as e:
                raise BackendError(f"{self._source.path} cannot be read: {e.strerror}") from e
            if not part:
                raise self._changed()
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def content(self, start: int, stop: int, scratch: bytearray | None = None) -> Buffer:
        """As `read`; private, or not changed before the commit has ended.

        With ``scratch`` it may lie there, and is void once the caller uses that again.
        """
        if scratch is None or stop - start > len(scratch):
            return self.read(start, stop)
        view = memoryview(scratch)[: stop - start]
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], start + done)
            except OSError as e:
                raise BackendError(f"{self._source.path} cannot be read: {e.strerror}") from e
            if not count:
                raise self._changed()
            done += count
        return view

    def check(self) -> None:
        """`InvalidInputError` if the file is not the one that was scanned, or was changed since."""
        now = os.fstat(self._fd)
        # A file that gives more than its size is growing, or made up as it is read (/proc).
        if _identity(now) != self._source.identity or os.pread(self._fd, 1, now.st_size):
            raise self._changed()

    def _changed(self) -> InvalidInputError:
        return InvalidInputError(
            f"{self._source.path} changed while it was read: nothing was committed; commit again"
            " when its writer has finished"
        )

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class DiskFile:
    """A regular file as it was when scanned; a change of it fails the commit."""

    path: str
    size: int
    executable: bool
    identity: tuple[int, ...]

    def open(self) -> Reader:
        return Reader(self)


class _MemoryReader:
    def __init__(self, data: bytes | memoryview):
        self._data = memoryview(data).cast("B")

    def read(self, start: int, stop: int) -> bytes:
        return bytes(self._data[start:stop])

    def content(self, start: int, stop: int, scratch: bytearray | None = None) -> Buffer:
        return self._data[start:stop]

    def check(self) -> None:
        """Bytes do not change."""

    def __enter__(self) -> _MemoryReader:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """Content that is at hand; a view must not change until the commit has returned.

    A view of any shape and type stands for its bytes; `InvalidInputError` unless they are
    contiguous, in C's order.
    """

    data: bytes | memoryview
    executable: bool = False

    def __post_init__(self) -> None:
        if not memoryview(self.data).c_contiguous:
            raise InvalidInputError("the content is not contiguous in memory: copy it first")

    @property
    def size(self) -> int:
        return memoryview(self.data).nbytes

    def open(self) -> _MemoryReader:
        return _MemoryReader(self.data)


Source: TypeAlias = DiskFile | MemoryFile
SourceEntry: TypeAlias = DiskFile | MemoryFile | File | Link | Folder


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A `File` of an earlier tree to delta-code against, and a source that has its bytes still.

    What is read from the source is verified; if it is not the file's, the repository is read.
    """

    file: File
    source: Source


@dataclass(frozen=True, slots=True)
class Draft:
    """A snapshot to be: what a driver hands to `Repository.commit`.

    ``entries`` maps the tree's paths to sources; a `File` of an earlier tree of the same
    repository stands for content that is stored already. ``base`` names what to delta-code
    against where the caller knows: one ``SNAPSHOT[:PATH]`` for everything, or one for each path,
    where a `BaseFile` or a `File` of an earlier tree will do as well. A wrong base costs bytes,
    never correctness.
    """

    entries: Mapping[str, SourceEntry]
    driver: str = "folder"
    key: str = "snapshot"
    labels: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    parents: tuple[str, ...] = ()
    base: str | Mapping[str, str | File | BaseFile] | None = None


def scan(
    paths: Sequence[str | os.PathLike[str]], exclude: str | None = None
) -> dict[str, SourceEntry]:
    """What is at ``paths``: one folder gives its content, otherwise each keeps its last name.

    Links are kept as links; sockets, pipes and devices are refused. ``exclude`` is a folder to
    leave out (the repository itself); what lies in it is refused.
    """
    skip = os.path.realpath(exclude) if exclude else None
    for p in paths:
        if exclude and is_within(p, exclude):
            raise InvalidInputError(f"{os.fspath(p)} lies in the repository itself")
    entries: dict[str, SourceEntry] = {}
    if len(paths) == 1 and os.path.isdir(paths[0]):
        _scan_folder(os.fspath(paths[0]), "", skip, entries)
        return entries
    names: set[str] = set()
    for p in paths:
        path = os.path.abspath(os.fspath(p))
        name = os.path.basename(path)
        if not name or name in names:
            raise InvalidInputError(f"{os.fspath(p)!r}: no name of its own, or one given twice")
        names.add(name)
        _scan_one(path, name, skip, entries)
    return entries


def _scan_folder(
    folder: str, prefix: str, skip: str | None, entries: dict[str, SourceEntry]
) -> None:
    if prefix.count("/") > DEEPEST:
        raise InvalidInputError(f"{folder[:200]}...: over {DEEPEST} folders within folders")
    try:
        children = sorted(os.scandir(folder), key=lambda e: e.name)
    except OSError as e:
        raise BackendError(f"{folder} cannot be read: {e.strerror}") from e
    for child in children:
        _scan_one(child.path, prefix + child.name, skip, entries)
    if prefix and not children:
        entries[prefix.rstrip("/")] = Folder()


def _scan_one(path: str, name: str, skip: str | None, entries: dict[str, SourceEntry]) -> None:
    try:
        info = os.lstat(path)
    except OSError as e:
        raise InvalidInputError(f"{path} cannot be read: {e.strerror}") from e
    if st.S_ISLNK(info.st_mode):
        entries[name] = Link(os.readlink(path))
    elif st.S_ISDIR(info.st_mode):
        if skip is None or os.path.realpath(path) != skip:
            _scan_folder(path, name + "/", skip, entries)
    elif st.S_ISREG(info.st_mode):
        executable = bool(info.st_mode & 0o100)
        entries[name] = DiskFile(path, info.st_size, executable, _identity(info))
    else:
        raise InvalidInputError(
            f"{path} is a socket, pipe or device: only files, folders and links can be stored"
        )


def is_within(path: str | os.PathLike[str], folder: str) -> bool:
    """Whether ``path`` is ``folder`` or lies in it, links followed."""
    real, root = os.path.realpath(path), os.path.realpath(folder)
    return os.path.commonpath([real, root]) == root


def disk_file(path: str | Path) -> DiskFile:
    """One regular file as a source (a link is followed: it was named)."""
    real = os.path.realpath(path)
    entries: dict[str, SourceEntry] = {}
    _scan_one(real, "x", None, entries)
    found = entries.get("x")
    if not isinstance(found, DiskFile):
        raise InvalidInputError(f"{path} is not a regular file")
    return found


def _identity(info: os.stat_result) -> tuple[int, ...]:
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
