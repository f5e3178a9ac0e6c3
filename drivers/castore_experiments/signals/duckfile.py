"""DuckDB files of others: read from a copy, never opened, locked or changed where they are.

A file that another process writes is copied until a copy is whole; a write-ahead file that cannot
be replayed costs its rows, not the database; a newer or damaged file is an error that says so.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castore import BackendError, CorruptObjectError, FormatError

if TYPE_CHECKING:
    import duckdb

_TRIES = 20
_PAUSE = 0.25
_MAGIC_AT, _VERSION_AT, _LIBRARY_AT = 8, 12, 52
_FLUSH = b"\x64\x00\x64"  # field 100, type 100: a transaction ends
_LOCKED = re.compile(r"POSIX\s+ADVISORY\s+WRITE\s+(\d+)\s+(\w+):(\w+):(\d+)\s")
_SAFE: dict[str, Any] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
}


@dataclass(frozen=True, slots=True)
class Header:
    """The storage version of a file, and the version of the DuckDB that wrote it."""

    version: int
    library: str


@dataclass(slots=True)
class Opened:
    """A connection to a copy, and what could not be read of the original."""

    connection: duckdb.DuckDBPyConnection
    warnings: list[str]


def wal_of(path: Path) -> Path:
    """The write-ahead file of a database."""
    return path.with_name(path.name + ".wal")


def read_header(path: Path) -> Header:
    """The header of a database file; `FormatError` for a file of another kind."""
    try:
        with path.open("rb") as f:
            data = f.read(4096)
    except OSError as e:
        raise BackendError(f"{path} cannot be read: {e.strerror}") from e
    if data[_MAGIC_AT:_VERSION_AT] != b"DUCK" or len(data) < 128:
        raise FormatError(f"{path} is no DuckDB file: set it aside")
    (version,) = struct.unpack_from("<Q", data, _VERSION_AT)
    library = data[_LIBRARY_AT : _LIBRARY_AT + 32].rstrip(b"\0").decode("ascii", "replace")
    return Header(version, library or "an unnamed version")


def writer_of(path: Path) -> int | None:
    """The process that holds ``path`` open for writing, or None (where /proc/locks can tell)."""
    try:
        info = os.stat(path)
        lines = Path("/proc/locks").read_text()
    except OSError:
        return None
    for pid, major, minor, inode in _LOCKED.findall(lines):
        device = os.makedev(int(major, 16), int(minor, 16))
        if int(inode) == info.st_ino and device == info.st_dev:
            return int(pid)
    return None


@contextmanager
def opened(path: Path) -> Iterator[Opened]:
    """A connection to a copy of ``path`` and its write-ahead file; both go afterwards.

    Raises
    ------
    FormatError
        No DuckDB file, or one that a newer DuckDB wrote: names both versions.
    CorruptObjectError
        Damaged.
    BackendError
        It cannot be read, or changed each time it was copied.
    """
    with tempfile.TemporaryDirectory(prefix="castore-") as folder:
        copy = Path(folder) / "copy.duckdb"
        for last in (False,) * (_TRIES - 1) + (True,):
            moving = not _copied(path, copy)
            try:
                found = _open(path, copy)
                break
            except CorruptObjectError:
                if not moving and writer_of(path) is None:
                    raise
                if last:
                    raise BackendError(
                        f"{path} changed each time it was copied (process {writer_of(path)} writes"
                        " it): try again when that rests"
                    ) from None
                time.sleep(_PAUSE)
        try:
            yield found
        finally:
            found.connection.close()


def unreplayed(data: bytes) -> int:
    """How many bytes at the end of a write-ahead file belong to no whole transaction.

    After a header that ends in FF FF each entry is its length and checksum (u64 each, little
    endian) and a payload; DuckDB leaves out what follows the last transaction's end.
    """
    start = data.find(b"\xff\xff", 0, 256) + 2
    at = whole = start if start > 1 else 0
    while start > 1 and at + 16 <= len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        if size == 0 or at + 16 + size > len(data):
            break
        ends = data.startswith(_FLUSH, at + 16)
        at += 16 + size
        whole = at if ends else whole
    return len(data) - whole


def _copied(path: Path, copy: Path) -> bool:
    """Copy a database and its write-ahead file; whether neither changed meanwhile."""
    wal, wal_copy = wal_of(path), wal_of(copy)
    before = _identity(path), _identity(wal)
    try:
        wal_copy.unlink(missing_ok=True)
        shutil.copyfile(path, copy)
        with suppress(FileNotFoundError):
            shutil.copyfile(wal, wal_copy)
    except OSError as e:
        raise BackendError(f"{path} cannot be copied for reading: {e.strerror}") from e
    return (_identity(path), _identity(wal)) == before


def _identity(path: Path) -> tuple[int, ...]:
    try:
        info = os.stat(path)
    except FileNotFoundError:
        return ()
    return (info.st_ino, info.st_size, info.st_mtime_ns)


def _open(path: Path, copy: Path) -> Opened:
    import duckdb

    header, wal, warnings = read_header(path), wal_of(copy), []
    if wal.exists():
        lost = unreplayed(wal.read_bytes())
        if lost:
            warnings.append(
                f"{wal_of(path)}: its last {lost} bytes hold no whole transaction (its writer was"
                " killed): rows there are lost"
            )
    try:
        return Opened(duckdb.connect(str(copy), config=_SAFE), warnings)
    except duckdb.Error as e:
        if not wal.exists():
            raise _refused(path, header, e) from e
        reason = str(e).splitlines()[0]
    wal.unlink()
    warnings = [f"{wal_of(path)} cannot be replayed, its rows are lost: {reason}"]
    try:
        return Opened(duckdb.connect(str(copy), config=_SAFE), warnings)
    except duckdb.Error as e:
        raise _refused(path, header, e) from e


def _refused(path: Path, header: Header, error: Exception) -> FormatError | CorruptObjectError:
    import duckdb

    reason = str(error).splitlines()[0]
    if header.version > _newest_version():
        return FormatError(
            f"{path} is of DuckDB storage version {header.version}, written by DuckDB"
            f" {header.library}; the installed DuckDB {duckdb.__version__} cannot open it: upgrade"
            " duckdb"
        )
    return CorruptObjectError(
        f"{path} (written by DuckDB {header.library}, read with {duckdb.__version__}) is damaged:"
        f" {reason}",
        name=str(path),
    )


def _newest_version() -> int:
    """The storage version that the installed DuckDB writes at its newest."""
    import duckdb

    with tempfile.TemporaryDirectory(prefix="castore-") as folder:
        path = Path(folder) / "newest.duckdb"
        with duckdb.connect() as connection:
            connection.execute(f"ATTACH '{path}' AS newest (STORAGE_VERSION 'latest')")
            connection.execute("CREATE TABLE newest.t (a INTEGER)")
            connection.execute("DETACH newest")
        return read_header(path).version
