"""Frames: they come back as they went in, and no damaged one gives wrong content."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as some

from castore import frame
from castore.digest import digest_of
from castore.encode import Base, encode
from castore.errors import CastoreError, CorruptObjectError, FormatError
from castore.objects import open_frame
from tests.helpers import drift, encode_delta, encode_packed, encode_raw, noise, weights

QUICK = settings(max_examples=40, deadline=None)
ROOM = 320


def header(**change: Any) -> bytes:
    """A sealed header with some fields other than those of an empty raw frame."""
    fields = {
        "magic": b"cst1",
        "version": 1,
        "codec": 0,
        "width": 1,
        "depth": 0,
        "content": 0,
        "payload": 0,
        "base": bytes(32),
        "checksum": xxhash.xxh3_64_digest(b""),
    } | change
    head = struct.pack("<4sBBBBII32s8s", *fields.values())
    return head + xxhash.xxh3_64_digest(head)


def small_frames() -> dict[str, tuple[bytes, bytes, bytes | None]]:
    """Name: frame, content, base content."""
    base, new = bytes(range(48)) * 4, bytes(range(1, 49)) * 4
    return {
        "raw": (encode_raw(noise(40)), noise(40), None),
        "empty": (encode_raw(b""), b"", None),
        "packed": (encode_packed(bytes(400), 4), bytes(400), None),
        "delta": (encode_delta(new, base, digest_of(base), 0, 2), new, base),
    }


@pytest.mark.parametrize("width", frame.WIDTHS)
@given(data=some.data())
@QUICK
def test_raw_and_packed_come_back(width: int, data: some.DataObject) -> None:
    content = data.draw(some.binary(max_size=ROOM))
    for made in (encode_raw(content, width), encode_packed(content, width)):
        found = frame.parse_header(made)
        assert found.content_length == len(content)
        assert found.frame_length == len(made)
        assert found.width in (1, width)
        assert bytes(frame.decode(made)) == content


@pytest.mark.parametrize("width", frame.WIDTHS)
@given(data=some.data())
@QUICK
def test_deltas_come_back(width: int, data: some.DataObject) -> None:
    n = width * data.draw(some.integers(1, ROOM // width))
    content = data.draw(some.binary(min_size=n, max_size=n))
    base = data.draw(some.binary(min_size=n, max_size=n))
    made = encode_delta(content, base, "ab" * 32, 3, width)
    found = frame.parse_header(made)
    assert (found.codec, found.depth, found.base) == (frame.DELTA, 4, "ab" * 32)
    assert bytes(frame.decode(made, base)) == content


@pytest.mark.parametrize("width", frame.WIDTHS)
def test_compressible_content_is_packed_at_each_width(width: int) -> None:
    content = np.arange(4096, dtype=f"<u{width}").tobytes()
    made = encode_packed(content, width)
    assert frame.parse_header(made).codec == frame.PACKED
    assert len(made) < len(content)
    assert bytes(frame.decode(made)) == content


@given(some.binary(max_size=200), some.integers(0, 8), some.none() | some.binary(max_size=200))
@QUICK
def test_the_encoder_takes_any_width_and_any_base(
    content: bytes, n: int, base: bytes | None
) -> None:
    width = n if n in (0, 1, 2, 4, 8) else 0
    given_base = Base(digest_of(base), 0, width or 1, base) if base is not None else None
    made = b"".join(encode(content, width, given_base, "auto"))
    assert len(made) <= len(content) + frame.HEADER_SIZE
    assert bytes(open_frame(made, digest_of(content), base)) == content


@pytest.mark.parametrize("width", frame.WIDTHS)
@pytest.mark.parametrize("steps", [1, frame._STEP + 3])
def test_zigzag_wraps_at_the_extremes(width: int, steps: int) -> None:
    top = (1 << 8 * width) - 1
    half = 1 << 8 * width - 1
    ends = np.array([0, 1, half - 1, half, half + 1, top], dtype=f"<u{width}")
    new, base = (np.ravel(a) for a in np.meshgrid(ends, ends))
    new, base = np.resize(new, max(36, steps)), np.resize(base, max(36, steps))
    z = np.frombuffer(frame.difference(new.tobytes(), base.tobytes(), width), f"<u{width}")
    for a, b, found in zip(new.tolist()[:36], base.tolist()[:36], z.tolist()[:36], strict=True):
        step = (a - b + half) % (1 << 8 * width) - half
        assert found == (2 * step if step >= 0 else -2 * step - 1)
    made = encode_delta(new.tobytes(), base.tobytes(), "cd" * 32, 0, width)
    assert bytes(frame.decode(made, base.tobytes())) == new.tobytes()


@pytest.mark.parametrize("kind", small_frames())
def test_any_single_byte_flipped_is_detected(kind: str) -> None:
    made, content, base = small_frames()[kind]
    digest = digest_of(content)
    assert bytes(open_frame(made, digest, base)) == content
    for at in range(len(made)):
        for mask in (1, 0x80, 0xFF):
            bad = bytearray(made)
            bad[at] ^= mask
            with pytest.raises(CastoreError):
                frame.check_frame(bad, digest)
            with pytest.raises(CastoreError):
                open_frame(bad, digest, base)


@pytest.mark.parametrize("kind", small_frames())
def test_any_cut_or_grown_frame_is_detected(kind: str) -> None:
    made, content, base = small_frames()[kind]
    for bad in [made[:n] for n in range(len(made))] + [made + b"\0"]:
        with pytest.raises(CorruptObjectError):
            open_frame(bad, digest_of(content), base)


def test_a_payload_with_a_right_checksum_and_wrong_content_is_detected() -> None:
    made = encode_raw(b"another content")
    with pytest.raises(CorruptObjectError, match="its content has the digest") as caught:
        open_frame(made, digest_of(b"the content"), None)
    assert caught.value.expected == digest_of(b"the content")
    assert caught.value.actual == digest_of(b"another content")


def test_a_wrong_base_is_detected() -> None:
    made, content, base = small_frames()["delta"]
    assert base is not None
    for wrong in (None, base[:-2], b"", bytes(len(base))):
        with pytest.raises(CorruptObjectError):
            open_frame(made, digest_of(content), wrong)


@given(some.binary(min_size=64, max_size=64), some.booleans())
@settings(max_examples=300, deadline=None)
def test_arbitrary_headers_never_crash(data: bytes, seal: bool) -> None:
    if seal:
        data = b"cst1\x01" + data[5:56]
        data += xxhash.xxh3_64_digest(data)
    try:
        found = frame.parse_header(data, "x")
    except (CorruptObjectError, FormatError):
        return
    assert found.codec in (0, 1, 2)
    assert found.width in frame.WIDTHS
    assert found.content_length <= frame.MAX_CONTENT
    assert found.content_length % found.width == 0
    assert bool(found.base) == (found.codec == frame.DELTA) == (found.depth > 0)


@pytest.mark.parametrize(
    "change",
    [
        {"magic": b"cst2"},
        {"codec": 3},
        {"width": 0},
        {"width": 3},
        {"width": 8, "content": 4, "payload": 4},
        {"content": frame.MAX_CONTENT + 1, "payload": frame.MAX_CONTENT + 1},
        {"content": 5, "payload": 4},
        {"codec": 1, "content": 10, "payload": 10 + 1025},
        {"codec": 1, "depth": 1},
        {"codec": 1, "base": b"b" * 32},
        {"codec": 2, "depth": 1},
        {"codec": 2, "base": b"b" * 32},
        {"codec": 2, "base": b"b" * 32, "depth": frame.MAX_DEPTH + 1},
    ],
)
def test_fields_that_contradict_each_other_are_refused(change: dict[str, Any]) -> None:
    assert frame.parse_header(header()).codec == frame.RAW
    with pytest.raises(CorruptObjectError, match="damaged frame header"):
        frame.parse_header(header(**change))


def test_a_newer_version_is_refused_by_name() -> None:
    with pytest.raises(FormatError, match="object ab12: frame version 2.*upgrade castore"):
        frame.parse_header(header(version=2), "ab12")


@pytest.mark.parametrize("promise", [0, 1, 399, 401, 1 << 20, (1 << 31) - 1])
def test_a_payload_that_promises_another_size_is_refused_before_allocation(
    promise: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("decompressed")

    payload = bytearray(frame.compress(bytes(400), 4))
    payload[4:8] = struct.pack("<I", promise)
    head = header(
        codec=1, content=400, payload=len(payload), checksum=xxhash.xxh3_64_digest(bytes(payload))
    )
    monkeypatch.setattr(frame.blosc, "decompress", never)
    with pytest.raises(CorruptObjectError, match="promises"):
        frame.decode(head + payload, None, "x")


@given(some.binary(max_size=100))
@QUICK
def test_a_payload_of_anything_is_refused_or_has_the_promised_size(payload: bytes) -> None:
    head = header(
        codec=1, content=400, payload=len(payload), checksum=xxhash.xxh3_64_digest(payload)
    )
    try:
        assert len(frame.decode(head + payload)) == 400
    except CorruptObjectError:
        pass


@given(some.integers(16, 60), some.integers(1, 255))
@QUICK
def test_a_mangled_blosc_stream_never_gives_another_length(at: int, mask: int) -> None:
    payload = bytearray(frame.compress(bytes(range(200)) * 2, 4))
    payload[at % len(payload)] ^= mask
    head = header(
        codec=1, content=400, payload=len(payload), checksum=xxhash.xxh3_64_digest(bytes(payload))
    )
    try:
        assert len(frame.decode(head + payload)) == 400
    except CorruptObjectError:
        pass


def test_one_input_gives_one_frame_on_any_thread() -> None:
    content = weights(300_000).tobytes()
    base = drift(weights(300_000), 1).tobytes()

    def make(_: int) -> tuple[bytes, bytes]:
        return (
            encode_packed(content, 4),
            encode_delta(content, base, digest_of(base), 0, 4),
        )

    here = make(0)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(make, range(4))) == {here}
    assert make(1) == here
