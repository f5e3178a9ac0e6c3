"""The lock that tells a live writer's folder from a dead one's.

An exclusive ``flock``, freed by the system when its holder dies however it dies. Closed in forked
children, which would otherwise keep it alive after its owner.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from castore import BackendError

_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


class WriterLock:
    """An exclusive lock on a file; make one with `take`."""

    def __init__(self, path: Path, fd: int):
        self.path, self._fd = path, fd
        _held.add(self)

    @staticmethod
    def take(path: Path) -> WriterLock | None:
        """The lock of ``path`` (made if missing), or None where another holds it.

        Raises
        ------
        BackendError
            The file cannot be made or locked.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            return None  # its folder went meanwhile: taken over by another
        except OSError as e:
            raise BackendError(f"{path} cannot be opened for locking: {e.strerror}") from e
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return WriterLock(path, fd)
            os.close(fd)  # another took it over and removed it
            return None
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError as e:
            os.close(fd)
            raise BackendError(f"{path} cannot be locked: {e.strerror}") from e

    def release(self) -> None:
        """Free it; more than once is harmless."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _close_in_child() -> None:
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_close_in_child)
