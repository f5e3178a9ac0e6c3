"""The repository lock of a local folder: shared and exclusive, fair, freed when its holder dies.

A second file makes the queue: whoever wants in passes it first, and a waiting exclusive holder
keeps it, so that shared holders that overlap cannot starve it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import re
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from castore.errors import BackendError

_NETWORK = {
    *("afs", "beegfs", "cifs", "fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs"),
    *("glusterfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"),
}
"""File systems whose locks may hold on this machine only, or not at all."""
_MOUNTS = Path("/proc/self/mountinfo")

_held: weakref.WeakSet[_Descriptor] = weakref.WeakSet()
_opening = threading.RLock()
"""Held while a descriptor is opened and noted, and over a fork, so that none escapes `_held`."""


class _Descriptor:
    """A lock file's descriptor, closed in forked children: an inherited one outlives its owner."""

    def __init__(self, path: Path, mode: int):
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with _opening:
            self.fd = os.open(path, flags, mode)
            _held.add(self)
        with contextlib.suppress(OSError):
            os.fchmod(self.fd, mode)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _close_in_child() -> None:
    for descriptor in list(_held):
        descriptor.close()
    _opening.release()


os.register_at_fork(
    before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_close_in_child
)


@contextlib.contextmanager
def folder_lock(root: Path, *, exclusive: bool, timeout: float, mode: int) -> Iterator[None]:
    """Hold ``root/lock``; `BackendError` that names the holders after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    with lock_file(root / "lock.queue", exclusive, deadline, mode) as queue:
        gate = _open(root / "lock", mode)
        try:
            _take(gate, root / "lock", exclusive, deadline)
            if not exclusive:
                fcntl.flock(queue.fd, fcntl.LOCK_UN)
            yield
        finally:
            _release(gate)


@contextlib.contextmanager
def lock_file(path: Path, exclusive: bool, deadline: float, mode: int) -> Iterator[_Descriptor]:
    """Hold the lock of one file; `BackendError` that names the holders at ``deadline``."""
    descriptor = _open(path, mode)
    try:
        _take(descriptor, path, exclusive, deadline)
        yield descriptor
    finally:
        _release(descriptor)


def locks_reach(root: Path) -> bool:
    """Whether a lock below ``root`` holds for all who can write there, by its file system."""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:  # no Linux: such file systems cannot be told from others
        return True
    real, found = os.path.realpath(root), ("", "")
    for line in lines:
        place, _, kind = line.partition(" - ")
        at = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), place.split()[4])
        if f"{real}/".startswith(f"{at.rstrip('/')}/") and len(at) >= len(found[0]):
            found = at, kind.split()[0]
    return found[1] not in _NETWORK


def _open(path: Path, mode: int) -> _Descriptor:
    try:
        return _Descriptor(path, mode)
    except OSError as e:
        hint = ": writing needs permission there" if isinstance(e, PermissionError) else ""
        raise BackendError(f"{path} cannot be opened for locking: {e.strerror}{hint}") from e


def _take(descriptor: _Descriptor, path: Path, exclusive: bool, deadline: float) -> None:
    how = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB
    while True:
        try:
            fcntl.flock(descriptor.fd, how)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise BackendError(
                    f"{path} is held by {_holders(descriptor.fd)}: wait for it to finish, or end it"
                ) from None
        time.sleep(random.uniform(0.002, 0.02))


def _release(descriptor: _Descriptor) -> None:
    if descriptor.fd >= 0:
        fcntl.flock(descriptor.fd, fcntl.LOCK_UN)
        descriptor.close()


def _holders(fd: int) -> str:
    """Process ids that hold the lock, from /proc/locks (Linux)."""
    inode = str(os.fstat(fd).st_ino)
    try:
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return "another process"
    pids = {w[4] for w in lines if len(w) > 5 and w[1] == "FLOCK" and w[5].endswith(":" + inode)}
    return "process " + ", ".join(sorted(pids)) if pids else "another process"
