"""How an object lies on disk: a 64-byte header and a payload.

=======  ====  ==========================================================================
offset   size  field (integers little-endian)
=======  ====  ==========================================================================
0        4     magic ``b"cst1"``
4        1     version, 1
5        1     codec: 0 raw, 1 packed, 2 delta
6        1     element width in bytes: 1, 2, 4 or 8
7        1     chain depth: 0, or the base's depth + 1 for a delta
8        4     content length
12       4     payload length
16       32    digest of the base (delta), else zeros
48       8     XXH3-64 of the payload
56       8     XXH3-64 of bytes 0 to 55
=======  ====  ==========================================================================

Codecs: *raw* is the content; *packed* is a Blosc-1 buffer (Zstandard, byte shuffle) of the
content; *delta* is a Blosc-1 buffer of ``zigzag(content - base)``, elements of the width as
little-endian unsigned integers, wrapping. The width divides the content's length unless it is 1.

The name of an object is the digest of its *content*: the frame may differ between versions of
the compressor. Checksums tell a damaged frame from a damaged base and a wrong object.
Pure functions, no I/O; nothing is allocated by a length that was not checked first.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numcodecs import blosc

from castore.digest import Buffer
from castore.errors import CorruptObjectError, FormatError

HEADER_SIZE = 64
MAX_CONTENT = 64 << 20
MAX_FRAME = HEADER_SIZE + MAX_CONTENT + 1024
MAX_DEPTH = 32
RAW, PACKED, DELTA = 0, 1, 2
CODECS = ("raw", "packed", "delta")
WIDTHS = (1, 2, 4, 8)

_MAGIC, _VERSION = b"cst1", 1
_FIELDS = struct.Struct("<4sBBBBII32s8s")
_NO_BASE = bytes(32)
_STEP = 256 << 10  # elements a numpy call: smaller ones lose to the interpreter lock
_BLOSC_BLOCK = 128 << 10  # bytes a byte plane


Parts: TypeAlias = tuple[bytes, Buffer]
"""A frame as header and payload: joining them would copy the payload."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a frame says of itself. ``base`` is a digest, or empty."""

    codec: int
    width: int
    depth: int
    content_length: int
    payload_length: int
    base: str
    payload_checksum: bytes

    @property
    def frame_length(self) -> int:
        return HEADER_SIZE + self.payload_length


def _xxh(data: Buffer) -> bytes:
    return xxhash.xxh3_64_digest(data)


def _pack_header(h: Header) -> bytes:
    base = bytes.fromhex(h.base) if h.base else _NO_BASE
    head = _FIELDS.pack(
        _MAGIC,
        _VERSION,
        h.codec,
        h.width,
        h.depth,
        h.content_length,
        h.payload_length,
        base,
        h.payload_checksum,
    )
    return head + _xxh(head)


def parse_header(data: Buffer, name: str = "") -> Header:
    """The header at the start of ``data``.

    Raises
    ------
    FormatError
        The frame is of a newer version.
    CorruptObjectError
        Too short, wrong magic or checksum, or fields that contradict each other.
    """
    head = bytes(data[:HEADER_SIZE])

    def bad(why: str) -> CorruptObjectError:
        return CorruptObjectError(f"object {name}: damaged frame header: {why}", name=name)

    if len(head) < HEADER_SIZE:
        raise bad(f"{len(head)} bytes, a header has {HEADER_SIZE}")
    magic, version, codec, width, depth, content, payload, base, checksum = _FIELDS.unpack(
        head[: _FIELDS.size]
    )
    if magic != _MAGIC:
        raise bad(f"starts with {magic!r}, expected {_MAGIC!r}")
    if _xxh(head[:56]) != head[56:]:
        raise bad("its checksum does not match")
    if version != _VERSION:
        raise FormatError(
            f"object {name}: frame version {version}, this castore reads {_VERSION}:"
            " upgrade castore"
        )
    if codec > DELTA or width not in WIDTHS or content > MAX_CONTENT or content % width:
        raise bad(f"codec {codec}, width {width}, content length {content}")
    if payload > content + 1024 or (codec == RAW and payload != content):
        raise bad(f"payload of {payload} bytes for {content} of content")
    if (
        (codec == DELTA) != (base != _NO_BASE)
        or (codec == DELTA) != (depth > 0)
        or depth > MAX_DEPTH
    ):
        raise bad(f"codec {CODECS[codec]} with depth {depth} and base {base.hex()[:8]}")
    return Header(
        codec, width, depth, content, payload, base.hex() if codec == DELTA else "", checksum
    )


def _frame(
    codec: int, width: int, content_length: int, payload: Buffer, base: str, depth: int
) -> Parts:
    h = Header(codec, width, depth, content_length, len(payload), base, _xxh(payload))
    return _pack_header(h), payload


def raw(content: Buffer, width: int = 1) -> Parts:
    """A frame that holds ``content`` as it is; the payload is the very buffer."""
    w = width if len(content) % width == 0 else 1
    return _frame(RAW, w, len(content), content, "", 0)


def packed(content: Buffer, width: int) -> Parts:
    """A self-contained compressed frame, or a raw one where that gains under 5 %."""
    w = width if len(content) % width == 0 else 1
    payload = compress(content, w) if len(content) >= 64 else content
    if len(payload) >= 0.95 * len(content):
        return raw(content, w)
    return _frame(PACKED, w, len(content), payload, "", 0)


def delta(content: Buffer, base: Buffer, base_digest: str, base_depth: int, width: int) -> Parts:
    """A frame that holds ``content`` as a difference to ``base``, both of one length."""
    payload = compress(difference(content, base, width), width)
    return _frame(DELTA, width, len(content), payload, base_digest, base_depth + 1)


def check_frame(frame: Buffer, name: str = "") -> Header:
    """Header of a whole frame, after its length and payload checksum were checked."""
    h = parse_header(frame, name)
    if len(frame) != h.frame_length:
        raise CorruptObjectError(
            f"object {name}: the frame has {len(frame)} bytes, its header says {h.frame_length}",
            name=name,
            expected=str(h.frame_length),
            actual=str(len(frame)),
        )
    actual = _xxh(memoryview(frame)[HEADER_SIZE:])
    if actual != h.payload_checksum:
        raise CorruptObjectError(
            f"object {name}: the payload's checksum does not match: the stored bytes are damaged",
            name=name,
            expected=h.payload_checksum.hex(),
            actual=actual.hex(),
        )
    return h


def decode(
    frame: Buffer, base: Buffer | None = None, name: str = "", out: memoryview | None = None
) -> Buffer:
    """The content of ``frame``; ``base`` is the content of its base, for a delta.

    The digest is *not* checked here: `ObjectStore.read` does. ``out`` is memory to decode into,
    if it is writable and long enough. Raises as `check_frame`.
    """
    h = check_frame(frame, name)
    payload = memoryview(frame)[HEADER_SIZE:]
    if h.codec == RAW:
        return payload
    content = decompress(payload, h.content_length, name, out)
    if h.codec == DELTA:
        if base is None or len(base) != h.content_length:
            raise CorruptObjectError(
                f"object {name}: its base {h.base} has {len(base) if base is not None else 'no'}"
                f" bytes, expected {h.content_length}",
                name=name,
            )
        _undo_difference(content, base, h.width)
    return content


def compress(content: Buffer, width: int) -> Buffer:
    """Blosc-1 buffer of ``content``: Zstandard level 1, byte shuffle, one thread: it repeats."""
    result: bytes = _off_main(
        blosc.compress,
        np.frombuffer(content, np.uint8),
        b"zstd",
        1,
        blosc.SHUFFLE if width > 1 else blosc.NOSHUFFLE,
        _BLOSC_BLOCK * width,
        width,
    )
    return result


def decompress(
    payload: Buffer, length: int, name: str = "", memory: memoryview | None = None
) -> memoryview:
    """Undo `compress` into ``length`` bytes, as the header promised: fresh ones, or ``memory``."""
    source = np.frombuffer(payload, np.uint8)
    try:
        said, stored, _ = blosc._cbuffer_sizes(source) if len(source) >= 16 else (-1, -1, 0)
    except Exception as e:
        raise CorruptObjectError(f"object {name}: unreadable payload: {e}", name=name) from e
    if (said, stored) != (length, len(source)):
        raise CorruptObjectError(
            f"object {name}: the payload promises {said} bytes from {stored}, the header {length}"
            f" from {len(source)}",
            name=name,
        )
    # NumPy asks for huge pages, which a bytearray does not: a third of the time to touch 16 MiB.
    fits = memory is not None and not memory.readonly and len(memory) >= length
    out = memory[:length] if memory is not None and fits else np.empty(length, np.uint8).data
    try:
        _off_main(blosc.decompress, source, out)
    except Exception as e:
        raise CorruptObjectError(f"object {name}: unreadable payload: {e}", name=name) from e
    return out


def _off_main(function: Any, *args: Any) -> Any:
    """Blosc uses a process-wide thread pool when called on the main thread, whose output varies
    from run to run; on any other thread it works alone.
    """
    if threading.current_thread() is not threading.main_thread():
        return function(*args)
    result: list[Any] = []

    def call() -> None:
        try:
            result.append((True, function(*args)))
        except Exception as e:
            result.append((False, e))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    ok, value = result[0]
    if not ok:
        raise value
    return value


def difference(content: Buffer, base: Buffer, width: int) -> Buffer:
    """``zigzag(content - base)`` elementwise, wrapping: small steps of either sign stay small."""
    signed, unsigned = np.dtype(f"<i{width}"), np.dtype(f"<u{width}")
    a, b = np.frombuffer(content, unsigned), np.frombuffer(base, unsigned)
    out = np.empty(len(a), unsigned)
    sign = np.empty(min(_STEP, len(a)), signed)
    for i in range(0, len(a), _STEP):
        o = out[i : i + _STEP]
        np.subtract(a[i : i + _STEP], b[i : i + _STEP], out=o)
        s = sign[: len(o)]
        np.right_shift(o.view(signed), 8 * width - 1, out=s)
        np.left_shift(o, 1, out=o)
        np.bitwise_xor(o, s.view(unsigned), out=o)
    return out.view(np.uint8).data


def _undo_difference(z: memoryview, base: Buffer, width: int) -> None:
    """Turn the zigzag difference in ``z`` into the content, in place."""
    unsigned = np.dtype(f"<u{width}")
    d, b = np.frombuffer(z, unsigned), np.frombuffer(base, unsigned)
    scratch = np.empty(min(_STEP, len(d)), unsigned)
    for i in range(0, len(d), _STEP):
        o = d[i : i + _STEP]
        s = scratch[: len(o)]
        np.bitwise_and(o, 1, out=s)
        np.negative(s, out=s)
        np.right_shift(o, 1, out=o)
        np.bitwise_xor(o, s, out=o)
        np.add(o, b[i : i + _STEP], out=o)
