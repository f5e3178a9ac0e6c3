"""Trajectories in ``.npz`` files: written without pickle, read without trusting the file.

One array ``trace_<seed>`` a validation seed, so episodes may differ in length.
"""

from __future__ import annotations

import io
import math
import re
import zipfile
from collections.abc import Mapping

import numpy as np

from castore import FormatError, InvalidInputError
from castore_receipts.arrays import Array

MAX_TRACES = 1 << 29
"""Bytes, unpacked, of the largest file that is read."""

MAX_MEMBERS = 100_000
_PIECE = 1 << 20
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""What NumPy writes. Other methods allocate by numbers in the file (LZMA: up to 4 GiB)."""

_NAME = re.compile(r"trace_(-?[0-9]{1,20})")
_EPOCH = (1980, 1, 1, 0, 0, 0)


def trace_name(seed: int) -> str:
    return f"trace_{seed}"


def seed_of(name: str) -> int | None:
    """The seed in a trace's name, or None for another array."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def write_npz(arrays: Mapping[str, Array]) -> bytes:
    """An ``.npz``, the same bytes for the same arrays.

    Members are stored as they are: a repository packs numbers better than deflate does.

    Raises
    ------
    InvalidInputError
        An array of Python objects (a ragged or mixed list): its name, and what to do.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", _EPOCH), _npy(name, array))
    return buffer.getvalue()


def _npy(name: str, array: Array) -> bytes:
    whole = np.asarray(array)
    if whole.dtype.hasobject:
        raise InvalidInputError(
            f"{name} is an array of Python objects (a ragged list, or None in it?): a trace is one"
            " array of numbers; give each episode its own"
        )
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(whole), allow_pickle=False)
    return buffer.getvalue()


def read_npz(data: bytes, where: str) -> dict[str, Array]:
    """The arrays of an ``.npz``; memory grows only with bytes that are really there.

    Raises
    ------
    FormatError
        Not such a file, damaged, too large, or an array of Python objects (never unpickled).
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _members(archive, where)
    except FormatError:
        raise
    except Exception as e:  # NumPy parses a header as Python, with all that may go wrong there
        raise FormatError(f"{where}: not a sound .npz file: {str(e)[:200]}") from e


def _members(archive: zipfile.ZipFile, where: str) -> dict[str, Array]:
    infos = archive.infolist()
    if len(infos) > MAX_MEMBERS:
        raise FormatError(f"{where}: {len(infos)} members, at most {MAX_MEMBERS} are read")
    found: dict[str, Array] = {}
    left = MAX_TRACES
    for info in infos:
        name = info.filename.removesuffix(".npy")
        if not info.filename.endswith(".npy") or name in found:
            raise FormatError(f"{where}: member {info.filename[:80]!r} is no array, or there twice")
        if info.compress_type not in _METHODS:
            raise FormatError(
                f"{where}: member {info.filename[:80]!r}: compression {info.compress_type} is not"
                " read, only stored and deflated members are"
            )
        with archive.open(info) as stream:
            array = _read_array(stream, f"{where}: {name[:80]}", left)
        left -= array.nbytes
        found[name] = array
    return found


def _read_array(stream: object, where: str, left: int) -> Array:
    assert isinstance(stream, zipfile.ZipExtFile)
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise FormatError(f"{where}: .npy version {version} is not read")
    header = np.lib.format.read_array_header_1_0
    if version == (2, 0):
        header = np.lib.format.read_array_header_2_0
    shape, fortran, dtype = header(stream)
    if dtype.hasobject or dtype.kind not in "fiubc":
        raise FormatError(f"{where}: dtype {dtype} is not read (Python objects never are)")
    size = math.prod(shape) * dtype.itemsize
    if size > left:
        raise FormatError(f"{where}: {size} bytes, at most {MAX_TRACES} in a file are read")
    content = _read_all(stream, size)
    if len(content) != size:
        raise FormatError(f"{where}: shape {shape} takes {size} bytes, found {len(content)}")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


def _read_all(stream: zipfile.ZipExtFile, size: int) -> bytes:
    """The rest of a member, at most one byte more than ``size``; its CRC is checked at the end."""
    parts: list[bytes] = []
    count = 0
    while count <= size:
        part = stream.read(min(_PIECE, size + 1 - count))
        if not part:
            break
        parts.append(part)
        count += len(part)
    return b"".join(parts)
