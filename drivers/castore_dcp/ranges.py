"""Which bytes of a file a read needs, and how reads next to each other become one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from castore_dcp.layout import Numbers

T = TypeVar("T")

GAP = 64 << 10
"""Two ranges this near are read as one: no blob of its own fits between them."""
LONGEST = 64 << 20
"""Ranges are joined up to this many bytes."""


@dataclass(frozen=True, slots=True)
class Need(Generic[T]):
    """Bytes ``[start, stop)`` of ``file``, and what they are for."""

    file: str
    start: int
    stop: int
    what: T


@dataclass(frozen=True, slots=True)
class Run(Generic[T]):
    """Bytes ``[start, stop)`` of ``file`` that serve several needs."""

    file: str
    start: int
    stop: int
    needs: tuple[Need[T], ...]


def runs(needs: Iterable[Need[T]]) -> list[Run[T]]:
    """``needs`` joined where they lie within `GAP`, in the order of files and offsets."""
    made: list[Run[T]] = []
    for need in sorted(needs, key=lambda n: (n.file, n.start, n.stop)):
        last = made[-1] if made else None
        if last is not None and _joins(last, need):
            stop = max(last.stop, need.stop)
            made[-1] = Run(last.file, last.start, stop, (*last.needs, need))
        else:
            made.append(Run(need.file, need.start, need.stop, (need,)))
    return made


def _joins(run: Run[T], need: Need[T]) -> bool:
    near = run.file == need.file and need.start - run.stop < GAP
    return near and max(run.stop, need.stop) - run.start <= LONGEST


def box(sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> Numbers:
    """First and last+1 element, in row-major order, of a box of a tensor; strides follow.

    Returns
    -------
    tuple
        ``(first, stop, *strides)``; an empty box gives ``first == stop``.
    """
    strides: list[int] = []
    step = 1
    for n in reversed(sizes):
        strides.insert(0, step)
        step *= max(n, 1)
    if 0 in lengths:
        return (0, 0, *strides)
    first = sum(o * s for o, s in zip(offsets, strides, strict=True))
    last = sum((o + n - 1) * s for o, n, s in zip(offsets, lengths, strides, strict=True))
    return (first, last + 1, *strides)
