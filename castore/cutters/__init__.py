"""Where the arrays lie in a file of a known format: read from headers, nothing is unpickled.

Each cutter has ``spans(file, least)``: the ranges of the file worth an object of their own
(``least`` bytes or more), sorted and disjoint, or `Malformed`. Cutters allocate in proportion
to bytes that are there, never by a number read from them, and do not recurse.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

ENTRIES = 1_000_000


class Malformed(ValueError):
    """The file is not what it looked like. Never leaves `castore.cut.cut`."""


class Span(NamedTuple):
    """Bytes ``[start, stop)`` of elements ``width`` bytes wide; 0 where that is not known."""

    start: int
    stop: int
    width: int


class Bounded:
    """A file whose reads cannot leave ``[0, size)``: `Malformed` before anything is allocated."""

    def __init__(self, size: int, read: Callable[[int, int], bytes | bytearray]):
        self.size, self._read = size, read

    def get(self, start: int, stop: int) -> bytes | bytearray:
        """Exactly the bytes ``[start, stop)``. What ``read`` raises passes through."""
        if not 0 <= start <= stop <= self.size:
            raise Malformed(f"bytes {start} to {stop} of {self.size}")
        data = self._read(start, stop)
        if len(data) != stop - start:
            raise Malformed(f"{len(data)} bytes for {start} to {stop}")
        return data


class Ranges:
    """Ranges inside ``[0, size)`` in any order, 16 bytes each, for a check of overlaps."""

    def __init__(self, size: int):
        self._size, self._total = size, 0
        self._starts, self._stops = array("Q"), array("Q")

    def add(self, start: int, stop: int) -> None:
        """`Malformed` if reversed, outside, or if all so far cannot be disjoint."""
        self._total += stop - start
        # The total bounds what a caller collects before the overlaps are looked for.
        if not 0 <= start <= stop <= self._size or self._total > self._size:
            raise Malformed(f"range {start} to {stop} of {self._size}")
        if len(self._starts) >= ENTRIES:
            raise Malformed(f"more than {ENTRIES} entries")
        self._starts.append(start)
        self._stops.append(stop)

    def disjoint(self) -> array[int]:
        """The starts in order; `Malformed` if two ranges overlap. Empty ones lie anywhere."""
        order = sorted(range(len(self._starts)), key=self._starts.__getitem__)
        end = 0
        for i in order:
            if self._starts[i] == self._stops[i]:
                continue
            if self._starts[i] < end:
                raise Malformed(f"two ranges overlap at {self._starts[i]}")
            end = self._stops[i]
        return array("Q", map(self._starts.__getitem__, order))
