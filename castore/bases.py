"""Which earlier file a new one may be a small difference to, and how their blobs line up.

Pure functions. A base is a hint: a wrong one costs bytes, never correctness.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

from castore.tree import File

_DIGITS = re.compile(r"\d+")
_MAX_ALIGN = 4_000_000


def series_of(path: str) -> str:
    """``path`` with each run of digits as ``#``: what the files of one series have in common."""
    return _DIGITS.sub("#", path)


def natural_key(path: str) -> tuple[tuple[int, ...], str]:
    """Orders the files of one series by their numbers, not as text."""
    return tuple(int(d[:400]) for d in _DIGITS.findall(path)), path


def nearest_in_series(path: str, candidates: Iterable[str]) -> str | None:
    """Of ``candidates``, the last before ``path`` in its series, else the first after it."""
    same = sorted((c for c in candidates if c != path), key=natural_key)
    before = [c for c in same if natural_key(c) < natural_key(path)]
    return before[-1] if before else same[0] if same else None


def blob_sequence(file: File) -> list[tuple[str, int]]:
    """Digest and length of each blob of ``file``, in order; one that is used twice stands twice."""
    length: dict[str, int] = {}
    for s in file.slices:
        length[s.blob] = max(length.get(s.blob, 0), s.offset + s.length)
    return [(s.blob, length[s.blob]) for s in file.slices if s.offset == 0]


def align(new: Sequence[int], base: Sequence[int]) -> list[int | None]:
    """For each length in ``new`` the index in ``base`` of the blob it lines up with, or None."""
    if list(new) == list(base):
        return list(range(len(new)))
    result: list[int | None] = [None] * len(new)
    if len(new) * len(base) > _MAX_ALIGN:
        return result
    for block in SequenceMatcher(None, base, new, autojunk=False).get_matching_blocks():
        for i in range(block.size):
            result[block.b + i] = block.a + i
    return result
