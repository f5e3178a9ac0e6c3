"""Random access to one file: on disk, behind an fsspec URL, or in a snapshot.

Bytes from a snapshot are verified against their digests.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Protocol

from castore import (
    BackendError,
    CorruptObjectError,
    File,
    InvalidInputError,
    NotFoundError,
    Repository,
)

PIECE = 16 << 20
"""Bytes of what one thread fetches at a time, and of the pieces of a tensor's digest."""

_BLOCK = 256 << 10
_BLOCKS = 32
_ALONE = 1 << 20  # bytes of a slice whose blob, unless another has it too, is not kept
CPUS = min(4, os.cpu_count() or 1)
"""Threads that decode and copy."""

KEPT = 48 << 20
"""Bytes of blobs that one file of a snapshot keeps, by default."""


class Source(Protocol):
    """A file that does not change. Safe for many threads."""

    where: str
    size: int
    parallel: int
    """How many threads at once pay off."""

    def read(self, start: int, stop: int) -> bytes:
        """Exactly these bytes; ``0 <= start <= stop <= size``."""

    def take(self, start: int, stop: int) -> memoryview | None:
        """The same in a buffer that nobody else has, where that spares a copy."""

    def fill(self, start: int, view: memoryview) -> None:
        """Put the bytes from ``start`` on into a writable view, all of it."""

    def cuts(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """``[start, stop)`` in pieces that several threads may fill at once."""

    def proven(self, start: int, stop: int) -> list[str] | None:
        """BLAKE3-256 of each `PIECE` bytes of a range, where reading it has shown them already."""


class DiskSource:
    """A regular local file, held open."""

    parallel = CPUS

    def __init__(self, path: str | os.PathLike[str]):
        self.where = os.fspath(path)
        try:
            self._fd = os.open(self.where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as e:
            raise NotFoundError(f"{self.where} does not exist") from e
        except OSError as e:
            raise BackendError(f"{self.where} cannot be read: {e.strerror}") from e
        info = os.fstat(self._fd)
        if not stat.S_ISREG(info.st_mode):
            raise InvalidInputError(f"{self.where} is not a regular file")
        self.size = info.st_size

    def __del__(self) -> None:
        fd = getattr(self, "_fd", -1)
        if fd >= 0:
            os.close(fd)

    def read(self, start: int, stop: int) -> bytes:
        data = bytearray(stop - start)
        self.fill(start, memoryview(data))
        return bytes(data)

    def fill(self, start: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], start + done)
            except OSError as e:
                raise BackendError(f"{self.where} cannot be read: {e.strerror}") from e
            if not count:
                raise BackendError(f"{self.where} became shorter while it was read")
            done += count

    def take(self, start: int, stop: int) -> memoryview | None:
        return None

    def proven(self, start: int, stop: int) -> list[str] | None:
        return None

    def cuts(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        return _even(start, stop)


class BytesSource:
    """A file that is in memory."""

    parallel = 1

    def __init__(self, data: bytes, where: str):
        self._data, self.where, self.size = data, where, len(data)

    def read(self, start: int, stop: int) -> bytes:
        return self._data[start:stop]

    def fill(self, start: int, view: memoryview) -> None:
        view[:] = self._data[start : start + len(view)]

    def take(self, start: int, stop: int) -> memoryview | None:
        return None

    def proven(self, start: int, stop: int) -> list[str] | None:
        return None

    def cuts(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        return _even(start, stop)


def url_errors() -> tuple[type[Exception], ...]:
    """What fsspec's file systems raise; S3's and HTTP's own errors are no `OSError`."""
    own = [("botocore.exceptions", "BotoCoreError"), ("aiohttp", "ClientError")]
    loaded = [getattr(sys.modules[m], n) for m, n in own if m in sys.modules]
    return (OSError, ImportError, ValueError, *loaded)


class UrlSource:
    """A file behind an fsspec URL, read by ranges; small reads share blocks that are kept.

    ``fetched`` counts the bytes that came over.
    """

    parallel = 8

    def __init__(self, url: str, storage_options: dict[str, Any] | None = None):
        import fsspec

        self.where, self.fetched = url, 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()
        try:
            self._fs, self._path = fsspec.url_to_fs(url, **(storage_options or {}))
            self.size = int(self._fs.info(self._path)["size"])
        except FileNotFoundError as e:
            raise NotFoundError(f"{url} does not exist") from e
        except url_errors() as e:
            raise BackendError(f"{url} cannot be opened: {e}") from e

    def _fetch(self, start: int, stop: int) -> bytes:
        try:
            data: bytes = self._fs.cat_file(self._path, start=start, end=stop)
        except url_errors() as e:
            raise BackendError(f"{self.where} cannot be read: {e}") from e
        if len(data) != stop - start:
            raise BackendError(f"{self.where}: {len(data)} bytes came for {start} to {stop}")
        with self._lock:
            self.fetched += len(data)
        return data

    def _block(self, number: int) -> bytes:
        with self._lock:
            kept = self._blocks.get(number)
            if kept is not None:
                self._blocks.move_to_end(number)
                return kept
        data = self._fetch(number * _BLOCK, min(self.size, (number + 1) * _BLOCK))
        with self._lock:
            self._blocks[number] = data
            if len(self._blocks) > _BLOCKS:
                self._blocks.popitem(last=False)
        return data

    def read(self, start: int, stop: int) -> bytes:
        if stop - start >= _BLOCK:
            return self._fetch(start, stop)
        parts = []
        for number in range(start // _BLOCK, -(-stop // _BLOCK)):
            first = number * _BLOCK
            parts.append(self._block(number)[max(0, start - first) : stop - first])
        return b"".join(parts)

    def fill(self, start: int, view: memoryview) -> None:
        view[:] = self.read(start, start + len(view))

    def take(self, start: int, stop: int) -> memoryview | None:
        return None

    def proven(self, start: int, stop: int) -> list[str] | None:
        return None

    def cuts(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        return _even(start, stop)


class SnapshotSource:
    """A file of a snapshot; only the blobs that a read touches are fetched, and verified.

    ``fetched`` counts the bytes of blobs that were decoded; ``keep`` bounds those that are kept.
    """

    def __init__(self, repository: Repository, file: File, where: str, keep: int = KEPT):
        self._keep = keep
        remote = repository.backend.kind != "local"
        self.parallel = max(CPUS, min(8, repository.backend.parallel)) if remote else CPUS
        self._store, self._slices = repository.store, file.slices
        self.where, self.size, self.fetched = where, file.size, 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Future[memoryview]] = OrderedDict()
        self._kept_bytes = 0
        self._lengths: dict[str, int] = {}
        starts = [0]
        for s in self._slices:
            starts.append(starts[-1] + s.length)
        self._starts = starts
        uses = Counter(s.blob for s in self._slices)
        self._shared = {blob for blob, n in uses.items() if n > 1}

    def _blob(self, digest: str) -> memoryview:
        with self._lock:
            future = self._kept.get(digest)
            if future is None:
                mine: Future[memoryview] = Future()
                self._kept[digest] = mine
            else:
                self._kept.move_to_end(digest)
        if future is not None:
            return future.result()
        try:
            content = self._fetch(digest)
        except BaseException as e:
            with self._lock:
                self._kept.pop(digest, None)
            mine.set_exception(e)
            raise
        mine.set_result(content)
        self._account(len(content))
        return content

    def _account(self, size: int) -> None:
        with self._lock:
            self._kept_bytes += size
            for oldest in list(self._kept):
                if self._kept_bytes <= self._keep:
                    break
                if self._kept[oldest].done():
                    self._kept_bytes -= len(self._kept.pop(oldest).result())

    def read(self, start: int, stop: int) -> bytes:
        data = bytearray(stop - start)
        self.fill(start, memoryview(data))
        return bytes(data)

    def fill(self, start: int, view: memoryview) -> None:
        stop = start + len(view)
        for i in range(self._first(start), len(self._slices)):
            s, at = self._slices[i], self._starts[i]
            if at >= stop:
                break
            a, b = max(start, at), min(stop, at + s.length)
            part = view[a - start : b - start]
            whole = b - a == s.length >= _ALONE and s.blob not in self._shared
            if whole and s.blob not in self._kept:
                content = self._fetch(s.blob, part)
            else:
                content = self._blob(s.blob)
            if s.offset + s.length > len(content):
                raise CorruptObjectError(
                    f"object {s.blob} is shorter than its file in the tree says", name=s.blob
                )
            if content.obj is not part.obj:
                part[:] = content[s.offset + a - at : s.offset + b - at]

    def _fetch(self, digest: str, out: memoryview | None = None) -> memoryview:
        """A blob that is not kept: decoded into ``out`` where that has room for it."""
        content = memoryview(self._store.read(digest, out))
        with self._lock:
            self.fetched += len(content)
            self._lengths[digest] = len(content)
        return content

    def _first(self, start: int) -> int:
        return bisect_right(self._starts, start) - 1

    def take(self, start: int, stop: int) -> memoryview | None:
        """A blob that is just this range, decoded into a buffer of its own."""
        i = self._first(start)
        s = self._slices[i]
        if s.offset or (self._starts[i], self._starts[i] + s.length) != (start, stop):
            return None
        content = self._fetch(s.blob)
        return None if len(content) != s.length or content.readonly else content

    def proven(self, start: int, stop: int) -> list[str] | None:
        """The names of the blobs, where they are just the pieces, and were read."""
        found: list[str] = []
        for a, b in self.cuts(start, stop):
            i = self._first(a)
            s = self._slices[i]
            whole = (self._starts[i], s.offset, self._lengths.get(s.blob)) == (a, 0, b - a)
            if not whole or (b != stop and b - a != PIECE):
                return None
            found.append(s.blob)
        return found

    def cuts(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """At the borders of blobs, so that no blob is decoded by two threads."""
        at = start
        while at < stop:
            end = min(stop, self._starts[self._first(at) + 1])
            yield at, end
            at = end


def _even(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for at in range(start, stop, PIECE):
        yield at, min(stop, at + PIECE)
