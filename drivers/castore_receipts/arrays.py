"""Named arrays in safetensors files: read without trusting a number in them, written canonically.

A `Tensor` keeps its bytes as they are, so that every dtype of the format is held, hashed and
checked for finiteness, also those that NumPy does not know (bfloat16, 8-bit floats).
Format: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from castore import FormatError, InvalidInputError

MAX_HEADER = 100_000_000
"""Bytes of the largest header that readers of the format accept."""

MAX_RANK = 64
"""Dimensions of the largest shape that is read: NumPy's and torch's own limit."""

Array: TypeAlias = npt.NDArray[Any]

_NUMPY = {
    "BOOL": "|b1",
    "U8": "|u1",
    "I8": "|i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "C64": "<c8",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
}
_RAW_BITS = {
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
BITS = {**{name: np.dtype(code).itemsize * 8 for name, code in _NUMPY.items()}, **_RAW_BITS}
"""Bits of one element, by the format's name of a dtype."""

_NAMES = {np.dtype(code): name for name, code in _NUMPY.items()}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One array as the format holds it: little-endian, C order, ``data`` of exactly its size."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    def numpy(self) -> Array:
        """As a read-only NumPy array; bfloat16 as float32, other unknown dtypes are refused."""
        if self.dtype == "BF16":
            wide = np.frombuffer(self.data, "<u2").astype("<u4") << 16
            return wide.view("<f4").reshape(self.shape)
        code = _NUMPY.get(self.dtype)
        if code is None:
            raise InvalidInputError(f"NumPy has no dtype for {self.dtype}")
        return np.frombuffer(self.data, code).reshape(self.shape)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def tensor(array: Array, name: str) -> Tensor:
    """A NumPy array as a `Tensor`; strides and byte order do not matter, objects are refused."""
    array = np.asarray(array)
    if array.dtype.hasobject or array.dtype.newbyteorder("<") not in _NAMES:
        raise InvalidInputError(f"{name}: arrays of dtype {array.dtype} are not stored")
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return Tensor(_NAMES[little.dtype], array.shape, little.tobytes())


# -- finiteness


@dataclass(frozen=True, slots=True)
class NonFinite:
    """What is wrong with one tensor: how many elements, the first one's index and value."""

    name: str
    count: int
    index: tuple[int, ...]
    value: str

    def __str__(self) -> str:
        at = list(self.index)
        return f"{self.name}: {self.count} not finite, the first at {at}: {self.value}"


def first_nonfinite(tensors: Mapping[str, Tensor]) -> NonFinite | None:
    """The first tensor, by name, with an element that is not finite."""
    for name in sorted(tensors):
        bad = _nonfinite(tensors[name])
        places = np.flatnonzero(bad)
        if len(places):
            return _found(name, tensors[name], int(places[0]), len(places))
    return None


def _found(name: str, t: Tensor, at: int, count: int) -> NonFinite:
    index = tuple(int(i) for i in np.unravel_index(at, t.shape)) if t.shape else ()
    size = BITS[t.dtype] // 8
    raw = bytes(t.data[at * size : (at + 1) * size])
    known = t.dtype in _NUMPY or t.dtype == "BF16"
    value = str(Tensor(t.dtype, (1,), raw).numpy()[0]) if known else f"{t.dtype} 0x{raw.hex()}"
    return NonFinite(name, count, index, value)


def _nonfinite(t: Tensor) -> Any:
    """Which elements are NaN or infinite, by their bits where NumPy does not know the dtype."""
    if t.dtype in ("F16", "F32", "F64", "C64"):
        return np.logical_not(np.isfinite(t.numpy().reshape(-1)))
    if t.dtype == "BF16":
        return np.equal(np.frombuffer(t.data, "<u2") & 0x7F80, 0x7F80)
    if t.dtype.startswith("F8"):
        return _nonfinite_8(t.dtype, np.frombuffer(t.data, np.uint8))
    return np.zeros(0, np.bool_)  # integers, and floats too small to have such values


def _nonfinite_8(dtype: str, bits: Array) -> Any:
    """8-bit floats: E4M3 has NaN only, FNUZ one NaN (negative zero), E8M0 one (all ones)."""
    if dtype == "F8_E4M3":
        return np.equal(bits & 0x7F, 0x7F)
    if dtype == "F8_E5M2":
        return np.equal(bits & 0x7C, 0x7C)
    return np.equal(bits, 0xFF if dtype == "F8_E8M0" else 0x80)


# -- files


def write_safetensors(tensors: Mapping[str, Tensor], state: str | None = None) -> bytes:
    """The one spelling of a file: widest dtype first, then by name; at most one metadata entry.

    Parameters
    ----------
    tensors : mapping of name to Tensor
    state : str, optional
        Text kept under the metadata key ``castore``.

    Raises
    ------
    InvalidInputError
        The header would be larger than readers accept, or a name is not Unicode.
    """
    order = sorted(tensors, key=lambda n: (-BITS[tensors[n].dtype], n))
    header: dict[str, Any] = {} if state is None else {"__metadata__": {"castore": state}}
    at = 0
    for name in order:
        t = tensors[name]
        header[name] = {
            "dtype": t.dtype,
            "shape": list(t.shape),
            "data_offsets": [at, at + t.nbytes],
        }
        at += t.nbytes
    text = _header_text(header)
    return struct.pack("<Q", len(text)) + text + b"".join(tensors[n].data for n in order)


def _header_text(header: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        raise InvalidInputError(f"a tensor's name is not Unicode: {e}") from e
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise InvalidInputError(
            f"{len(header)} tensors make a header of {len(text)} bytes, but readers accept at most"
            f" {MAX_HEADER}: nothing was written; store fewer or shorter-named tensors"
        )
    return text


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """What a file holds; ``metadata`` is text by text."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def read_safetensors(data: bytes, where: str) -> SafetensorsFile:
    """The tensors in ``data``, which they share; nothing is allocated by a number in the file.

    Raises
    ------
    FormatError
        Truncated, not of this format, or dtype, shape and byte range of a tensor disagree, or
        ranges overlap or leave gaps. The message names file, sizes and tensor.
    """
    header, start = _header(data, where)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(f"{where}: its metadata is not text by text")
    body = memoryview(data)[start:]
    tensors: dict[str, Tensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        begin, end, t = _entry(name, entry, body, where)
        spans.append((begin, end, name))
        tensors[name] = t
    _check_spans(sorted(spans), len(body), where)
    return SafetensorsFile(tensors, metadata)


def _header(data: bytes, where: str) -> tuple[dict[str, Any], int]:
    if len(data) < 8:
        raise FormatError(
            f"{where}: {len(data)} bytes are no safetensors file (cut off?): fetch it again"
        )
    length = struct.unpack("<Q", data[:8])[0]
    if length > min(MAX_HEADER, len(data) - 8):
        raise FormatError(
            f"{where}: announces a header of {length} bytes in a file of {len(data)}: cut off, or"
            f" no safetensors file (it begins with {bytes(data[:16])!r}): fetch it again"
        )
    try:
        header = json.loads(data[8 : 8 + length].decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{where}: its header is not JSON: {str(e)[:200]}") from e
    if not isinstance(header, dict):
        raise FormatError(f"{where}: its header is not a JSON object")
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice")
    return result


def _entry(name: str, entry: Any, body: memoryview, where: str) -> tuple[int, int, Tensor]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{where}: tensor {name[:80]!r}: malformed entry")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    known = isinstance(dtype, str) and dtype in BITS
    if not known or not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise FormatError(f"{where}: tensor {name[:80]!r}: malformed dtype, shape or range")
    if len(shape) > MAX_RANK:  # a product of that many numbers could take hours
        raise FormatError(
            f"{where}: tensor {name[:80]!r}: {len(shape)} dimensions, at most {MAX_RANK} are read"
        )
    begin, end = offsets
    if begin > end or end > len(body):
        raise FormatError(
            f"{where}: tensor {name[:80]!r}: bytes {begin} to {end} of {len(body)} (cut off?)"
        )
    size = math.prod(shape) * BITS[dtype]
    if size != (end - begin) * 8:
        raise FormatError(
            f"{where}: tensor {name[:80]!r}: {dtype} of shape {str(shape)[:200]} does not take the"
            f" {end - begin} bytes it is given"
        )
    return begin, end, Tensor(dtype, tuple(shape), body[begin:end])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def _check_spans(spans: list[tuple[int, int, str]], size: int, where: str) -> None:
    at = 0
    for begin, end, name in spans:
        if begin != at:
            raise FormatError(
                f"{where}: tensor {name[:80]!r} begins at byte {begin}, expected {at}:"
                " overlapping ranges or a gap"
            )
        at = end
    if at != size:
        raise FormatError(f"{where}: {size} bytes of data, the tensors take {at}")


def arrays_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of names.

    The rule ``castore-arrays/1`` of ``docs/layouts/receipts.md``: equal values give an equal
    digest whatever the file, its order, its metadata, or the strides in memory.
    """
    sha = hashlib.sha256(b"castore-arrays/1\n")
    for name in sorted(tensors, key=str.encode):
        t = tensors[name]
        line = json.dumps([name, t.dtype, list(t.shape)], separators=(",", ":"), ensure_ascii=False)
        sha.update(line.encode() + b"\n")
        sha.update(t.data)
    return sha.hexdigest()
