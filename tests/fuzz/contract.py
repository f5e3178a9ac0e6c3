"""What every fuzz target must keep, and how that is watched.

Memory: at most `ROOM` plus eight times the input. Time: `SECONDS`. Beside that nothing may be
opened for writing, removed, renamed, started or connected to, and no class or function looked
up for an unpickler.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

from castore.errors import CastoreError

ROOM = 64 << 20
SECONDS = 20
_FORBIDDEN = {
    *("pickle.find_class", "os.system", "os.exec", "os.fork", "os.posix_spawn"),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod"),
    *("os.truncate", "os.utime", "subprocess.Popen", "socket.connect", "shutil.rmtree"),
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class BrokenContractError(BaseException):
    """Not an `Exception`, so that no reader takes it for a fault of its input."""


def bound(data: bytes) -> int:
    """Bytes that a target may have allocated at one time."""
    return ROOM + 8 * len(data)


class Guard:
    """Watches a process for what no reader does. Installed for good, heeded only within ``with``.

    Python has no way to take an audit hook back. Other threads are not heeded, nor what the garbage
    collector brings to its end just then: what an earlier test left may go by removing a folder.
    """

    def __init__(self) -> None:
        self._armed = self._collecting = False
        self._thread = 0
        gc.callbacks.append(self._collects)
        sys.addaudithook(self._heed)

    def _collects(self, phase: str, _: object) -> None:
        self._collecting = phase == "start"

    def __enter__(self) -> None:
        self._armed, self._thread = True, threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._armed = False

    def _heed(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._armed or self._collecting or threading.get_ident() != self._thread:
            return
        if event in _FORBIDDEN or (event == "open" and _is_write(args)):
            self._armed = False
            raise BrokenContractError(f"{event} {args!r:.200}")


def _is_write(args: tuple[Any, ...]) -> bool:
    path, mode, flags = (*args, None, None)[:3]
    if (isinstance(path, str) and path.endswith(".pyc")) or "__pycache__" in str(path):
        return False  # Python's own, at the first import of a lazy module
    if isinstance(mode, str):
        return any(c in mode for c in "wxa+")
    return isinstance(flags, int) and bool(flags & _WRITES)


def run(target: Callable[[bytes], None], data: bytes, guard: Guard) -> None:
    """One execution; an error of castore is an answer like any other."""
    with guard:
        try:
            target(data)
        except CastoreError:
            pass


def run_measured(target: Callable[[bytes], None], data: bytes, guard: Guard) -> None:
    """`run`, every allocation of Python and NumPy counted: slower."""
    tracemalloc.start()
    try:
        run(target, data, guard)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if peak > bound(data):
        raise BrokenContractError(f"{peak} bytes allocated for an input of {len(data)}")


def run_watched(target: Callable[[bytes], None], data: bytes, guard: Guard) -> None:
    """`run`, and the memory of the process may not have jumped: cheap enough for millions."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    run(target, data, guard)
    jump = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
    if jump > bound(data):
        raise BrokenContractError(f"{jump} bytes more in memory for an input of {len(data)}")
