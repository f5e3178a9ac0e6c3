"""How files and folders come into a local repository: complete before they have a name.

What is made follows the mode bits of the repository's root, whatever the umask, so that a group
can share one. Only what this process made is ever given a mode.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat as st
import time
from dataclasses import dataclass
from pathlib import Path

from castore.digest import Buffer

_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS}
RACES = 20  # a rename replaces an empty folder: one that another writer is about to fill
_REFUSALS = 3  # a rename that is refused is tried again as often
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def version_of(info: os.stat_result) -> str:
    """Inode, time and size: see `NewFile.seal` for why the three suffice."""
    return f"{info.st_ino:x}-{info.st_mtime_ns:x}-{info.st_size:x}"


def file_mode(root: Path) -> int:
    """Mode of a new file: as readable as the root, group-writable where the root is."""
    mode = os.stat(root).st_mode
    return (0o664 if mode & st.S_IWGRP else 0o644) & mode | 0o600


def make_folder(root: Path, folder: Path) -> None:
    """Make ``folder`` and what is missing above it, below ``root``, with the root's mode bits.

    It gets its mode before it gets its name: another user of the group may want to write into it
    at once.
    """
    if folder == root or folder.is_dir():
        return
    mode = os.stat(root).st_mode & (0o777 | st.S_ISGID)
    if folder == root / "tmp":
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(mode)
        return
    make_folder(root, root / "tmp")
    for attempt in range(RACES):
        make_folder(root, folder.parent)
        try:
            _name_folder(root / "tmp" / secrets.token_hex(16), folder, mode)
            return
        except FileNotFoundError:
            if attempt == RACES - 1:
                raise


def _name_folder(unnamed: Path, folder: Path, mode: int) -> None:
    """Make ``unnamed`` and rename it; `FileNotFoundError` if the folder above was replaced."""
    unnamed.mkdir()
    try:
        unnamed.chmod(mode)
        unnamed.rename(folder)
    except OSError as e:
        with contextlib.suppress(OSError):
            unnamed.rmdir()
        if e.errno not in (errno.EEXIST, errno.ENOTEMPTY) or not folder.is_dir():
            raise


def sync_folder(folder: Path) -> None:
    """Make the entries of ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the files of one batch are made: what holds for all of them, asked once."""

    folder: Path
    mode: int
    unnamed: bool  # whether a file without a name can be given one

    @classmethod
    def below(cls, root: Path) -> Place:
        make_folder(root, root / "tmp")
        return cls(root / "tmp", file_mode(root), os.path.isdir("/proc/self/fd"))


class NewFile:
    """A file without a name; in ``tmp/`` under a random one where the file system needs that."""

    def __init__(self, place: Place):
        self._path: Path | None = None
        self.fd = self._open(place)
        os.fchmod(self.fd, place.mode)

    def _open(self, place: Place) -> int:
        if place.unnamed:
            try:
                return os.open(place.folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            except OSError as e:
                if e.errno not in _NO_TMPFILE:
                    raise
        return self.named(place)

    def named(self, place: Place) -> int:
        """Open it under a random name."""
        path = place.folder / secrets.token_hex(16)
        fd = os.open(path, _NEW, 0o600)
        self._path = path
        return fd

    def write(self, data: Buffer) -> None:
        """Add all of ``data``."""
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(self.fd, view) :]

    def seal(self, after_ns: int = 0) -> None:
        """Set a time of its own, later than ``after_ns``, and make the content durable.

        The kernel's own stamp is as coarse as 4 ms, inodes are used again, and counters keep
        their size: without this, a version could come back within a few replacements.
        """
        now = max(time.time_ns(), after_ns + 1)
        os.utime(self.fd, ns=(now, now))
        os.fsync(self.fd)

    def link(self, path: str | Path) -> str:
        """Give it the name ``path``, which must be free; its version."""
        if self._path is not None:
            os.link(self._path, path, follow_symlinks=False)
        else:
            # src_dir_fd only makes Python call linkat, which follows the link in /proc.
            os.link(f"/proc/self/fd/{self.fd}", path, src_dir_fd=self.fd, follow_symlinks=True)
        return version_of(os.fstat(self.fd))

    def rename(self, path: str, folder: Path) -> str:
        """Give it the name ``path`` in place of what has it; its version."""
        if self._path is None:
            temporary = folder / secrets.token_hex(16)
            self.link(temporary)
            self._path = temporary
        for attempt in range(_REFUSALS + 1):
            try:
                os.replace(self._path, path)
                break
            except PermissionError:  # a reader may stand in the way for a moment (SMB)
                if attempt == _REFUSALS:
                    raise
                time.sleep(0.02 * 2**attempt)
        self._path = None
        return version_of(os.fstat(self.fd))

    def close(self) -> None:
        """Let go of it; without a name by now, it is gone."""
        os.close(self.fd)
        if self._path is not None:
            self._path.unlink(missing_ok=True)
