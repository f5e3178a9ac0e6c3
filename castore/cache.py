"""Immutable values kept in memory up to a weight, the least recently used go first."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Cache(Generic[K, V]):
    """Values by key; of threads that want the same one at once, one makes it.

    A forked child begins with none: a thread of its parent may hold the lock, or be making one.

    Parameters
    ----------
    limit : int
        What the values may weigh together. The last one used is kept in any case, so that a
        series of small reads of one large value does not make it again and again.
    weigh : callable
        The weight of a value.
    """

    def __init__(self, limit: int, weigh: Callable[[V], int]):
        self._limit, self._weigh = limit, weigh
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._kept: OrderedDict[K, V] = OrderedDict()
        self._under_way: dict[K, Future[V]] = {}
        self.weight = 0

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of ``key``, from ``make`` if it is not kept; its error is raised, not kept."""
        if self._process != os.getpid():
            self._reset()
        while True:
            with self._lock:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key]
                other = self._under_way.get(key)
                mine = self._under_way.setdefault(key, Future())
            if other is None:
                return self._make(key, make, mine)
            try:
                return other.result()
            except CancelledError:
                continue  # its thread was interrupted

    def _make(self, key: K, make: Callable[[], V], mine: Future[V]) -> V:
        try:
            value = make()
        except Exception as e:
            mine.set_exception(e)
            raise
        except BaseException:
            mine.cancel()
            raise
        else:
            self._keep(key, value)
            mine.set_result(value)
            return value
        finally:
            with self._lock:
                del self._under_way[key]

    def _keep(self, key: K, value: V) -> None:
        with self._lock:
            self._kept[key] = value
            self.weight += self._weigh(value)
            while self.weight > self._limit and len(self._kept) > 1:
                _, old = self._kept.popitem(last=False)
                self.weight -= self._weigh(old)
