"""Tensors in a safetensors file.

Format: https://github.com/huggingface/safetensors (README, "Format"): the header's length as
u64, a JSON header of at most 100 MB, then the data; ``data_offsets`` count from its start.

The header is not parsed as JSON but matched entry by entry: Python objects for a hostile one of
100 MB would take gigabytes, and nesting would recurse.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from castore.cutters import ENTRIES, Bounded, Malformed, Ranges, Span

_HEADER = 100_000_000
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_FIELD = rb"""(?:
    "dtype"\s*:\s*"([A-Za-z0-9_]{1,32})"
  | "shape"\s*:\s*\[([0-9,\s]{0,1024})\]
  | "data_offsets"\s*:\s*\[\s*([0-9]{1,19})\s*,\s*([0-9]{1,19})\s*\]
)"""
_NAME = rb'\s*"([^"]{0,65535})"\s*:\s*'
_NEXT = rb'\s*(?:,\s*(?=")|(?=\}))'
_TENSOR = re.compile(_NAME + rb"\{\s*(?:" + _FIELD + _NEXT + rb"){3}\}" + _NEXT, re.VERBOSE)
_METADATA = re.compile(rb'\s*"__metadata__"\s*:\s*\{\s*')
_TEXT = re.compile(_NAME + rb'"[^"]*"' + _NEXT)
_CLOSED = re.compile(rb"\s*\}" + _NEXT)
_END = re.compile(rb"\s*\}\s*\Z")


class Entry(NamedTuple):
    """One tensor: the bytes of the header between its name's quotes, and what the header says.

    ``start`` and ``stop`` count from the end of the header; ``width`` in bytes, 0 for a dtype
    that is not known here, whose shape was not compared with its range.
    """

    name_at: tuple[int, int]
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    width: int


def looks_like(head: bytes | bytearray) -> bool:
    """Whether a file that starts with ``head`` may be one: there is no magic number."""
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _HEADER


def spans(file: Bounded, least: int) -> list[Span]:
    """The tensors of ``least`` bytes or more. Empty tensors are legal, duplicate names are not."""
    header, data = read_header(file)
    names: set[bytes] = set()
    ranges, big = Ranges(max(0, file.size - data)), []
    readable = _without_escapes(header)
    for e in _tensors(readable):
        ranges.add(e.start, e.stop)
        names.add(bytes(readable[slice(*e.name_at)]))
        if e.stop - e.start >= least:
            big.append(Span(data + e.start, data + e.stop, e.width))
    if len(names) != len(ranges.disjoint()):
        raise Malformed("a name twice")
    return sorted(big)


def read_header(file: Bounded) -> tuple[bytes | bytearray, int]:
    """The header's JSON, and where in the file the tensors' bytes begin."""
    length = int.from_bytes(file.get(0, 8), "little")
    if length > _HEADER:
        raise Malformed(f"header of {length} bytes")
    return file.get(8, 8 + length), 8 + length


def entries(header: bytes | bytearray) -> Iterator[Entry]:
    """The tensors of a header, in its order; ranges and names are not compared with one another."""
    return _tensors(_without_escapes(header))


def metadata_at(header: bytes | bytearray) -> int | None:
    """Where the object of ``__metadata__`` begins in a header that `entries` accepts, or None."""
    readable, at = _without_escapes(header), 1
    while tensor := _TENSOR.match(readable, at):
        at = tensor.end()
    found = _METADATA.match(readable, at)
    return readable.rindex(b"{", at, found.end()) if found else None


def _without_escapes(header: bytes | bytearray) -> bytes | bytearray:
    """The header with what might hide a quote overwritten, so that a string ends at a quote.

    The bytes put in are no UTF-8, so that names stay different.
    """
    if header.find(b"\\") < 0:
        return header
    return header.replace(b"\\\\", b"\xff\xfe").replace(b'\\"', b"\xff\xfd")


def _tensors(header: bytes | bytearray) -> Iterator[Entry]:
    """Each tensor, in the header's order."""
    if header[:1] != b"{" or header.count(b'"data_offsets"') > ENTRIES:
        raise Malformed("no header, or too many tensors")
    at, metadata = 1, False
    while not _END.match(header, at):
        if m := _METADATA.match(header, at):
            if metadata:
                raise Malformed("metadata twice")
            at, metadata = _after_metadata(header, m.end()), True
            continue
        tensor = _TENSOR.match(header, at)
        if tensor is None:
            raise Malformed(f"header, byte {at}")
        at = tensor.end()
        yield _tensor(tensor)


def _after_metadata(header: bytes | bytearray, at: int) -> int:
    for _ in range(ENTRIES):
        text = _TEXT.match(header, at)
        if text is None:
            break
        at = text.end()
    closed = _CLOSED.match(header, at)
    if closed is None:
        raise Malformed(f"metadata, byte {at}")
    return closed.end()


def _tensor(match: re.Match[bytes]) -> Entry:
    """One entry; `Malformed` where the shape does not fill the range exactly."""
    name, dtype, shape, start, stop = match.groups()
    if dtype is None or shape is None or start is None or stop is None:
        raise Malformed(f"{name!r}: a field twice")
    try:
        dimensions = tuple(int(n) for n in shape.split(b",")) if shape.strip() else ()
    except ValueError as e:
        raise Malformed(f"{name!r}: shape") from e
    kind, first, last = dtype.decode(), int(start), int(stop)
    bits = 8 if kind.startswith("F8_") else _BITS.get(kind)
    if bits is None:  # newer than this table: the range still says where it lies
        return Entry(match.span(1), kind, dimensions, first, last, 0)
    if math.prod(dimensions) * bits != (last - first) * 8:
        raise Malformed(f"{name!r}: shape and range disagree")
    return Entry(match.span(1), kind, dimensions, first, last, max(8, bits) // 8)
