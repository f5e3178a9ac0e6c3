"""Locks between the threads of one process, one set for each file system in memory."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from castore.errors import BackendError


class SharedLock:
    """Shared and exclusive; a waiting exclusive holder makes new shared ones queue."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shared, self._waiting, self._exclusive = 0, 0, False

    @contextlib.contextmanager
    def hold(self, url: str, exclusive: bool, timeout: float) -> Iterator[None]:
        """Hold it; `BackendError` after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._waiting += exclusive
            try:
                while not self._free(exclusive):
                    if not self._changed.wait(deadline - time.monotonic()):
                        raise BackendError(
                            f"the lock of {url} is held by another thread of process {os.getpid()}"
                        )
            finally:
                self._waiting -= exclusive
                self._changed.notify_all()
            self._take(exclusive, 1)
        try:
            yield
        finally:
            with self._changed:
                self._take(exclusive, -1)
                self._changed.notify_all()

    def _free(self, exclusive: bool) -> bool:
        if exclusive:
            return not self._exclusive and self._shared == 0
        return not self._exclusive and self._waiting == 0

    def _take(self, exclusive: bool, n: int) -> None:
        if exclusive:
            self._exclusive = n > 0
        else:
            self._shared += n


class Store:
    """What all backends on one file system have in common."""

    def __init__(self, kept: object):
        self._kept = kept  # so that its id stays its own
        self.fresh()

    def fresh(self) -> None:
        """Free locks: a forked child has none of the threads that held them."""
        self.writing = threading.RLock()
        self._locks: dict[str, SharedLock] = {}

    def lock_for(self, root: str) -> SharedLock:
        """The repository lock of one root."""
        return self._locks.setdefault(root, SharedLock())


_stores: dict[int, Store] = {}


def store_of(fs: Any) -> Store:
    """The locks of a file system; in memory, of the dictionary that several may be views of."""
    kept = getattr(fs, "store", fs)
    found = _stores.get(id(kept))
    return found or _stores.setdefault(id(kept), Store(kept))


def _free_all() -> None:
    for store in _stores.values():
        store.fresh()


os.register_at_fork(after_in_child=_free_all)
