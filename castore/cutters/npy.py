"""The array in a NumPy file, alone or as a member of an ``.npz``.

Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
The header is a Python literal; it is matched as NumPy writes it and never evaluated.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from castore.cutters import Bounded, Malformed, Span

MAGIC = b"\x93NUMPY"
_HEAD = 12  # magic, version, and the header's length in 2 or 4 bytes
_HEADER = 1 << 16
_LITERAL = re.compile(
    rb"\{'descr': '([<>|=])([biufcmMSUV])([0-9]{1,9})(?:\[[0-9A-Za-z]{1,16}\])?', "
    rb"'fortran_order': (True|False), 'shape': \(([0-9, ]{0,1024})\), \} *\n"
)


class Header(NamedTuple):
    """What a NumPy header says: ``descr`` such as ``<f4``, and where the array's bytes lie."""

    descr: str
    fortran: bool
    shape: tuple[int, ...]
    start: int
    stop: int
    width: int


def spans(file: Bounded, least: int) -> list[Span]:
    """The array, if it has ``least`` bytes or more."""
    found = array(file, 0, file.size)
    return [found] if found.stop - found.start >= least else []


def array(file: Bounded, start: int, stop: int) -> Span:
    """The array's bytes in the NumPy file at ``[start, stop)``.

    What follows the header of structured and object arrays counts as the array: width 0.
    `Malformed` if the header is none, or promises more bytes than there are.
    """
    found = header(file, start, stop)
    return found if isinstance(found, Span) else Span(found.start, found.stop, found.width)


def header(file: Bounded, start: int, stop: int) -> Header | Span:
    """The header of the NumPy file at ``[start, stop)``; only a range for other arrays' ones."""
    head = file.get(start, min(stop, start + _HEAD))
    if len(head) < _HEAD or head[:6] != MAGIC or head[6] not in (1, 2, 3):
        raise Malformed("no NumPy header")
    text = start + (10 if head[6] == 1 else 12)
    data = text + int.from_bytes(head[8 : text - start], "little")
    if data > stop or data - text > _HEADER:
        raise Malformed(f"NumPy header of {data - text} bytes")
    literal = _LITERAL.fullmatch(file.get(text, data))
    if literal is None:
        return Span(data, stop, 0)
    order, kind, count, fortran, shape = literal.groups()
    size, width = _element(kind, int(count))
    dimensions = _dimensions(shape)
    end = data + size * math.prod(dimensions)
    if end > stop:
        raise Malformed("array beyond its end")
    descr = (order + kind + count).decode()
    return Header(descr, fortran == b"True", dimensions, data, end, width)


def _element(kind: bytes, size: int) -> tuple[int, int]:
    """Bytes an element takes, and the width of the numbers or characters it is made of."""
    if kind == b"U":
        return 4 * size, 4
    width = {b"S": 1, b"c": size // 2}.get(kind, size)
    return size, width if width in (1, 2, 4, 8) else 0


def _dimensions(shape: bytes) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in shape.split(b",") if n.strip())
    except ValueError as e:
        raise Malformed("shape") from e
