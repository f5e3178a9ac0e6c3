"""One save at a time behind the training loop, whose failure is never lost."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib import import_module
from typing import Generic, TypeVar

T = TypeVar("T")


class Handle(Generic[T]):
    """A save under way. A failure that nobody asked for here raises at the manager's next call."""

    def __init__(self) -> None:
        self._future: Future[T] = Future()
        self.told = False

    @staticmethod
    def of(value: T) -> Handle[T]:
        """One that has ended with ``value``."""
        handle: Handle[T] = Handle()
        handle._future.set_result(value)
        return handle

    def result(self, timeout: float | None = None) -> T:
        """What the save gives, once it is durable; raises what went wrong.

        Raises
        ------
        TimeoutError
            It is not done after ``timeout`` seconds.
        """
        try:
            value = self._future.result(timeout)
        except BaseException:
            self.told = self._future.done()
            raise
        return value

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()


class Background(Generic[T]):
    """Runs one task at a time in a thread; the next one waits for it.

    Callers in several threads hold ``starting`` while they put a task together and run it.
    """

    def __init__(self) -> None:
        self._flight: Handle[T] | None = None
        self.starting = threading.Lock()

    def run(self, task: Callable[[], T]) -> Handle[T]:
        """Start ``task`` after the one before has ended; raises what that one failed with."""
        self.settle()
        handle: Handle[T] = Handle()
        self._flight = handle
        # Not a daemon: at the interpreter's exit a save under way is finished.
        threading.Thread(target=_do, args=(task, handle), name="castore save").start()
        return handle

    def settle(self) -> None:
        """Wait for the task under way; raises its failure unless its handle has told it."""
        handle = self._flight
        if handle is None:
            return
        error = handle._future.exception()
        if self._flight is handle:  # only now: Ctrl-C may have ended a wait before
            self._flight = None
        if error is not None and not handle.told:
            raise error


def before_shutdown(call: Callable[[], None]) -> None:
    """Run ``call`` when the interpreter ends, while saves still get the threads they need.

    ``atexit`` alone is too late: by then every `concurrent.futures` pool refuses work.
    """
    import_module("concurrent.futures.thread")  # has its end registered: ours comes before that
    register = getattr(threading, "_register_atexit", atexit.register)
    register(call)


def _do(task: Callable[[], T], handle: Handle[T]) -> None:
    try:
        handle._future.set_result(task())
    except BaseException as e:
        handle._future.set_exception(e)
