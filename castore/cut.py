"""Where to cut a file into pieces: a function of its bytes; nothing is unpickled or decompressed.

A tensor of `SMALL` bytes or more is cut out exactly, and if longer than `PIECE` then every
`PIECE` bytes from its first: so it gives the same pieces in whatever file it comes, as
safetensors, torch zip, ``.npz`` or ``.npy``. What lies between such tensors (headers, padding,
small tensors) makes *small* pieces, which the caller gathers into few blobs.

A file's list of blobs is all that is recorded, so a worse cut costs space, never content, and
cuts may change between releases.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from castore.cutters import Bounded, Malformed, Span, archive, npy, safetensors

SMALL = 64 << 10
PIECE = 16 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``[start, stop)`` of a file, at most `PIECE` of them.

    ``width`` is that of an element in bytes: 1, 2, 4, 8, or 0 where it is not known. ``small``:
    the piece belongs into the file's gathered blobs.
    """

    start: int
    stop: int
    width: int
    small: bool


def cut(name: str, size: int, read: Callable[[int, int], bytes | bytearray]) -> list[Piece]:
    """Pieces that follow one another from 0 to ``size``; an empty file has none.

    The format is told from the first bytes: ``PK 03 04`` is a zip, ``93 NUMPY`` is NumPy's, a
    plausible length and ``{`` is safetensors; everything else, anything that does not parse to
    the end, and files without a tensor of `SMALL` bytes are cut every `PIECE` bytes.

    Parameters
    ----------
    name : str
        Not looked at: the same bytes are cut alike under every name, and weights come as
        ``.pt``, ``.pth``, ``.ckpt``, ``.bin``, ``.tar`` and without any suffix.
    size : int
        Of the file, in bytes.
    read : callable
        ``read(start, stop)`` gives these bytes. Asked for headers only, within the file, at most
        100 MB at once. What it raises passes through.
    """
    del name
    try:
        return list(_pieces(_spans(Bounded(size, read)), size))
    # Nothing here recurses. Out of memory for a header: the content may still go through.
    except (Malformed, struct.error, MemoryError):
        return list(_split(0, size, 0))


def _spans(file: Bounded) -> list[Span]:
    if file.size < SMALL:
        return []
    head = file.get(0, 16)
    if head[:4] == archive.MAGIC:
        return archive.spans(file, SMALL)
    if head[:6] == npy.MAGIC:
        return npy.spans(file, SMALL)
    if safetensors.looks_like(head):
        return safetensors.spans(file, SMALL)
    return []


def _pieces(spans: list[Span], size: int) -> Iterator[Piece]:
    if not spans:
        yield from _split(0, size, 0)
        return
    at = 0
    for span in spans:
        yield from _between(at, span.start)
        yield from _split(span.start, span.stop, span.width)
        at = span.stop
    yield from _between(at, size)


def _between(start: int, stop: int) -> Iterator[Piece]:
    """What lies between two tensors: one small piece, unless it fills objects by itself."""
    if stop < start:
        raise Malformed("tensors overlap")
    if stop - start >= PIECE:
        yield from _split(start, stop, 0)
    elif start < stop:
        yield Piece(start, stop, 0, small=True)


def _split(start: int, stop: int, width: int) -> Iterator[Piece]:
    for at in range(start, stop, PIECE):
        yield Piece(at, min(at + PIECE, stop), width, small=False)
