"""The files of a local root: made under another name in the same folder, synced, then renamed."""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import secrets
import stat as st
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from castore import AlreadyExistsError, BackendError, InvalidInputError, ObjectNotFoundError
from castore.backend import MISSING, Stat
from castore_experiments.files import Data, parts
from castore_experiments.layout import CHECKPOINTS, OWN

LEFTOVER = ".castore-"
"""How the name of an unfinished file begins: left only by a process that was killed."""

_REFUSALS = 7  # a rename that is refused is tried again as often: 2.5 seconds in all
_LARGE = 16 << 20  # bytes
_STALE = 86400.0  # seconds without a write after which a leftover is nobody's
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_OLD = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_ADVICE = {
    errno.ENOSPC: ": free room and call again",
    errno.EDQUOT: ": free room and call again",
    errno.EACCES: ": ask the owner of the root",
    errno.EPERM: ": ask the owner of the root",
}


_gone: set[int] = set()


def _unlink(path: Path) -> None:
    """Take a name away at once; the blocks of a large file are given back by another thread.

    The kernel does that with the last descriptor, at a quarter of a second a GB in the page cache.
    """
    # While Python ends no thread gets to run, and to start one would wait for it forever.
    beside = hasattr(os, "O_PATH") and not sys.is_finalizing()
    if not beside or path.lstat().st_size < _LARGE:
        return path.unlink()
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    _gone.add(fd)
    try:
        path.unlink()
    finally:
        try:
            threading.Thread(target=_let_go, args=(fd,), daemon=True).start()
        except RuntimeError:  # no thread starts while Python ends
            _let_go(fd)


def _let_go(fd: int) -> None:
    _gone.discard(fd)  # first: a fork in between must not close what has the number then
    os.close(fd)


def _after_fork() -> None:
    """A child would keep the blocks for as long as it lives."""
    for fd in list(_gone):
        _let_go(fd)


os.register_at_fork(after_in_child=_after_fork)


class LocalFiles:
    """The files below one folder; see `castore_experiments.files.Files`."""

    kind = "local"

    def __init__(self, path: str):
        self._root = Path(path).absolute()
        self.url = str(self._root)

    def __repr__(self) -> str:
        return f"LocalFiles({self.url!r})"

    # -- reading

    def get(self, name: str) -> bytes:
        return self.get_versioned(name)[0]

    def get_versioned(self, name: str) -> tuple[bytes, str]:
        with self._open(name) as fd, open(fd, "rb", closefd=False) as file:
            return file.read(), version_of(os.fstat(fd))

    def read_parts(self, name: str, size: int = 4 << 20) -> Iterator[bytes]:
        """The content, ``size`` bytes at a time."""
        with self._open(name) as fd:
            while part := os.read(fd, size):
                yield part

    def stat(self, name: str) -> Stat:
        with self._open(name) as fd:
            return _stat(name, os.fstat(fd))

    def list(self, prefix: str) -> Iterator[Stat]:
        found = []
        for folder, _, names in os.walk(self._path(prefix), onerror=self._walk_error):
            place = Path(folder)
            for name in names:
                if not name.startswith(LEFTOVER):
                    with contextlib.suppress(FileNotFoundError):
                        info = (place / name).stat()
                        relative = (place / name).relative_to(self._root).as_posix()
                        found.append((relative, info))
        return (_stat(n, i) for n, i in sorted(found) if st.S_ISREG(i.st_mode))

    def _walk_error(self, e: OSError) -> None:
        if not isinstance(e, FileNotFoundError):
            raise self._error("list", e) from e

    def folders(self, prefix: str) -> builtins.list[str]:
        try:
            with os.scandir(self._path(prefix)) as entries:
                return sorted(e.name for e in entries if _is_folder(e))
        except FileNotFoundError:
            return []
        except OSError as e:
            raise self._error("list", e) from e

    # -- writing

    def prepare(self) -> None:
        """Make the root's folder, durably; one that is there is no error."""
        with self._told("make the folder"):
            self._make_folder(self._root)

    def create(self, name: str, data: Data) -> str:
        return self.replace(name, data, MISSING)

    def stage(self, name: str, data: Data) -> Staged:
        """Write what is to stand at ``name`` beside it, durably; `replace` gives it the name.

        Its context takes it away again unless it got the name.
        """
        path = self._path(name)
        with self._told("write"):
            self._make_folder(path.parent)
            file = Staged(path.parent)
            try:
                file.write(data)
            except BaseException:
                file.close()
                raise
            return file

    def replace(self, name: str, data: Data | Staged, if_version: str) -> str:
        path = self._path(name)
        with self._told("write"):
            if not isinstance(data, Staged):
                data = self.stage(name, data)
            with data as file:
                if if_version == MISSING:
                    file.link(path)
                elif self._version(path) == if_version:
                    file.rename(path)
                else:
                    raise AlreadyExistsError(f"{path} was changed by another program")
                _sync_folder(path.parent)
                return version_of(os.fstat(file.fd))

    def put(self, name: str, data: Data) -> str:
        """Store ``data`` whatever stands there; whole, durable; the version."""
        path = self._path(name)
        with self._told("write"), self.stage(name, data) as file:
            file.rename(path)
            _sync_folder(path.parent)
            return version_of(os.fstat(file.fd))

    def rename(self, name: str, target: str) -> None:
        """Give a file another name in the same folder, which must be free."""
        path, new = self._path(name), self._path(target)
        with self._told("rename"):
            if os.path.lexists(new):
                raise AlreadyExistsError(f"{new} exists already")
            _replace(path, new)
            _sync_folder(new.parent)

    def delete(self, name: str) -> None:
        path = self._path(name)
        with self._told("delete"), contextlib.suppress(FileNotFoundError):
            _unlink(path)
            _sync_folder(path.parent)

    def sweep(self, now: float) -> builtins.list[str]:
        """Take away what writers left that were killed over a day ago; gives the names.

        Looks where castore writes in a root: below ``checkpoints/``, and at its own documents.
        """
        gone = []
        with self._told("sweep"):
            for path in self._leftovers():
                with contextlib.suppress(FileNotFoundError):
                    info = path.lstat()
                    if st.S_ISREG(info.st_mode) and info.st_mtime + _STALE < now:
                        path.unlink()
                        gone.append(path.relative_to(self._root).as_posix())
        return sorted(gone)

    def _leftovers(self) -> Iterator[Path]:
        yield from self._path(CHECKPOINTS).rglob(f"{LEFTOVER}*")
        for own in (self._path(OWN), self._path(f"{OWN}/manifest")):
            yield from own.glob(f"{LEFTOVER}*")

    # -- within

    def _path(self, name: str) -> Path:
        """Where ``name`` is; `InvalidInputError` for one that would lead out of the root."""
        if name and (name.startswith("/") or "\0" in name or {".", "..", ""} & {*name.split("/")}):
            raise InvalidInputError(f"{name!r} is no name of a file within {self.url}")
        return self._root / name

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[int]:
        path = self._path(name)
        with self._told("read"):
            try:
                fd = os.open(path, _OLD)
            except (FileNotFoundError, NotADirectoryError):
                raise ObjectNotFoundError(f"{path} does not exist") from None
            try:
                if not st.S_ISREG(os.fstat(fd).st_mode):
                    raise BackendError(f"{path} is not a regular file: look who put it there")
                yield fd
            finally:
                os.close(fd)

    @staticmethod
    def _version(path: Path) -> str:
        try:
            return version_of(path.stat())
        except FileNotFoundError:
            return MISSING

    def _make_folder(self, folder: Path) -> None:
        """Make ``folder`` and what is missing above it, durably; a group's folders stay its own."""
        missing = [p for p in (folder, *folder.parents) if not p.exists()]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            above = path.parent.stat().st_mode
            if above & st.S_ISGID:
                with contextlib.suppress(PermissionError):  # another user of the group made it
                    path.chmod(above & (0o777 | st.S_ISGID))
            _sync_folder(path.parent)

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except (AlreadyExistsError, BackendError):
            raise
        except OSError as e:
            raise self._error(what, e) from e

    def _error(self, what: str, e: OSError) -> BackendError:
        where = e.filename2 or e.filename or self.url
        advice = _ADVICE.get(e.errno or 0, "")
        return BackendError(f"{where}: could not {what}: {e.strerror or e}{advice}")


class Staged:
    """A whole file under a passing name, in the folder where it is to stand."""

    def __init__(self, folder: Path):
        self._path: Path | None = folder / f"{LEFTOVER}{secrets.token_hex(8)}"
        self.fd = os.open(self._path, _NEW, 0o600)
        with contextlib.suppress(PermissionError):  # a file system without modes
            os.fchmod(self.fd, 0o666 & os.stat(folder).st_mode | 0o600)

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take it away unless it got a name; closing twice is no error."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def write(self, data: Data) -> None:
        """Take all of ``data`` and make it durable.

        It gets a time of its own: the kernel's stamps are as coarse as 4 ms, so an edit in the same
        moment could not be told from it.
        """
        for part in parts(data):
            view = memoryview(part).cast("B")
            while view:
                view = view[os.write(self.fd, view) :]
        now = time.time_ns()
        os.utime(self.fd, ns=(now, now))
        os.fsync(self.fd)

    def link(self, path: Path) -> None:
        """Take the name ``path``, which must be free."""
        assert self._path is not None
        try:
            os.link(self._path, path, follow_symlinks=False)
        except FileExistsError:
            raise AlreadyExistsError(f"{path} exists already") from None
        except OSError as e:
            if e.errno not in _NO_LINKS or os.path.lexists(path):
                raise
            self.rename(path)  # a file system without links
            return
        self._path.unlink()
        self._path = None

    def rename(self, path: Path) -> None:
        """Take the name ``path`` in place of what has it."""
        assert self._path is not None
        _replace(self._path, path)
        self._path = None


def _replace(source: Path, target: Path) -> None:
    """Rename; where that is refused, again for a while: a reader may hold the target (SMB)."""
    for attempt in range(_REFUSALS + 1):
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if attempt == _REFUSALS or not os.access(target.parent, os.W_OK):
                raise
            time.sleep(0.02 * 2**attempt)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        if entry.is_symlink():  # it leads nowhere, or in a circle
            return False
        raise


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def version_of(info: os.stat_result) -> str:
    """Inode, both times and size: differs for every file that was ever under a name."""
    return f"{info.st_ino:x}-{info.st_ctime_ns:x}-{info.st_mtime_ns:x}-{info.st_size:x}"


def _stat(name: str, info: os.stat_result) -> Stat:
    return Stat(name, info.st_size, info.st_mtime, version_of(info))
