"""The document ``dcp.json``: what a checkpoint holds and where. Pure data, no torch, no I/O.

It takes the place of torch's pickled metadata: canonical JSON, so reading it runs nothing, and
equal checkpoints give equal bytes. See docs/layouts/dcp.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from castore import FormatError, InvalidInputError, document
from castore.tensors import ITEMSIZE
from castore_dcp.names import METADATA

KIND = "dcp"
SIZES: Mapping[str, int] = {**ITEMSIZE, "complex32": 4, "float4_e2m1fn_x2": 1}
"""Bytes of an element of each dtype that is stored; the names are torch's."""

MEMORY_FORMATS = ("contiguous_format", "channels_last", "preserve_format")
Numbers: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor: where it begins, and its lengths."""

    offsets: Numbers
    sizes: Numbers


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: its whole shape, the chunks that make it up, and torch's properties."""

    dtype: str
    size: Numbers
    chunks: tuple[Chunk, ...]
    layout: str = "strided"
    requires_grad: bool = False
    memory_format: str = "contiguous_format"
    pin_memory: bool = False


@dataclass(frozen=True, slots=True)
class BytesEntry:
    """A value that is no tensor."""


Entry: TypeAlias = TensorEntry | BytesEntry


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes ``[start, stop)`` of ``file``: a chunk (by its offsets) or a value of ``fqn``.

    ``hint`` is the chunk's number among its tensor's, where torch told it.
    """

    fqn: str
    offsets: Numbers | None
    hint: int | None
    file: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All of a checkpoint; ``entries`` in the order of the state dict, ``planner`` as given."""

    entries: Mapping[str, Entry]
    items: tuple[Item, ...]
    planner: Any = None
    version: str | None = None

    def encode(self) -> bytes:
        """Canonical bytes, proven to read back; `InvalidInputError` for what cannot be stored."""
        files = sorted({i.file for i in self.items})
        number = {f: n for n, f in enumerate(files)}
        try:
            data = document.encode(
                KIND,
                {
                    "version": self.version,
                    "entries": [[k, _packed(e)] for k, e in self.entries.items()],
                    "files": files,
                    "items": [
                        [i.fqn, i.offsets, i.hint, number[i.file], i.start, i.stop]
                        for i in self.items
                    ],
                    "planner": coded(self.planner),
                },
            )
            Layout.decode(data)
        except (TypeError, ValueError, RecursionError) as e:
            raise InvalidInputError(f"this checkpoint cannot be described: {e}") from e
        return data

    @staticmethod
    def decode(data: bytes, where: str = METADATA) -> Layout:
        """The layout in ``data``; `FormatError` unless chunks make up tensors and have items."""
        keys = ["version", "entries", "files", "items", "planner"]
        body = document.decode(data, KIND, keys, where)
        return document.parsed(lambda: _layout(body, where), where)


def coded(value: Any) -> Any:
    """A planner's plain value as JSON: lists, tuples and dicts keep their kinds and orders.

    Raises
    ------
    TypeError
        Anything but None, truth values, numbers, texts, lists, tuples and dicts.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) is list:
        return [coded(v) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [coded(v) for v in value]}
    if isinstance(value, dict):
        return {"dict": [[coded(k), coded(v)] for k, v in value.items()]}
    raise TypeError(f"the planner's data hold a {type(value).__name__}: only plain values are kept")


def plain(value: Any) -> Any:
    """The inverse of `coded`; ValueError for what it does not write."""
    if isinstance(value, list):
        return [plain(v) for v in value]
    if not isinstance(value, dict):
        if type(value) is float:
            raise ValueError(f"a bare {value!r}")
        return value
    ((kind, inner),) = value.items()
    if kind == "float":
        return float.fromhex(inner)
    if kind == "tuple":
        return tuple(plain(v) for v in inner)
    if kind == "dict":
        return {plain(k): plain(v) for k, v in inner}
    raise ValueError(f"a value of kind {kind!r}")


def _packed(entry: Entry) -> dict[str, Any]:
    if isinstance(entry, BytesEntry):
        return {"type": "bytes"}
    chunks = [[c.offsets, c.sizes] for c in entry.chunks]
    return {"type": "tensor", **asdict(entry), "chunks": chunks}


def _entry(packed: dict[str, Any], fqn: str) -> Entry:
    fields = dict(packed)
    if fields.pop("type") == "bytes" and not fields:
        return BytesEntry()
    size = _numbers(fields.pop("size"))
    chunks = tuple(Chunk(_numbers(o), _numbers(s)) for o, s in fields.pop("chunks"))
    entry = TensorEntry(size=size, chunks=chunks, **fields)
    flags = [entry.requires_grad, entry.pin_memory]
    if (
        entry.dtype not in SIZES
        or not isinstance(entry.layout, str)
        or entry.memory_format not in MEMORY_FORMATS
        or not all(type(f) is bool for f in flags)
        or not all(_inside(c, size) for c in chunks)
    ):
        raise ValueError(f"{fqn!r}: unknown dtype or property, or a chunk outside of its tensor")
    return entry


def _inside(chunk: Chunk, size: Numbers) -> bool:
    return len(chunk.offsets) == len(chunk.sizes) == len(size) and all(
        o + n <= whole for o, n, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
    )


def _layout(body: dict[str, Any], where: str) -> Layout:
    entries = {_text(k): _entry(e, k) for k, e in body["entries"]}
    files = [_text(f) for f in body["files"]]
    items = tuple(
        Item(
            _text(fqn),
            None if offsets is None else _numbers(offsets),
            None if hint is None else _count(hint),
            files[_count(file)],
            _count(start),
            _count(stop),
        )
        for fqn, offsets, hint, file, start, stop in body["items"]
    )
    version = None if body["version"] is None else _text(body["version"])
    if len(entries) != len(body["entries"]) or sorted(set(files)) != files:
        raise ValueError("a name stands twice, or files are out of order")
    for defect in _defects(entries, items):
        raise FormatError(f"{where}: {defect}")
    return Layout(entries, items, plain(body["planner"]), version)


def _defects(entries: Mapping[str, Entry], items: tuple[Item, ...]) -> Iterator[str]:
    """Chunks and values without their one item, items of nothing, counts that do not fit."""
    wanted = dict(_wanted(entries))
    for fqn, entry in entries.items():
        if isinstance(entry, TensorEntry):
            held = sum(math.prod(c.sizes) for c in entry.chunks)
            if held != math.prod(entry.size):
                yield f"{fqn!r}: its chunks hold {held} elements of {math.prod(entry.size)}"
    for item in items:
        at = (item.fqn, item.offsets)
        length = wanted.pop(at, None)
        if length is None:
            yield f"{item.fqn!r} at {item.offsets}: an item of nothing, or one of two"
        elif item.stop < item.start or length not in (-1, item.stop - item.start):
            yield f"{item.fqn!r} at {item.offsets}: {item.stop - item.start} bytes, not {length}"
    for fqn, offsets in wanted:
        yield f"{fqn!r} at {offsets}: nothing holds its bytes"


def _wanted(entries: Mapping[str, Entry]) -> Iterator[tuple[tuple[str, Numbers | None], int]]:
    """What needs an item, and its length; -1 where any will do."""
    for fqn, entry in entries.items():
        if isinstance(entry, BytesEntry):
            yield (fqn, None), -1
        else:
            for chunk in entry.chunks:
                yield (fqn, chunk.offsets), math.prod(chunk.sizes) * SIZES[entry.dtype]


def _numbers(values: Any) -> Numbers:
    if not isinstance(values, list | tuple):
        raise ValueError(f"{values!r} is no list of numbers")
    return tuple(_count(v) for v in values)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value
