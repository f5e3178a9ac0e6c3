"""The files of a commit while they are read: what blobs they will be, and what to read at once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from castore import bases
from castore.cut import PIECE, Piece
from castore.digest import Buffer
from castore.source import Source
from castore.tree import File, Slice

_RUN = 4 << 20  # bytes read at once, if no piece is longer: each read takes three threads a turn


@dataclass(slots=True)
class Blob:
    """A blob to be: the stretches of its source it is made of."""

    file: PendingFile
    ranges: list[tuple[int, int]]
    length: int
    width: int
    first_slice: int
    order: int
    base: str | Blob | None = None
    parts: list[bytes] = field(default_factory=list)
    digest: Future[str] = field(default_factory=Future)
    stored: Future[None] = field(default_factory=Future)

    def reread(self, scratch: bytearray | None = None) -> Buffer:
        """The content once more from its source; the caller verifies the digest."""
        with self.file.source.open() as reader:
            if len(self.ranges) == 1:
                return reader.content(*self.ranges[0], scratch)
            return b"".join([reader.content(a, b) for a, b in self.ranges])


@dataclass(slots=True)
class PendingFile:
    """A file to be; ``candidates`` are the known files it may still turn out to equal."""

    path: str
    source: Source
    blobs: list[Blob] = field(default_factory=list)
    slices: list[tuple[Blob, int, int]] = field(default_factory=list)
    candidates: list[File] = field(default_factory=list)
    held: list[Buffer] = field(default_factory=list)
    holding: bool = False
    sha: hashlib._Hash = field(default_factory=lambda: hashlib.sha256(usedforsecurity=False))
    result: Future[File] = field(default_factory=Future)

    def plan(self, pieces: Sequence[Piece], order: Iterator[int]) -> None:
        """Blobs and slices from pieces: small runs of one file share blobs of at most a piece."""
        gathered: Blob | None = None
        for i, piece in enumerate(pieces):
            length = piece.stop - piece.start
            if piece.small and gathered and gathered.length + length <= PIECE:
                self.slices.append((gathered, gathered.length, length))
                gathered.ranges.append((piece.start, piece.stop))
                gathered.length += length
                continue
            blob = Blob(self, [(piece.start, piece.stop)], length, piece.width, i, next(order))
            self.blobs.append(blob)
            self.slices.append((blob, 0, length))
            if piece.small:
                gathered = blob

    def line_up(self, sequence: Sequence[tuple[str | Blob, int]]) -> None:
        """Give each blob the one of ``sequence`` as base that lies where it does."""
        found = bases.align([b.length for b in self.blobs], [n for _, n in sequence])
        for blob, i in zip(self.blobs, found, strict=True):
            if i is not None:
                blob.base = sequence[i][0]

    def flush(self) -> None:
        """Hash what was held back."""
        for content in self.held:
            self.sha.update(content)
        self.held.clear()

    def file(self) -> File:
        """The tree's entry: waits for the digests, hashes only what no known file has hashed."""
        slices = tuple(Slice(b.digest.result(), o, n) for b, o, n in self.slices)
        known = next((k for k in self.candidates if k.slices == slices), None)
        if known is None:
            self.flush()
        sha256 = known.sha256 if known and self.held else self.sha.hexdigest()
        self.held.clear()
        return File(self.source.size, sha256, self.source.executable, slices)


def runs(pieces: Sequence[Piece]) -> Iterator[range]:
    """Pieces to read and hand over at once, in as many runs as keep the workers busy."""
    most = min(max(pieces[-1].stop // 8, _RUN // 16), _RUN) if pieces else 0
    first = 0
    for i, piece in enumerate(pieces):
        if i > first and piece.stop - pieces[first].start > most:
            yield range(first, i)
            first = i
    if pieces:
        yield range(first, len(pieces))
