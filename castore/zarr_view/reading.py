"""Bytes of committed files, range by range: each blob verified, fetched once, kept a while."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from itertools import accumulate
from typing import Any

from castore.digest import Buffer
from castore.errors import CorruptObjectError
from castore.objects import ObjectStore
from castore.tree import File

KEPT = 128 << 20
"""Bytes of content kept for the next read, by each open group or store."""


class Kept:
    """A cache of at most ``limit`` bytes; what several threads want at once is made once.

    What is larger than ``limit`` is handed out and not kept. Pickles empty; starts empty in a
    forked child.
    """

    def __init__(self, limit: int = KEPT):
        self._limit = limit
        self._reset()

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, (self._limit,)

    def _reset(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._content: OrderedDict[str, Buffer] = OrderedDict()
        self._bytes = 0
        self._under_way: dict[str, Future[Buffer]] = {}

    def get(self, key: str, make: Callable[[], Buffer]) -> Buffer:
        """The content of ``key``, made by ``make`` where it is not kept; what that raises."""
        if self._process != os.getpid():
            self._reset()
        with self._lock:
            found = self._content.get(key)
            if found is not None:
                self._content.move_to_end(key)
                return found
            future = self._under_way.get(key)
            if future is None:
                mine = self._under_way[key] = Future()
        return future.result() if future is not None else self._make(key, make, mine)

    def _make(self, key: str, make: Callable[[], Buffer], mine: Future[Buffer]) -> Buffer:
        try:
            content = make()
            self._keep(key, content)
            mine.set_result(content)
        except BaseException as e:
            mine.set_exception(e)
            raise
        finally:
            with self._lock:
                self._under_way.pop(key, None)
        return content

    def _keep(self, key: str, content: Buffer) -> None:
        with self._lock:
            if len(content) <= self._limit:
                self._content[key] = content
                self._bytes += len(content)
            while self._bytes > self._limit:
                _, old = self._content.popitem(last=False)
                self._bytes -= len(old)


class FileBytes:
    """The bytes of one committed file; a read touches only the blobs it needs."""

    def __init__(self, store: ObjectStore, file: File, kept: Kept):
        self._store, self._file, self._kept = store, file, kept
        self._stops = list(accumulate(s.length for s in file.slices))

    @property
    def size(self) -> int:
        return self._file.size

    def read(self, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)``, cut at the file's end.

        Raises
        ------
        ObjectNotFoundError, CorruptObjectError
            A blob is missing or damaged; never fewer bytes instead.
        """
        start, stop = max(0, start), min(stop, self._file.size)
        parts: list[memoryview] = []
        at = bisect_right(self._stops, start)
        while start < stop:
            s = self._file.slices[at]
            first = start - (self._stops[at] - s.length)
            last = min(s.length, first + stop - start)
            blob = self._blob(s.blob, s.offset + s.length)
            parts.append(blob[s.offset + first : s.offset + last])
            start += last - first
            at += 1
        return b"".join(parts)

    def _blob(self, digest: str, least: int) -> memoryview:
        content = memoryview(self._kept.get(digest, lambda: self._store.read(digest)))
        if len(content) < least:
            raise CorruptObjectError(
                f"object {digest} has {len(content)} bytes, the tree wants {least}: the tree is"
                " damaged",
                name=digest,
            )
        return content
