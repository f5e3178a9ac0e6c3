"""Ranges of files out of blobs: only those they touch, each verified and fetched once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate

from castore.cache import Cache
from castore.errors import CastoreError, CorruptObjectError
from castore.objects import ObjectStore
from castore.tree import File


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``[start, stop)`` of a blob."""

    blob: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Extent:
    """A file ready to be read at random: where each of its slices ends."""

    file: File
    ends: Sequence[int] = field(repr=False)

    @staticmethod
    def of(file: File) -> Extent:
        return Extent(file, list(accumulate(s.length for s in file.slices)))

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """What ``[start, stop)`` is made of, in order; bounds beyond the end are cut."""
        found: list[Piece] = []
        slices = self.file.slices
        for i in range(bisect_right(self.ends, start), len(slices)):
            s, end = slices[i], self.ends[i]
            begin = end - s.length
            if begin >= stop:
                break
            first = s.offset + max(start, begin) - begin
            found.append(Piece(s.blob, first, s.offset + min(stop, end) - begin))
        return found


KEPT = 128 << 20
"""Bytes of content kept for the next read, by default."""


class Blobs:
    """Verified content of blobs, kept up to ``limit`` bytes; safe for many threads.

    Beside what is kept, a read holds its result and as many blobs as it fetches at once.
    """

    def __init__(self, store: ObjectStore, limit: int = KEPT):
        self._store = store
        self.cache: Cache[str, memoryview] = Cache(limit, len)

    def get(self, digest: str) -> memoryview:
        """A blob, its digest checked when it is fetched."""
        return self.cache.get(digest, lambda: memoryview(self._store.read(digest)))

    def read(self, extent: Extent, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)`` of a file.

        Raises
        ------
        ObjectNotFoundError, CorruptObjectError, BackendError
            A blob it touches is missing, damaged or out of reach.
        """
        (found,) = self.read_many([extent.pieces(start, stop)])
        if isinstance(found, CastoreError):
            raise found
        return found

    def read_many(self, wanted: Sequence[Sequence[Piece]]) -> list[bytes | CastoreError]:
        """The bytes of each sequence of pieces, or the error that its blobs met.

        Blobs are fetched in parallel, and no sooner than their bytes are taken out of them.
        """
        places: dict[str, list[tuple[int, int]]] = {}
        for i, pieces in enumerate(wanted):
            for j, piece in enumerate(pieces):
                places.setdefault(piece.blob, []).append((i, j))
        parts: list[list[bytes | CastoreError]] = [[b""] * len(p) for p in wanted]

        def fetch(digest: str) -> None:
            for i, j in places[digest]:
                try:
                    parts[i][j] = _cut(self.get(digest), wanted[i][j])
                except CastoreError as e:
                    parts[i][j] = e

        if len(places) <= 1:
            for digest in places:
                fetch(digest)
        else:
            with ThreadPoolExecutor(min(len(places), self._store.backend.parallel)) as pool:
                list(pool.map(fetch, places))
        return [_joined(p) for p in parts]


def _cut(content: memoryview, piece: Piece) -> bytes:
    if piece.stop > len(content):
        raise CorruptObjectError(
            f"object {piece.blob} has {len(content)} bytes, the tree wants {piece.stop}: the tree"
            " is damaged",
            name=piece.blob,
        )
    return bytes(content[piece.start : piece.stop])


def _joined(parts: Sequence[bytes | CastoreError]) -> bytes | CastoreError:
    data: list[bytes] = []
    for part in parts:
        if isinstance(part, CastoreError):
            return part
        data.append(part)
    return data[0] if len(data) == 1 else b"".join(data)
