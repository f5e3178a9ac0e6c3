"""Named bytes in a local folder: durable, exclusive, whole or nothing.

fsspec's own local writer gives none of these (an exception leaves a partial file under its final
name; its ``create`` mode checks, then writes), so files are made without a name, synced, and
linked into place.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import os
import secrets
import stat as st
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from castore.backend import MAX_OBJECT, MISSING, ExpiredError, Stat, check_name
from castore.backends._folder_lock import folder_lock
from castore.digest import Buffer
from castore.errors import (
    AlreadyExistsError,
    BackendError,
    InvalidInputError,
    ObjectNotFoundError,
)

_ADVICE = {
    errno.ENOSPC: "the disk is full: free room and run the command again",
    errno.EDQUOT: "the disk quota is used up: free room and run the command again",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "no permission: ask the repository's owner ('castore init --shared' serves a group)",
    errno.EPERM: "no permission: ask the repository's owner ('castore init --shared' serves a group)",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.EIO: "the disk failed: look at the system's log before anything else",
}


class LocalBackend:
    """A folder; see `castore.backend.Backend` for the contract."""

    kind = "local"
    parallel = 4

    def __init__(self, path: str):
        self._root = Path(path).absolute()
        self.url = str(self._root)

    def __repr__(self) -> str:
        return f"LocalBackend({self.url!r})"

    # -- reading

    def get(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        with self._open(name) as fd:
            return self._read(fd, start or 0, stop)

    def get_versioned(self, name: str) -> tuple[bytes, str]:
        with self._open(name) as fd:
            return self._read(fd, 0, None), _version(os.fstat(fd))

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
        return [
            c.name
            for c in children
            if c.is_dir(follow_symlinks=False)
            and next(self._walk(f"{prefix}/{c.name}".lstrip("/"), None), None) is not None
        ]

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
        for name, data in items:
            check_name(name)
            _refuse_large(name, data)
        files: builtins.list[int] = []
        folders: set[Path] = set()
        with self._told("write"):
            self._need_root()
            try:
                for _, data in items:
                    files.append(self._unnamed())
                    _write(files[-1], data)
                for fd in files:
                    os.fsync(fd)
                pairs = zip(items, files, strict=True)
                versions = [self._link(fd, name, folders) for (name, _), fd in pairs]
            finally:
                for fd in files:
                    os.close(fd)
            for folder in folders:
                _sync_folder(folder)
        return versions

    def sync(self, names: Iterable[str]) -> None:
        with self._told("write"):
            for folder in {self._path(n).parent for n in names}:
                _sync_folder(folder)

    def replace(self, name: str, data: Buffer, if_version: str) -> str:
        _refuse_large(name, data)
        path = self._path(name)
        with self._told("write"), self._replacing():
            try:
                current = _version(os.lstat(path))
            except FileNotFoundError:
                current = MISSING
            if current != if_version:
                raise AlreadyExistsError(f"{self.url}/{name} was changed by another writer")
            temporary = self._root / "tmp" / secrets.token_hex(16)
            folders: set[Path] = {path.parent}
            self._make_folder(path.parent, folders)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                _write(fd, data)
                os.fchmod(fd, self._file_mode())
                os.fsync(fd)
                version = _version(os.fstat(fd))
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            finally:
                os.close(fd)
            for folder in folders:
                _sync_folder(folder)
        return version

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
                    path.unlink(missing_ok=True)
                folders.add(path.parent)
                outcomes.append(None)
            except BackendError as e:
                outcomes.append(e)
        with self._told("delete"):
            for folder in folders:
                with contextlib.suppress(FileNotFoundError):
                    _sync_folder(folder)
        return outcomes

    def lock(self, *, exclusive: bool, timeout: float) -> AbstractContextManager[None]:
        self._need_root()
        return folder_lock(
            self._root, exclusive=exclusive, timeout=timeout, mode=self._file_mode() | 0o200
        )

    def probe(self) -> bool:
        return True

    def prepare(self, *, shared: bool) -> None:
        with self._told("make"):
            self._root.mkdir(parents=True, exist_ok=True)
            if shared:
                os.chmod(self._root, 0o2775)
            (self._root / "tmp").mkdir(exist_ok=True)
            if shared:
                os.chmod(self._root / "tmp", 0o2775)
            _sync_folder(self._root)
            _sync_folder(self._root.parent)

    # -- within

    def _path(self, name: str) -> Path:
        return self._root / check_name(name)

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
                if not st.S_ISREG(os.fstat(fd).st_mode):
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
        except FileNotFoundError:
            self._need_root()
            return []
        except OSError as e:
            raise self._error("list", e) from e

    def _walk(self, folder: str, after: str | None) -> Iterator[tuple[str, os.stat_result]]:
        """Files below ``folder`` in the order of their names; whole folders before ``after`` skipped."""
        for child in self._children(folder):
            name = f"{folder}/{child.name}" if folder else child.name
            if child.is_dir(follow_symlinks=False):
                if name == "tmp" and folder == "":
                    continue
                if after is None or f"{name}/\U0010ffff" > after:
                    yield from self._walk(name, after)
            elif after is None or name > after:
                try:
                    info = child.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if st.S_ISREG(info.st_mode):
                    yield name, info

    def _unnamed(self) -> int:
        try:
            fd = os.open(self._root / "tmp", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            self._make_folder(self._root / "tmp", set())
            fd = os.open(self._root / "tmp", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        os.fchmod(fd, self._file_mode())
        return fd

    def _link(self, fd: int, name: str, folders: set[Path]) -> str | None:
        path = self._root / name
        folders.add(path.parent)
        for _ in range(2):
            try:
                os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
                return _version(os.fstat(fd))
            except FileExistsError:
                return None
            except FileNotFoundError:
                self._make_folder(path.parent, folders)
        raise FileNotFoundError(errno.ENOENT, "folder vanished", str(path.parent))

    def _make_folder(self, folder: Path, made_in: set[Path]) -> None:
        """Make ``folder`` with the root's group policy, noting what must be synced."""
        if folder == self._root or folder.is_dir():
            return
        self._make_folder(folder.parent, made_in)
        made_in.add(folder.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o755)
            if self._shared:
                os.chmod(folder, 0o2775)

    @property
    def _shared(self) -> bool:
        return bool(os.stat(self._root).st_mode & st.S_IWGRP)

    def _file_mode(self) -> int:
        """Readable by those who may list the root; the group may also replace, if it may write there."""
        with contextlib.suppress(OSError):
            return 0o664 if self._shared else 0o644 & os.stat(self._root).st_mode | 0o600
        return 0o644

    @contextlib.contextmanager
    def _replacing(self) -> Iterator[None]:
        self._need_root()
        self._make_folder(self._root / "tmp", set())
        mode = self._file_mode() | 0o200
        fd = os.open(
            self._root / "tmp" / "replace.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode
        )
        try:
            with contextlib.suppress(PermissionError):
                os.fchmod(fd, mode)
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
            fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except (BackendError, AlreadyExistsError):
            raise
        except OSError as e:
            raise self._error(what, e) from e

    def _error(self, what: str, e: OSError) -> BackendError:
        advice = _ADVICE.get(e.errno or 0, e.strerror or str(e))
        return BackendError(f"{self.url}: could not {what}: {advice} ({e.filename or self.url})")


def _sort_key(entry: os.DirEntry[str]) -> str:
    return entry.name + "/" if entry.is_dir(follow_symlinks=False) else entry.name


def _refuse_large(name: str, data: Buffer) -> None:
    if len(data) > MAX_OBJECT:
        raise InvalidInputError(f"{name}: {len(data)} bytes, at most {MAX_OBJECT}")


def _version(info: os.stat_result) -> str:
    return f"{info.st_ino:x}-{info.st_mtime_ns:x}-{info.st_size:x}"


def _stat(name: str, info: os.stat_result) -> Stat:
    return Stat(name, info.st_size, info.st_mtime, _version(info))


def _write(fd: int, data: Buffer) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
