"""A rank's items as safetensors files, each built in one buffer.

A file is a real safetensors file, so the store cuts it at every tensor, and any reader of
safetensors opens it. Within one, larger elements come first (so that each tensor is aligned) and
tensors too small for a blob of their own last, side by side.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from castore import InvalidInputError
from castore_dcp.layout import SIZES, Numbers
from castore_dcp.metadata import dtype_name

SMALL = 64 << 10
"""Bytes below which the store gathers a tensor with others."""

ALIGNED = 64
"""What the data of a file begin at a multiple of: torch must not see an element unaligned."""

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "bool": "BOOL",
    **{f"int{n}": f"I{n}" for n in (8, 16, 32, 64)},
    **{f"uint{n}": f"U{n}" for n in (8, 16, 32, 64)},
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
}
"""safetensors' names; of other dtypes the bytes are kept, as U8."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One item to write: a chunk of a tensor, or the bytes of a value (``data``)."""

    item: WriteItem
    name: str
    dtype: str
    shape: Numbers
    data: bytes | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Placed:
    """A piece and where in its file it lies."""

    piece: Piece
    start: int
    stop: int


def tensor_piece(item: WriteItem) -> Piece:
    """The piece of a tensor's item; `InvalidInputError` for a dtype that is not stored."""
    fqn, planned = item.index.fqn, item.tensor_data
    if planned is None:
        raise InvalidInputError(f"{fqn!r}: its plan says neither tensor nor bytes")
    shape = tuple(planned.chunk.sizes)
    whole = shape == tuple(planned.size)
    name = fqn if whole else f"{fqn}[{','.join(map(str, planned.chunk.offsets))}]"
    return Piece(item, name, dtype_name(planned.properties.dtype, fqn), shape)


def bytes_piece(item: WriteItem, data: bytes) -> Piece:
    """The piece of a value that is no tensor."""
    return Piece(item, item.index.fqn, "uint8", (len(data),), data)


def is_bytes(item: WriteItem) -> bool:
    return item.type == WriteItemType.BYTE_IO


def grouped(pieces: Iterable[Piece], limit: int) -> Iterator[list[Piece]]:
    """``pieces`` in files: in order, each file of at most ``limit`` bytes or one piece."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and size + piece.nbytes > limit:
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.nbytes
    if group:
        yield group


def placed(pieces: Sequence[Piece]) -> tuple[bytearray, list[Placed]]:
    """A safetensors file of ``pieces``, its data still zeros but for values, and their places."""
    ordered = sorted(pieces, key=lambda p: (-SIZES[p.dtype], p.nbytes < SMALL))
    header: dict[str, object] = {}
    at = 0
    for piece in ordered:
        code = _CODES.get(piece.dtype)
        header[_free(piece.name, header)] = {
            "dtype": code or "U8",
            "shape": list(piece.shape) if code else [piece.nbytes],
            "data_offsets": [at, at + piece.nbytes],
        }
        at += piece.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    first = 8 + len(text)
    image = bytearray(first + at)
    image[:first] = struct.pack("<Q", len(text)) + text
    places = []
    for piece in ordered:
        places.append(Placed(piece, first, first + piece.nbytes))
        first += piece.nbytes
        if piece.data is not None:
            image[first - piece.nbytes : first] = piece.data
    return image, places


def fill(image: bytearray, place: Placed, tensor: Tensor) -> None:
    """Copy a chunk's elements into its place, from whatever device and strides.

    Raises
    ------
    InvalidInputError
        Not what was planned (dtype, shape), or not dense: nothing of it can be stored.
    """
    piece, tensor = place.piece, tensor.detach()
    found = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    if found != (piece.dtype, piece.shape):
        raise InvalidInputError(
            f"{piece.name!r} was planned as {piece.dtype} {piece.shape} and is {found[0]}"
            f" {found[1]}: the state changed while it was saved"
        )
    dense = tensor.layout is torch.strided and tensor.device.type != "meta"
    if not dense or hasattr(tensor, "__tensor_flatten__"):
        raise InvalidInputError(
            f"{piece.name!r} is a {type(tensor).__name__} ({tensor.layout}, {tensor.device}): only"
            " dense tensors of plain elements are stored; convert it first"
        )
    if tensor.numel():
        target = torch.frombuffer(
            image, dtype=tensor.dtype, count=tensor.numel(), offset=place.start
        )
        target.view(tensor.shape).copy_(tensor)


def _free(name: str, taken: dict[str, object]) -> str:
    """``name``, or it with marks behind where a file has that already."""
    while name in taken or name == "__metadata__":
        name += "'"
    return name
