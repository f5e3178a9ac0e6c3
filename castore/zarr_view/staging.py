"""What was written to a store and is not committed yet: files of a local folder.

    <folder>/base    the snapshot that is written upon: canonical JSON
    <folder>/data/   one file a key; of an element ``x``, folders are ``+x`` and files ``=x``, so
                     that a key may also be the beginning of another
    <folder>/gone/   of each base one folder, in it one file a deleted key, named by its digest
    <folder>/tmp/    what is being written
    <folder>/lock    held while a value is put in place

A value appears whole or not at all. Threads, and processes of one machine that were given the
folder by name, may write at once; of two that write a value the last one wins, unless it says
what it replaces. Nothing is made durable before a commit.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from castore import document
from castore.digest import Buffer, digest_of
from castore.errors import BackendError, InvalidInputError
from castore.source import DiskFile, disk_file
from castore.tree import MAX_ELEMENT, check_path

Span: TypeAlias = Callable[[int], tuple[int, int]]
"""The range wanted of a value, by its size."""

_KIND = "zarr-staging"
_BASE, _DATA, _GONE, _TMP, _LOCK = "base", "data", "gone", "tmp", "lock"


def check_key(key: str) -> str:
    """``key`` if a snapshot and a staging folder can hold it, else `InvalidInputError`."""
    check_path(key)
    if any(len(e.encode()) >= MAX_ELEMENT for e in key.split("/")):
        raise InvalidInputError(f"the key {key[:300]!r} has an element of {MAX_ELEMENT} bytes")
    return key


class Staging:
    """Staged values and deletions.

    Parameters
    ----------
    folder : path or None
        Made if it is not there, and kept. None: a folder of our own, made at the first write and
        removed with this object.
    """

    def __init__(self, folder: str | os.PathLike[str] | None):
        self.shared = folder is not None
        self.folder = Path(folder).absolute() if folder is not None else None
        self._owner = os.getpid()
        self._making = threading.Lock()

    def _root(self) -> Path:
        if self.folder is None:
            if self._owner != os.getpid():
                raise InvalidInputError(
                    "a forked process began to write to a store: what it stages would be lost;"
                    " give the store staging=FOLDER"
                )
            with self._making:  # threads that write first at once share one folder
                if self.folder is None:
                    made = Path(tempfile.mkdtemp(prefix="castore-zarr-"))
                    weakref.finalize(self, _remove, made, self._owner)
                    self.folder = made
        return self.folder

    # -- the base

    def base(self) -> str | None:
        """What is written upon, or None where nothing was ever staged."""
        if self.folder is None:
            return None
        where = self.folder / _BASE
        try:
            body = document.decode(where.read_bytes(), _KIND, ["base"], str(where))
        except FileNotFoundError:
            return None
        return str(body["base"])

    def claim(self, base: str) -> str:
        """Say that ``base`` is written upon, unless something was said before; what holds."""
        held = self.base()
        if held is None:
            self._put(_BASE, document.encode(_KIND, {"base": base}), new=True)
            held = self.base() or base
        return held

    def move(
        self, before: str, marks: frozenset[str], base: str, committed: Mapping[str, DiskFile]
    ) -> None:
        """``committed`` is part of ``base`` now, on which what is staged stands from here on.

        What was written or deleted since they, and ``marks`` of the base ``before``, were taken
        stays staged upon ``base``. For who holds `lock`.
        """
        if self.folder is None:
            return
        self._put(_BASE, document.encode(_KIND, {"base": base}))
        now = {key: self._source(key) for key in committed}
        later = self.marks(before) - marks
        with _told(self.folder), suppress(FileNotFoundError):
            shutil.rmtree(self.folder / _GONE)
        for mark in later:
            self._put(f"{_mark(base, '').rpartition('/')[0]}/{mark}", b"")
        for key, file in committed.items():
            if now[key] is None:
                self.mark_gone(base, key)
            elif now[key] == file:
                self.drop(key)

    def clear(self) -> None:
        """Forget everything, also what was written upon."""
        if self.folder is not None:
            with _told(self.folder):
                for name in (_DATA, _GONE, _TMP):
                    shutil.rmtree(self.folder / name, ignore_errors=True)
                (self.folder / _BASE).unlink(missing_ok=True)

    # -- values

    @contextmanager
    def lock(self) -> Iterator[None]:
        """What is held while a value is compared with what it replaces, and put in place.

        Of all threads and processes that use the folder one at a time has it.
        """
        root = self._root()
        with _told(root):
            root.mkdir(parents=True, exist_ok=True)
            held = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield
        finally:
            os.close(held)

    def version(self, key: str) -> str | None:
        """What changes whenever the staged value does; None where none is staged."""
        if self.folder is None or not _storable(key):
            return None
        try:
            with _told(self.folder):
                found = os.stat(self.folder / _place(key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return f"{found.st_ino} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_size}"

    def write(self, key: str, data: Buffer, *, new: bool = False) -> bool:
        """Stage a value; with ``new`` only where none is staged. Whether it was staged."""
        return self._put(_place(check_key(key)), data, new=new)

    def read(self, key: str, span: Span) -> bytes | None:
        """Bytes of a staged value, or None where none is staged."""
        if self.folder is None or not _storable(key):
            return None
        try:
            with _told(self.folder), open(self.folder / _place(key), "rb") as file:
                start, stop = span(os.fstat(file.fileno()).st_size)
                file.seek(start)
                return file.read(stop - start)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def size(self, key: str) -> int | None:
        """Bytes of a staged value, or None."""
        file = self._source(key)
        return None if file is None else file.size

    def drop(self, key: str) -> None:
        """Take back a staged value, if there is one."""
        if self.folder is not None and _storable(key):
            with _told(self.folder), suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(self.folder / _place(key))

    def staged(self) -> list[str]:
        """All keys with a staged value."""
        if self.folder is None:
            return []
        with _told(self.folder):
            return list(_walk(str(self.folder / _DATA), ""))

    def sources(self) -> dict[str, DiskFile]:
        """Every staged value as a source for a commit."""
        found = ((k, self._source(k)) for k in self.staged())
        return {k: f for k, f in found if f is not None}

    def _source(self, key: str) -> DiskFile | None:
        if self.folder is None or not _storable(key):
            return None
        path = self.folder / _place(key)
        return disk_file(path) if path.is_file() else None

    # -- deletions

    def mark_gone(self, base: str, key: str) -> None:
        """Say that ``key`` of ``base`` is deleted."""
        self._put(_mark(base, key), b"")

    def is_gone(self, base: str, key: str) -> bool:
        """Whether ``key`` of ``base`` was deleted."""
        return self.folder is not None and (self.folder / _mark(base, key)).exists()

    def marks(self, base: str) -> frozenset[str]:
        """The marks of all deletions from ``base``, as of now; `marked` reads them."""
        if self.folder is not None:
            with _told(self.folder), suppress(FileNotFoundError):
                return frozenset(os.listdir((self.folder / _mark(base, "")).parent))
        return frozenset()

    def gone(self, base: str) -> Callable[[str], bool]:
        """`is_gone` for many keys, as of now."""
        return marked(self.marks(base))

    # -- within

    def _put(self, name: str, data: Buffer, *, new: bool = False) -> bool:
        """A file that appears whole; False where ``new`` and it is there already."""
        root = self._root()
        target = root / name
        with _told(root):
            (root / _TMP).mkdir(parents=True, exist_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=root / _TMP)
            try:
                with open(handle, "wb") as file:
                    file.write(data)
                if not new:
                    os.replace(temporary, target)
                    return True
                with suppress(FileExistsError):
                    os.link(temporary, target)
                    return True
                return False
            finally:
                Path(temporary).unlink(missing_ok=True)


def _place(key: str) -> str:
    *folders, last = key.split("/")
    return "/".join([_DATA, *(f"+{f}" for f in folders), f"={last}"])


def _mark(base: str, key: str) -> str:
    """Marks of another base do not count: a crash may leave them behind a commit."""
    digests = (digest_of(text.encode("utf-8", "surrogatepass")) for text in (base, key))
    return "/".join([_GONE, *digests])


def marked(marks: frozenset[str]) -> Callable[[str], bool]:
    """Whether a key has one of the marks of deletions."""
    return lambda key: bool(marks) and _mark("", key).rpartition("/")[2] in marks


def _storable(key: str) -> bool:
    try:
        check_key(key)
    except InvalidInputError:
        return False
    return True


def _walk(folder: str, prefix: str) -> Iterator[str]:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            key = prefix + entry.name[1:]
            if entry.name[0] == "=":
                yield key
            else:
                yield from _walk(entry.path, f"{key}/")


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if isinstance(e, BackendError | FileNotFoundError | NotADirectoryError):
            raise
        raise BackendError(f"staging folder {folder}: {e}: make room or choose another") from e


def _remove(folder: Path, owner: int) -> None:
    """A forked child ends without taking its parent's folder away."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
