"""Stored members of a zip archive: torch's files since 1.6, and ``.npz``.

Format: APPNOTE.TXT 6.3.10 (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT), ZIP64
included; https://docs.pytorch.org/docs/stable/notes/serialization.html for torch's members:
``<root>/data.pkl``, and each storage as ``<root>/data/<key>``.

Nothing is decompressed. Compressed and encrypted members belong to what lies between the stored
ones. Names may repeat: a range is no less there for it.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from castore.cutters import ENTRIES, Bounded, Malformed, Ranges, Span, npy, storages

MAGIC = b"PK\x03\x04"
_DIRECTORY = 64 << 20
_TAIL = 128  # bytes looked through first: what lies before is a tensor, dear to fetch
_PICKLE = 4 << 20
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_ENCRYPTED = 0x1 | 0x40 | 0x2000
_SIZES_FOLLOW = 0x8
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_EXTRAS = 64


class _Directory(NamedTuple):
    start: int
    stop: int
    entries: int


class _Member(NamedTuple):
    name: bytes
    offset: int
    length: int
    stored: bool


def spans(file: Bounded, least: int) -> list[Span]:
    """Stored members of ``least`` bytes or more; of a NumPy member, its array."""
    directory = _find_directory(file)
    ranges = Ranges(directory.start)
    big: list[_Member] = []
    pickle: _Member | None = None
    for m in _members(file, directory):
        ranges.add(m.offset, m.offset + _LOCAL.size + len(m.name) + m.length)
        if m.stored and m.length >= least:
            big.append(m)
        if m.stored and pickle is None and m.name.rpartition(b"/")[2] == b"data.pkl":
            pickle = m
    offsets = ranges.disjoint()

    def locate(member: _Member) -> tuple[int, int]:
        after = bisect_right(offsets, member.offset)
        limit = offsets[after] if after < len(offsets) else directory.start
        return _data(file, member, limit)

    widths = _widths(file, big, *locate(pickle), pickle.name) if big and pickle else {}
    found = [_span(file, m, *locate(m), widths) for m in sorted(big, key=lambda m: m.offset)]
    return [s for s in found if s.stop - s.start >= least]


class Archive:
    """The members of an archive by name, for a description; `Malformed` where two share a name.

    Parameters
    ----------
    file : Bounded
    most : int
        Members; more are `Malformed`, which bounds memory.
    """

    def __init__(self, file: Bounded, most: int):
        self._file = file
        directory = _find_directory(file)
        if directory.entries > most:
            raise Malformed(f"{directory.entries} members, more than {most}")
        ranges = Ranges(directory.start)
        self._stop = directory.start
        self._members: dict[str, _Member] = {}
        self._located: dict[str, tuple[int, int]] = {}
        for m in _members(file, directory):
            ranges.add(m.offset, m.offset + _LOCAL.size + len(m.name) + m.length)
            name = m.name.decode("utf-8", "replace")
            if name in self._members:
                raise Malformed(f"{name!r} twice")
            self._members[name] = m
        self._offsets = ranges.disjoint()

    def sizes(self) -> dict[str, int | None]:
        """Bytes of each member, in the directory's order; None for one that is not stored plain."""
        return {n: m.length if m.stored else None for n, m in self._members.items()}

    def locate(self, name: str) -> tuple[int, int]:
        """Where the bytes of a stored member lie in the file; reads its local header, once."""
        found = self._located.get(name)
        if found is None:
            found = self._located[name] = self._locate(self._members[name])
        return found

    def _locate(self, member: _Member) -> tuple[int, int]:
        after = bisect_right(self._offsets, member.offset)
        limit = self._offsets[after] if after < len(self._offsets) else self._stop
        return _data(self._file, member, limit)


def _span(file: Bounded, member: _Member, start: int, stop: int, widths: dict[bytes, int]) -> Span:
    if member.name.endswith(b".npy"):
        try:
            return npy.array(file, start, stop)
        except Malformed:
            return Span(start, stop, 0)
    return Span(start, stop, widths.get(member.name, 0))


def _widths(
    file: Bounded, big: list[_Member], start: int, stop: int, name: bytes
) -> dict[bytes, int]:
    """The element widths of torch storages by member name, as far as the pickle tells."""
    folder = name.removesuffix(b"data.pkl") + b"data/"
    keys = {
        m.name[len(folder) :].decode("utf-8", "replace"): m.name
        for m in big
        if m.name.startswith(folder)
    }
    content = file.get(start, min(stop, start + _PICKLE)) if keys else b""
    return {keys[k]: width for k, width in storages.widths(content, set(keys)).items()}


def _find_directory(file: Bounded) -> _Directory:
    tail_at = max(0, file.size - _TAIL)
    tail = file.get(tail_at, file.size)
    at = _find_end(tail)
    if at < 0:  # it stands before a long comment
        tail_at = max(0, file.size - _END.size - _MAX16)
        tail = file.get(tail_at, file.size)
        at = _find_end(tail)
    if at < 0:
        raise Malformed("no end record")
    _, disk, start_disk, here, count, length, start, _ = _END.unpack_from(tail, at)
    stop = tail_at + at
    if stop >= _LOCATOR.size:
        locator = _LOCATOR.unpack(file.get(stop - _LOCATOR.size, stop))
        if locator[0] == b"PK\x06\x07":
            stop = locator[2]
            end64 = _END64.unpack(file.get(stop, stop + _END64.size))
            if end64[0] != b"PK\x06\x06":
                raise Malformed("no ZIP64 end record where the locator says")
            disk, start_disk, here, count, length, start = end64[4:]
    if disk or start_disk or here != count:
        raise Malformed("archive over several disks")
    if count > ENTRIES or length > _DIRECTORY or start + length > stop:
        raise Malformed("central directory out of bounds")
    return _Directory(start, start + length, count)


def _find_end(tail: bytes | bytearray) -> int:
    """Where the end record starts whose comment ends with the file, or -1."""
    at = tail.rfind(b"PK\x05\x06")
    while at >= 0:
        rest = len(tail) - at - _END.size
        if rest >= 0 and int.from_bytes(tail[at + 20 : at + 22], "little") == rest:
            return at
        at = tail.rfind(b"PK\x05\x06", 0, at)
    return -1


def _members(file: Bounded, directory: _Directory) -> Iterator[_Member]:
    """The central directory's entries; `Malformed` unless they fill it exactly."""
    data = file.get(directory.start, directory.stop)
    at = 0
    for _ in range(directory.entries):
        fields = _CENTRAL.unpack_from(data, at)
        name_at, extra_at = at + _CENTRAL.size, at + _CENTRAL.size + fields[10]
        at = extra_at + fields[11] + fields[12]
        if fields[0] != b"PK\x01\x02" or at > len(data):
            raise Malformed("entry of the central directory")
        extra = data[extra_at : extra_at + fields[11]]
        length, size, offset = _sizes(fields[8], fields[9], fields[16], extra)
        stored = fields[4] == 0 and not fields[3] & _ENCRYPTED
        if stored and length != size:
            raise Malformed("stored member of two sizes")
        yield _Member(bytes(data[name_at:extra_at]), offset, length, stored)
    if at != len(data):
        raise Malformed("central directory longer than its entries")


def _sizes(length: int, size: int, offset: int, extra: bytes | bytearray) -> tuple[int, int, int]:
    """Stored length, real size and header offset, from the ZIP64 field where marked so."""
    if _MAX32 not in (length, size, offset):
        return length, size, offset
    at = 0
    for _ in range(_EXTRAS):
        kind, n = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            break
        at += 4 + n
    else:
        raise Malformed("no ZIP64 field")
    values = iter(struct.unpack_from(f"<{min(n // 8, 3)}Q", extra, at + 4))
    try:
        size = next(values) if size == _MAX32 else size
        length = next(values) if length == _MAX32 else length
        offset = next(values) if offset == _MAX32 else offset
    except StopIteration as e:
        raise Malformed("ZIP64 field too short") from e
    return length, size, offset


def _data(file: Bounded, member: _Member, limit: int) -> tuple[int, int]:
    """Where the member's bytes lie: its local header, not the directory, says how long that is.

    `Malformed` unless that header agrees with the directory and the data end by ``limit``.
    """
    name_at = member.offset + _LOCAL.size
    header = file.get(member.offset, name_at + len(member.name))
    magic, _, flags, method, _, _, _, length, _, n, extra = _LOCAL.unpack_from(header)
    if magic != MAGIC or method != 0 or flags & _ENCRYPTED or header[_LOCAL.size :] != member.name:
        raise Malformed(f"{member.name!r}: local header")
    if n != len(member.name) or (
        not flags & _SIZES_FOLLOW and length not in (member.length, _MAX32)
    ):
        raise Malformed(f"{member.name!r}: local header")
    start = name_at + n + extra
    if start + member.length > limit:
        raise Malformed(f"{member.name!r} overlaps what follows")
    return start, start + member.length
