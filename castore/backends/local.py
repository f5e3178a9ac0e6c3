"""Named bytes in a local folder: durable, exclusive, whole or nothing.

fsspec's own local writer gives none of these (an exception leaves a partial file under its final
name; its ``create`` mode checks, then writes), so files are made without a name, synced, and
linked into place.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import stat as st
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from castore.backend import MAX_REPLACE, MISSING, ExpiredError, Stat, check_name
from castore.backends._folder_lock import folder_lock, lock_file, locks_reach
from castore.backends._folder_write import (
    RACES,
    NewFile,
    Place,
    file_mode,
    make_folder,
    sync_folder,
    version_of,
)
from castore.backends._rules import refuse_large, span
from castore.digest import Buffer
from castore.errors import (
    AlreadyExistsError,
    BackendError,
    ObjectNotFoundError,
)

_NO_PERMISSION = (
    "no permission: ask the repository's owner ('castore init --shared' serves a group)"
)
_ADVICE = {
    errno.ENOSPC: "the disk is full: free room and run the command again",
    errno.EDQUOT: "the disk quota is used up: free room and run the command again",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.ELOOP: "a symbolic link stands where a file should: look who put it there",
    errno.EIO: "the disk failed: look at the system's log before anything else",
}

_OWN = {"lock", "lock.queue", "lock.replace"}
_REPLACE_TIMEOUT = 60.0  # seconds; the lock is held for one small write
_AT_ONCE = 128  # files open at once: the usual limit of a process is 1024


class LocalBackend:
    """A folder; see `castore.backend.Backend` for the contract."""

    kind = "local"
    parallel = 2

    def __init__(self, path: str):
        self._root = Path(path).absolute()
        self.url = str(self._root)
        self._under = os.path.join(self.url, "")
        self._settled: set[Path] = set()

    def __repr__(self) -> str:
        return f"LocalBackend({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return LocalBackend, (self.url,)

    # -- reading

    def get(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        first, last = span(start, stop)
        with self._open(name) as fd:
            return self._read(fd, first, last)

    def get_versioned(self, name: str) -> tuple[bytes, str]:
        with self._open(name) as fd:
            return self._read(fd, 0, None), version_of(os.fstat(fd))

    def stat(self, name: str) -> Stat:
        with self._open(name) as fd:
            return _stat(name, os.fstat(fd))

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> Iterator[Stat]:
        if prefix:
            check_name(prefix)
        found = 0
        for name, info in self._walk(prefix, after):
            yield _stat(name, info)
            found += 1
            if found == limit:
                return

    def folders(self, prefix: str) -> builtins.list[str]:
        children = self._children(check_name(prefix) if prefix else "")
        return sorted(
            c.name
            for c in children
            if c.is_dir(follow_symlinks=False)
            and next(self._walk(f"{prefix}/{c.name}".lstrip("/"), None), None) is not None
        )

    def now(self) -> float:
        return time.time()

    # -- writing

    def create(self, name: str, data: Buffer) -> str:
        version = self.create_many([(name, data)])[0]
        if version is None:
            raise AlreadyExistsError(f"{self.url}/{name} exists already")
        return version

    def create_many(self, items: Sequence[tuple[str, Buffer]]) -> builtins.list[str | None]:
        """Write all, sync all, link all, then sync each folder once."""
        versions = self.write_many([(name, (data,)) for name, data in items])
        self.sync(name for name, _ in items)
        return versions

    def write_many(
        self, items: Sequence[tuple[str, Sequence[Buffer]]]
    ) -> builtins.list[str | None]:
        for name, parts in items:
            check_name(name)
            refuse_large(name, *parts)
        versions: builtins.list[str | None] = []
        with self._told("write"):
            self._need_root()
            for i in range(0, len(items), _AT_ONCE):
                versions += self._write_some(items[i : i + _AT_ONCE])
        return versions

    def _write_some(
        self, items: Sequence[tuple[str, Sequence[Buffer]]]
    ) -> builtins.list[str | None]:
        with contextlib.ExitStack() as stack:
            files: builtins.list[NewFile | None] = []
            place: Place | None = None
            for name, parts in items:
                if os.path.lexists(self._path(name)):
                    files.append(None)
                    continue
                place = place or Place.below(self._root)
                make_folder(self._root, place.folder)
                file = NewFile(place)
                stack.callback(file.close)
                for part in parts:
                    file.write(part)
                files.append(file)
            for made in files:
                if made is not None:
                    made.seal()
            pairs = zip(items, files, strict=True)
            return [
                None if f is None else self._link(f, self._path(name)) for (name, _), f in pairs
            ]

    def _link(self, file: NewFile, path: str) -> str | None:
        for _ in range(RACES):
            try:
                return file.link(path)
            except FileExistsError:
                return None
            except FileNotFoundError:
                make_folder(self._root, Path(path).parent)
        raise FileNotFoundError(errno.ENOENT, "the folder vanished", os.path.dirname(path))

    def sync(self, names: Iterable[str]) -> None:
        with self._told("write"):
            self._sync(map(Path, {os.path.dirname(self._path(n)) for n in names}))

    def _sync(self, folders: Iterable[Path]) -> None:
        """Sync ``folders``, and what is above those that this backend has not seen before.

        Another process may have made such a folder a moment ago, and not have synced it yet.
        """
        todo = set(folders)
        for folder in list(todo):
            while folder != self._root and folder not in self._settled:
                folder = folder.parent
                todo.add(folder)
        for folder in todo:
            sync_folder(folder)
        self._settled |= todo

    def replace(self, name: str, data: Buffer, if_version: str) -> str:
        refuse_large(name, data, limit=MAX_REPLACE)
        path = self._path(name)
        with self._told("write"), self._replacing():
            try:
                info = os.lstat(path)
                current, after = version_of(info), info.st_mtime_ns
            except FileNotFoundError:
                current, after = MISSING, 0
            if current != if_version:
                raise AlreadyExistsError(f"{self.url}/{name} was changed by another writer")
            folder = Path(path).parent
            make_folder(self._root, folder)
            file = NewFile(Place.below(self._root))
            try:
                file.write(data)
                file.seal(after)
                version = self._take_place(file, path, new=if_version == MISSING)
            finally:
                file.close()
            self._sync({folder})
        return version

    def _take_place(self, file: NewFile, path: str, *, new: bool) -> str:
        """Rename over a name that stands; link to a new one, which `create` knows no lock for."""
        if not new:
            return file.rename(path, self._root / "tmp")
        try:
            return file.link(path)
        except FileExistsError:
            raise AlreadyExistsError(f"{path} was made by another writer") from None

    def delete(self, name: str, expires: float | None = None) -> None:
        outcome = self.delete_many([name], expires)[0]
        if outcome is not None:
            raise outcome

    def delete_many(
        self, names: Sequence[str], expires: float | None = None
    ) -> builtins.list[BaseException | None]:
        outcomes: builtins.list[BaseException | None] = []
        folders = set()
        for name in names:
            path = self._path(name)
            try:
                if expires is not None and time.time() > expires:
                    raise ExpiredError(f"{name}: not deleted, its time is over")
                with self._told("delete"):
                    self._need_root()
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
                folders.add(Path(path).parent)
                outcomes.append(None)
            except BackendError as e:
                outcomes.append(e)
        with self._told("delete"):
            for folder in folders:
                with contextlib.suppress(FileNotFoundError):
                    sync_folder(folder)
        return outcomes

    def lock(self, *, exclusive: bool, timeout: float) -> AbstractContextManager[None]:
        self._need_root()
        return folder_lock(self._root, exclusive=exclusive, timeout=timeout, mode=self._lock_mode())

    def _lock_mode(self) -> int:
        with self._told("lock"):
            self._need_root()
            return file_mode(self._root)

    def probe(self) -> bool:
        """Writes nothing: the file system's kind says whether its locks reach every writer."""
        return locks_reach(self._root)

    def prepare(self, *, shared: bool) -> None:
        with self._told("make"):
            made = [p for p in (self._root, *self._root.parents) if not p.exists()]
            self._root.mkdir(parents=True, exist_ok=True)
            if shared:
                self._share(fresh=self._root in made)
            make_folder(self._root, self._root / "tmp")
            sync_folder(self._root)
            for folder in made:
                with contextlib.suppress(PermissionError):  # a parent one may pass but not read
                    sync_folder(folder.parent)

    def _share(self, *, fresh: bool) -> None:
        mode = st.S_IMODE(os.stat(self._root).st_mode)
        wanted = 0o2775 if fresh else mode | 0o2770
        if mode != wanted:
            os.chmod(self._root, wanted)

    # -- within

    def _path(self, name: str) -> str:
        return f"{self._under}{check_name(name)}"

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[int]:
        path = self._path(name)
        with self._told("read"):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            except (FileNotFoundError, NotADirectoryError):
                self._need_root()
                raise ObjectNotFoundError(f"{self.url}/{name} does not exist") from None
            try:
                mode = os.fstat(fd).st_mode
                if st.S_ISDIR(mode):
                    raise ObjectNotFoundError(f"{self.url}/{name} is a folder")
                if not st.S_ISREG(mode):
                    raise BackendError(f"{path} is not a regular file: look who put it there")
                yield fd
            finally:
                os.close(fd)

    @staticmethod
    def _read(fd: int, start: int, stop: int | None) -> bytes:
        size = os.fstat(fd).st_size
        stop = size if stop is None else min(stop, size)
        parts = []
        while start < stop and (part := os.pread(fd, stop - start, start)):
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _need_root(self) -> None:
        if not self._root.is_dir():
            raise BackendError(
                f"the folder {self.url} is not there: is its disk mounted?"
            ) from FileNotFoundError(errno.ENOENT, "no such folder", self.url)

    def _children(self, folder: str) -> builtins.list[os.DirEntry[str]]:
        try:
            with os.scandir(self._root / folder) as entries:
                return sorted(entries, key=_sort_key)
        except (FileNotFoundError, NotADirectoryError):
            self._need_root()
            return []
        except OSError as e:
            raise self._error("list", e) from e

    def _walk(self, folder: str, after: str | None) -> Iterator[tuple[str, os.stat_result]]:
        """Files below ``folder``, sorted by full name; folders before ``after`` are skipped."""
        for child in self._children(folder):
            name = f"{folder}/{child.name}" if folder else child.name
            if child.is_dir(follow_symlinks=False):
                if name == "tmp":
                    continue
                if after is None or f"{name}/\U0010ffff" > after:
                    yield from self._walk(name, after)
            elif name not in _OWN and (after is None or name > after):
                try:
                    info = child.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if st.S_ISREG(info.st_mode):
                    yield name, info

    @contextlib.contextmanager
    def _replacing(self) -> Iterator[None]:
        """Alone among `replace` calls; not in ``tmp/``, where old files are swept away."""
        self._need_root()
        mode, deadline = file_mode(self._root), time.monotonic() + _REPLACE_TIMEOUT
        with lock_file(self._root / "lock.replace", True, deadline, mode):
            yield

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except (BackendError, AlreadyExistsError):
            raise
        except OSError as e:
            raise self._error(what, e) from e

    def _error(self, what: str, e: OSError) -> BackendError:
        reason = e.strerror or str(e)
        advice = _ADVICE.get(e.errno or 0)
        where = e.filename2 or e.filename or self.url
        text = f"{advice} ({reason}: {where})" if advice else f"{reason} ({where})"
        return BackendError(f"{self.url}: could not {what}: {text}")


def _sort_key(entry: os.DirEntry[str]) -> str:
    return entry.name + "/" if entry.is_dir(follow_symlinks=False) else entry.name


def _stat(name: str, info: os.stat_result) -> Stat:
    return Stat(name, info.st_size, info.st_mtime, version_of(info))
