"""What tensors a file holds and where: names, dtypes, shapes, strides, ties, byte ranges.

Reads ``.safetensors``, torch's zip files (``.pt``, ``.pth``, ``.ckpt``) and ``.npz`` through a
function that gives bytes of a range, and only what their headers take; no tensor is read, nothing
is decompressed, and a pickle's operations are interpreted (`castore.cutters.pickled`), never run.

    file = describe(read, size)
    info = file.tensors["model_state_dict/head.weight"]
    data = read(*file.range(info))
"""

from __future__ import annotations

import json
import math
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from castore.cutters import Bounded, Malformed, Ranges, Span, archive, npy, safetensors
from castore.cutters.named import View
from castore.cutters.pickled import interpret
from castore.errors import FormatError

Read: TypeAlias = Callable[[int, int], bytes | bytearray]

MAX_TENSORS = 200_000
MAX_PICKLE = 64 << 20
_NODES = 2_000_000
_DEEPEST = 64
_EXPANDED = 1 << 30

ITEMSIZE: Mapping[str, int] = {
    **dict.fromkeys(("complex128",), 16),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
}
"""Bytes of an element of each dtype that is known; the names are torch's and NumPy's."""

_SAFETENSORS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "BOOL": "bool",
    **{f"I{n}": f"int{n}" for n in (8, 16, 32, 64)},
    **{f"U{n}": f"uint{n}" for n in (8, 16, 32, 64)},
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64",
}
_NUMPY = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file.

    ``strides`` count elements; ``offset`` counts bytes from the start of ``storage``. Two infos
    with one storage share memory; with all fields but the name equal they are one tensor, tied.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: str
    offset: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, each counted once for each place it is seen at."""
        return self.elements * ITEMSIZE[self.dtype]

    @property
    def extent(self) -> int:
        """Bytes from the first element to the end of the last; 0 without elements."""
        if not self.elements:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return (last + 1) * ITEMSIZE[self.dtype]

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one after another in row-major order."""
        expected = 1
        for n, s in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and s != expected and self.elements:
                return False
            expected *= n
        return True


@dataclass(frozen=True)
class TensorFile:
    """The description of one file.

    Attributes
    ----------
    format : {"safetensors", "torch", "npz"}
    tensors : mapping of name to TensorInfo
        In the file's order. In a torch file a name is the path of keys joined by ``/``.
    opaque : mapping of name to str
        What cannot be described (compressed, object dtype, unknown dtype, a conjugate that torch
        makes only when it shows it), and why.
    metadata : mapping of str to str
        The texts of a safetensors header.
    document : object
        Torch files: the saved value, with a `TensorInfo` in place of each tensor; None for one
        that is in ``opaque``.
    """

    format: Literal["safetensors", "torch", "npz"]
    tensors: Mapping[str, TensorInfo]
    opaque: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    document: Any = None
    _locate: Callable[[str], tuple[int, int]] = field(default=lambda _: (0, 0), repr=False)

    def range(self, info: TensorInfo) -> tuple[int, int]:
        """Where in the file the tensor's `TensorInfo.extent` lies.

        In archives this reads the member's local header the first time.
        """
        if not info.extent:
            return 0, 0
        start, stop = self.storage_range(info.storage)
        first = start + info.offset
        if first + info.extent > stop:
            raise FormatError(f"{info.name!r}: its range leaves its storage: the file is damaged")
        return first, first + info.extent

    def storage_range(self, storage: str) -> tuple[int, int]:
        """Where in the file the bytes of a storage lie."""
        try:
            return self._locate(storage)
        except (Malformed, struct.error) as e:
            raise FormatError(f"storage {storage!r}: {e}: the file is damaged") from e

    def ties(self) -> list[tuple[str, ...]]:
        """Names that are one tensor, two or more a group, in the file's order."""
        groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
        for i in self.tensors.values():
            if i.elements:
                groups[i.storage, i.dtype, i.offset, i.shape, i.strides].append(i.name)
        return [tuple(names) for names in groups.values() if len(names) > 1]


def describe(read: Read, size: int) -> TensorFile:
    """Describe a file, its format told from its first bytes.

    Memory is bounded by the bytes of the file's headers, whatever numbers stand in them; a tensor
    whose shape, strides or range do not fit its bytes is refused, an empty one is not.

    Parameters
    ----------
    read : callable
        ``read(start, stop)`` gives these bytes. What it raises passes through.
    size : int
        Of the file, in bytes.

    Raises
    ------
    FormatError
        The file is of no known format, damaged, or contradicts itself; the tensor is named.
    UntrustedPickleError
        A torch file's pickle names something that is not on the list.
    """
    file = Bounded(size, read)
    try:
        head = file.get(0, min(16, size))
        if head[:4] == archive.MAGIC:
            return _archive(file)
        if len(head) >= 9 and safetensors.looks_like(head):
            return _safetensors(file)
    except (Malformed, struct.error, MemoryError) as e:
        raise FormatError(f"not a readable file of tensors: {e}") from e
    shown = bytes(head[:8])
    raise FormatError(
        f"not a file of tensors: {size} bytes that start with {shown!r}; expected safetensors, a"
        " torch zip or .npz (a cut download, a pointer or an error page may lie under the name)"
    )


# -- safetensors


def _safetensors(file: Bounded) -> TensorFile:
    header, data = safetensors.read_header(file)
    ranges = Ranges(max(0, file.size - data))
    tensors: dict[str, TensorInfo] = {}
    opaque: dict[str, str] = {}
    places: dict[str, tuple[int, int]] = {}
    for e in safetensors.entries(header):
        ranges.add(e.start, e.stop)
        name = _json_text(header[slice(*e.name_at)])
        if name in places or len(places) >= MAX_TENSORS:
            raise Malformed(f"{name!r} twice, or more than {MAX_TENSORS} tensors")
        places[name] = (data + e.start, data + e.stop)
        dtype = _SAFETENSORS.get(e.dtype)
        if dtype is None:
            opaque[name] = f"dtype {e.dtype}"
        else:
            tensors[name] = TensorInfo(name, dtype, e.shape, row_major(e.shape), name)
    ranges.disjoint()
    return TensorFile("safetensors", tensors, opaque, _metadata(header), None, places.__getitem__)


def _json_text(raw: bytes | bytearray) -> str:
    try:
        text: str = json.loads(b'"' + bytes(raw) + b'"')
    except ValueError as e:
        raise Malformed(f"name {bytes(raw)[:100]!r}") from e
    return text


def _metadata(header: bytes | bytearray) -> dict[str, str]:
    """The texts beside the tensors, of a header whose form is proven."""
    at = safetensors.metadata_at(header)
    if at is None:
        return {}
    try:
        found, _ = json.JSONDecoder().raw_decode(header[at:].decode("utf-8", "replace"))
    except ValueError as e:
        raise Malformed(f"metadata: {e}") from e
    return {str(k): str(v) for k, v in found.items()}


# -- archives


def _archive(file: Bounded) -> TensorFile:
    members = archive.Archive(file, MAX_TENSORS)
    sizes = members.sizes()
    pickles = [n for n in sizes if n.rpartition("/")[2] == "data.pkl"]
    if len(pickles) > 1:
        raise Malformed(f"{len(pickles)} members data.pkl: readers would choose different ones")
    if pickles:
        return _torch(file, members, sizes, pickles[0])
    return _npz(file, members, sizes)


def _npz(file: Bounded, members: archive.Archive, sizes: Mapping[str, int | None]) -> TensorFile:
    tensors: dict[str, TensorInfo] = {}
    opaque: dict[str, str] = {}
    places: dict[str, tuple[int, int]] = {}
    for member, size in sizes.items():
        name = member.removesuffix(".npy")
        if name == member:
            opaque[name] = "not an array"
        elif size is None:
            opaque[name] = "compressed"
        else:
            header = npy.header(file, *members.locate(member))
            dtype = None if isinstance(header, Span) else _numpy_dtype(header.descr)
            if dtype is None or isinstance(header, Span):
                opaque[name] = "an array of objects, records, texts or big-endian numbers"
                continue
            strides = _column_major(header.shape) if header.fortran else row_major(header.shape)
            tensors[name] = TensorInfo(name, dtype, header.shape, strides, member)
            places[member] = (header.start, header.stop)
    return TensorFile("npz", tensors, opaque, {}, None, places.__getitem__)


def _numpy_dtype(descr: str) -> str | None:
    order, kind, count = descr[0], descr[1], int(descr[2:])
    if kind not in _NUMPY or (order == ">" and count > 1):
        return None
    name = "bool" if kind == "b" else f"{_NUMPY[kind]}{8 * count}"
    return name if name in ITEMSIZE else None


# -- torch


def _torch(
    file: Bounded, members: archive.Archive, sizes: Mapping[str, int | None], pickle: str
) -> TensorFile:
    root = pickle.removesuffix("data.pkl")
    if (sizes[pickle] or 0) > MAX_PICKLE:
        raise Malformed(f"a pickle of {sizes[pickle]} bytes, at most {MAX_PICKLE}")
    order = f"{root}byteorder"
    if sizes.get(order) and file.get(*members.locate(order)) != b"little":
        raise Malformed("not little-endian")
    value = interpret(file.get(*members.locate(pickle)))
    walk = _Walk(lambda key: sizes.get(f"{root}data/{key}"))
    document = walk.replace(value, "", 0)
    return TensorFile(
        "torch",
        walk.tensors,
        walk.opaque,
        {},
        document,
        lambda storage: members.locate(f"{root}data/{storage}"),
    )


class _Walk:
    """Puts a `TensorInfo` in the place of every view, bounded in depth and count."""

    def __init__(self, storage_size: Callable[[str], int | None]):
        self.tensors: dict[str, TensorInfo] = {}
        self.opaque: dict[str, str] = {}
        self._size = storage_size
        self._nodes = 0

    def replace(self, value: Any, path: str, depth: int) -> Any:
        self._nodes += 1
        if depth > _DEEPEST or self._nodes > _NODES:
            raise Malformed(f"{path[:200]!r}: values nested too deeply, or too many")
        if isinstance(value, View):
            return self._tensor(value, path)
        if isinstance(value, dict):
            made: Any = type(value)(self._items(value, path, depth))
            if hasattr(value, "_metadata"):
                metadata = self.replace(value._metadata, f"{path}/_metadata", depth + 1)
                made._metadata = metadata
            return made
        if type(value) in (list, tuple):
            return type(value)(v for _, v in self._items(dict(enumerate(value)), path, depth))
        return value

    def _items(self, value: dict[Any, Any], path: str, depth: int) -> Iterator[tuple[Any, Any]]:
        for key, item in value.items():
            if isinstance(item, str | int | float | None):
                self._nodes += 1
                yield key, item
            else:
                yield key, self.replace(item, f"{path}/{key}" if path else str(key), depth + 1)

    def _tensor(self, view: View, path: str) -> TensorInfo | None:
        known = len(self.tensors) + len(self.opaque)
        if path in self.tensors or path in self.opaque or known >= MAX_TENSORS:
            raise Malformed(f"{path[:200]!r} twice, or more than {MAX_TENSORS} tensors")
        width = ITEMSIZE.get(view.dtype)
        if width is None or len(view.shape) != len(view.strides):
            raise Malformed(f"{path!r}: no dtype, or shape and strides of different lengths")
        unit = ITEMSIZE[view.storage.dtype] if view.storage.dtype else 1
        info = TensorInfo(
            path, view.dtype, view.shape, view.strides, view.storage.key, view.offset * width
        )
        size = self._size(view.storage.key)
        if size is None and (view.storage.elements or info.elements):
            raise Malformed(f"{path!r}: storage {view.storage.key!r} is missing or compressed")
        if size is not None and size != view.storage.elements * unit:
            raise Malformed(
                f"{path!r}: a storage of {view.storage.elements * unit} bytes has {size} bytes"
            )
        if info.elements and info.offset + info.extent > (size or 0):
            raise Malformed(
                f"{path!r}: shape {view.shape} at {view.offset} leaves its storage of {size} bytes"
            )
        if info.nbytes > max(size or 0, _EXPANDED):
            raise Malformed(f"{path!r}: {info.nbytes} bytes expanded from a storage of {size}")
        if view.but:
            self.opaque[path] = f"a view whose elements torch changes as it reads them: {view.but}"
            return None
        self.tensors[path] = info
        return info


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of an array whose rows follow one another."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def _column_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(reversed(row_major(tuple(reversed(shape)))))
