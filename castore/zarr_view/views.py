"""From a file of tensors to `View`s: what lies where, and what cannot be shown and why."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from castore.cache import Cache
from castore.cutters import Bounded, Span, archive, npy
from castore.digest import Buffer
from castore.errors import CastoreError, FormatError
from castore.tensors import ITEMSIZE, MAX_TENSORS, TensorFile, TensorInfo, describe, row_major
from castore.zarr_view.dtypes import numpy_dtype
from castore.zarr_view.layout import View

UNPACKED = 512 << 20
"""Bytes of the largest compressed member that is unpacked, and of all that are kept."""

Read: TypeAlias = Callable[[int, int], bytes]


@dataclass(frozen=True)
class Contents:
    """What a file holds: ``views`` by name, and for other names why they are not shown."""

    format: str
    views: Mapping[str, View]
    refused: Mapping[str, str]


def read_contents(read: Read, size: int, where: str) -> Contents:
    """Describe a file of ``size`` bytes; only headers are read.

    Raises
    ------
    FormatError, UntrustedPickleError
        As `castore.tensors.describe`.
    """
    described = describe(read, size)
    views = {i.name: _described(described, i, read) for i in described.tensors.values()}
    refused: dict[str, str] = {}
    members = _Members(read, size, where) if described.format == "npz" else None
    for name, why in described.opaque.items():
        found = members.view(name) if members else why
        if isinstance(found, View):
            views[name] = found
        else:
            refused[name] = found or why
    return Contents(described.format, views, refused)


def _described(file: TensorFile, info: TensorInfo, read: Read) -> View:
    def read_extent(start: int, stop: int) -> bytes:
        first, last = file.range(info)
        if stop > last - first:
            raise FormatError(f"{info.name!r}: bytes {start} to {stop} of {last - first}")
        return read(first + start, first + stop)

    dtype = numpy_dtype(info.dtype)
    return View(info.name, dtype, dtype, info.shape, info.strides, read_extent)


class _Members:
    """The arrays of an ``.npz`` that cannot be read in place as they are."""

    def __init__(self, read: Read, size: int, where: str):
        self._read, self._where = read, where
        self._kept: Cache[str, Buffer] = Cache(UNPACKED, len)
        self._file = Bounded(size, read)
        self._size = size
        self._stored = archive.Archive(self._file, MAX_TENSORS)

    def view(self, name: str) -> View | str:
        """The array ``name``, or why it is not shown; empty where nothing better is known."""
        member = f"{name}.npy"
        size = self._stored.sizes().get(member, -1)
        try:
            if size is None:
                return self._packed(name, member)
            return "" if size < 0 else self._big_endian(name, member)
        except CastoreError:
            raise
        except Exception as e:  # NumPy parses a header as Python, with all that may go wrong there
            return f"not a sound NumPy member: {type(e).__name__}: {str(e)[:160]}"

    def _big_endian(self, name: str, member: str) -> View | str:
        header = npy.header(self._file, *self._stored.locate(member))
        if isinstance(header, Span):
            return ""
        stored = np.dtype(header.descr)
        start = header.start
        return _view(
            name,
            stored,
            header.shape,
            header.fortran,
            lambda a, b: self._read(start + a, start + b),
        )

    def _packed(self, name: str, member: str) -> View | str:
        with self._open() as opened:
            if opened.getinfo(member).compress_type != zipfile.ZIP_DEFLATED:
                return "compressed by a method that NumPy does not write"
            with opened.open(member) as stream:
                shape, fortran, stored = _npy_header(stream)
                start = stream.tell()
        if stored.hasobject:
            return "an array of Python objects"
        count = math.prod(shape) * stored.itemsize
        if count > UNPACKED:
            return f"compressed, and {count} bytes unpacked: at most {UNPACKED} are"

        def content(first: int, last: int) -> bytes:
            whole = self._kept.get(member, lambda: self._unpack(member, start, count))
            return bytes(memoryview(whole)[first:last])

        return _view(name, stored, shape, fortran, content)

    def _unpack(self, member: str, start: int, count: int) -> Buffer:
        """The array's bytes; one byte more is asked for, so that the member's CRC is checked."""
        try:
            with self._open() as opened, opened.open(member) as stream:
                stream.read(start)
                content = stream.read(count + 1)
        except CastoreError:
            raise
        except Exception as e:
            raise FormatError(f"{self._where}: {member!r} cannot be unpacked: {e}") from e
        if len(content) != count:
            more = "more" if len(content) > count else f"{len(content)}"
            raise FormatError(f"{self._where}: {member!r}: {count} bytes expected, found {more}")
        return content

    @contextmanager
    def _open(self) -> Iterator[zipfile.ZipFile]:
        """The archive; `zipfile` calls an outage a bad zip file, so what was met is raised."""
        raw = _Raw(self._read, self._size)
        try:
            with zipfile.ZipFile(io.BufferedReader(raw, 1 << 16)) as opened:
                yield opened
        except Exception:
            if raw.met is not None:
                raise raw.met from None
            raise


def _npy_header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f".npy version {version}")


def _view(
    name: str, stored: np.dtype[Any], shape: tuple[int, ...], fortran: bool, read: Read
) -> View | str:
    if stored.kind not in "biufc" or stored.newbyteorder("=").name not in ITEMSIZE:
        return f"an array of {stored}"
    strides = tuple(reversed(row_major(shape[::-1]))) if fortran else row_major(shape)
    dtype = numpy_dtype(stored.newbyteorder("=").name)
    return View(name, dtype, stored, shape, strides, read)


class _Raw(io.RawIOBase):
    """A committed file as `zipfile` wants it."""

    def __init__(self, read: Read, size: int):
        super().__init__()
        self._read, self._size, self._at = read, size, 0
        self.met: Exception | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("a seek before the start")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._read(self._at, self._at + len(buffer))
        except Exception as e:
            self.met = e
            raise
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
