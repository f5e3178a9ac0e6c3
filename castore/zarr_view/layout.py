"""How tensors become zarr arrays: node names, chunk shapes, the bytes of one chunk. Pure.

A tensor's name is split at ``/``, and the parts are groups. What zarr does not allow in a name is
spelled in percent-encoding, so that every name has one spelling of its own:

- ``%``, a backslash and control characters are encoded; an empty part is a lone ``%``;
- so is a part of periods only, the first two characters of one that starts with ``__``, and the
  period in ``zarr.json``;
- where ``a`` is a tensor and so is ``a/b``, the latter is ``a%2Fb``: an array holds no nodes.

Dots stay: ``encoder.weight`` is one name. The name in the file is the attribute ``name``.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

TARGET = 4 << 20
"""Bytes of the largest chunk, and of what is read for one."""


def node_paths(names: Iterable[str]) -> dict[str, str]:
    """The path of each name's node; different names have different paths, none within another."""
    parts = {n: tuple(n.split("/")) for n in names}
    arrays = set(parts.values())
    paths = {}
    for name, elements in parts.items():
        path = _spelled(elements[0])
        for i in range(1, len(elements)):
            path += ("%2F" if elements[:i] in arrays else "/") + _spelled(elements[i])
        paths[name] = path
    return paths


def _spelled(element: str) -> str:
    if not element:
        return "%"
    if not element.strip("."):
        return "%2E" * len(element)
    if element.casefold() == "zarr.json":
        return element.replace(".", "%2E")
    text = "".join(map(_character, element))
    return f"%5F%5F{text[2:]}" if text.startswith("__") else text


def _character(c: str) -> str:
    if c not in "%\\" and unicodedata.category(c) not in ("Cc", "Cs"):
        return c
    return "".join(f"%{b:02X}" for b in c.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True)
class View:
    """An array in a file.

    Attributes
    ----------
    name : str
        In the file.
    dtype, stored : numpy.dtype
        Of the zarr array (little-endian), and of the elements in the file.
    shape, strides : tuples of int
        In elements; no stride is negative.
    read : callable
        ``read(start, stop)`` gives bytes, counted from the first element.
    """

    name: str
    dtype: np.dtype[Any]
    stored: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    read: Callable[[int, int], bytes]

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunk shape: what one read of at most `TARGET` bytes gives.

        Axes that lie close together are whole, the next is cut, the others are single. So rows
        of a row-major array stay together, and columns of a column-major one.
        """
        width = self.dtype.itemsize
        sizes, nbytes, span = [1] * len(self.shape), width, width
        for k in sorted(range(len(sizes)), key=lambda k: (self.strides[k], -k)):
            most = TARGET // nbytes
            if self.strides[k]:
                most = min(most, 1 + (TARGET - span) // (self.strides[k] * width))
            sizes[k] = max(1, min(self.shape[k], most))
            nbytes *= sizes[k]
            span += (sizes[k] - 1) * self.strides[k] * width
            if sizes[k] < self.shape[k]:
                break
        return tuple(sizes)

    @property
    def grid(self) -> tuple[int, ...]:
        """How many chunks there are along each axis."""
        return tuple(math.ceil(n / c) for n, c in zip(self.shape, self.chunks, strict=True))

    def chunk_keys(self) -> Iterable[str]:
        """The keys of all chunks below the array's node."""
        return ("/".join(["c", *map(str, index)]) for index in product(*map(range, self.grid)))

    def chunk(self, index: tuple[int, ...]) -> bytes:
        """The bytes of a chunk, row-major, little-endian; zeros beyond the array's edge."""
        chunks, width = self.chunks, self.stored.itemsize
        first = [i * c for i, c in zip(index, chunks, strict=True)]
        shape = [min(c, n - f) for c, n, f in zip(chunks, self.shape, first, strict=True)]
        start = sum(f * s for f, s in zip(first, self.strides, strict=True)) * width
        count = 1 + sum((n - 1) * s for n, s in zip(shape, self.strides, strict=True))
        content = self.read(start, start + count * width)
        strides = [s * width for s in self.strides]
        part = np.ndarray(shape, self.stored, content, strides=strides)  # bounds are checked
        if tuple(shape) == chunks:
            return part.astype(self.dtype, copy=False).tobytes()
        whole = np.zeros(chunks, self.dtype)
        whole[tuple(map(slice, shape))] = part
        return whole.tobytes()
