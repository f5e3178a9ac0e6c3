"""A zip archive as torch writes them, put together in memory that already holds the storages.

Format: APPNOTE.TXT 6.3.10 (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT), ZIP64
where sizes ask for it. Members are stored, never compressed; data start at multiples of 64 bytes,
the padding being an extra field, as torch does (caffe2/serialize/inline_container.cc). Storages
come first, so that their places are known before the pickle is; the central directory gives the
order of reading, and torch, zipfile and memory maps go by it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from isal import isal_zlib

ROOT = "archive"
ALIGNMENT = 64
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_PADDING = 0x4246
_UTF8 = 0x800
# 1980-01-01, the first day that a zip archive can name.
_DATE = 0x21
LIMIT = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Place:
    """Where a member lies: its header at ``header``, its data at ``start``."""

    name: str
    header: int
    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


def plan(lengths: Iterable[tuple[str, int]], at: int = 0, limit: int = LIMIT) -> list[Place]:
    """Places for members of these names and lengths, one after the other from ``at``."""
    places = []
    for name, length in lengths:
        head = at + _LOCAL.size + len(f"{ROOT}/{name}".encode()) + _wide(length, limit) * 20 + 4
        start = -(-head // ALIGNMENT) * ALIGNMENT
        places.append(Place(name, at, start, length))
        at = start + length
    return places


def _wide(length: int, limit: int) -> bool:
    return length >= limit


def tail_size(places: Sequence[Place]) -> int:
    """An upper bound of what `close` writes for them."""
    names = sum(len(f"{ROOT}/{p.name}".encode()) for p in places)
    return names + len(places) * (_CENTRAL.size + 28) + _END64.size + _LOCATOR.size + _END.size


def close(memory: memoryview, places: Sequence[Place], limit: int = LIMIT) -> int:
    """Write headers and directory around the data that stand in ``memory``; the whole length.

    ``limit`` is from where sizes and offsets take 64 bits: lower for tests.
    """
    entries = []
    for p, checksum in zip(places, _checksums(memory, places), strict=True):
        header = _local(p, checksum, limit)
        memory[p.header : p.header + len(header)] = header
        entries.append(_central(p, checksum, limit))
    at = places[-1].stop
    directory = b"".join(entries)
    tail = directory + _end(len(places), len(directory), at, limit)
    memory[at : at + len(tail)] = tail
    return at + len(tail)


def _checksums(memory: memoryview, places: Sequence[Place]) -> list[int]:
    """The CRC-32 of each member, by two threads; ISA-L's takes a quarter of zlib's time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda p: isal_zlib.crc32(memory[p.start : p.stop]), places))


def _local(p: Place, checksum: int, limit: int) -> bytes:
    name = f"{ROOT}/{p.name}".encode()
    wide = struct.pack("<2H2Q", 1, 16, p.length, p.length) if _wide(p.length, limit) else b""
    room = p.start - p.header - _LOCAL.size - len(name) - len(wide) - 4
    extra = wide + struct.pack("<2H", _PADDING, room) + b"Z" * room
    size = LIMIT if wide else p.length
    version = 45 if wide else 20
    head = (b"PK\x03\x04", version, _UTF8, 0, 0, _DATE, checksum, size, size, len(name), len(extra))
    return _LOCAL.pack(*head) + name + extra


def _central(p: Place, checksum: int, limit: int) -> bytes:
    name = f"{ROOT}/{p.name}".encode()
    wide, far = _wide(p.length, limit), p.header >= limit
    numbers = [p.length] * 2 * wide + [p.header] * far
    extra = struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
    size, offset = LIMIT if wide else p.length, LIMIT if far else p.header
    version = 45 if numbers else 20
    sizes = (checksum, size, size, len(name), len(extra))
    head = (b"PK\x01\x02", version, version, _UTF8, 0, 0, _DATE, *sizes, 0, 0, 0, 0, offset)
    return _CENTRAL.pack(*head) + name + extra


def _end(count: int, length: int, at: int, limit: int) -> bytes:
    wide = count >= 0xFFFF or at >= limit or length >= limit
    if not wide:
        return _END.pack(b"PK\x05\x06", 0, 0, count, count, length, at, 0)
    end64 = _END64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, at)
    locator = _LOCATOR.pack(b"PK\x06\x07", 0, at + length, 1)
    return end64 + locator + _END.pack(b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, LIMIT, LIMIT, 0)
