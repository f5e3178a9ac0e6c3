"""The local write-ahead file: the last second of a writer, until it is in the repository.

``<folder>/<writer>/lock`` is held by the live writer; ``<folder>/<writer>/<n>.wal`` are records,
each of one of the tables or a list of runs, which also says whose they are and begins each file:

    magic "CSWL" | kind u8 | 3 zero bytes | length u64 | checksum u64 | payload

little-endian; the checksum is XXH3-64 of what precedes it and the payload.
The payload is an Arrow IPC stream, or JSON for runs. A record that was not written whole ends the
file: everything before it counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from castore import BackendError, FormatError
from castore_experiments.signals.lock import WriterLock
from castore_experiments.signals.run import Run
from castore_experiments.signals.schema import TABLES, arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa

_HEAD = struct.Struct("<4sB3xQ")
_SUM = struct.Struct("<Q")
_MAGIC = b"CSWL"
_FILE = re.compile(r"[0-9]{6,}\.wal")
_WRITER = re.compile(r"[0-9a-f]{16}")
_KINDS = ("runs", *TABLES)
_TRIES, _TRIES_OF_FRESH = 50, 3000  # every fiftieth of a second


class Wal:
    """A live writer's files. Not safe for threads: the caller holds its lock.

    Raises
    ------
    BackendError
        The folder cannot be made, or is another live writer's.
    """

    def __init__(self, folder: Path, writer: str, owner: Owner):
        self.home, self._owner = folder / writer, owner
        self._lock, self._fd, self._end = _own(self.home), -1, 0
        self._number = max((int(p.stem) for p in files(self.home)), default=0)

    def append(self, records: Sequence[tuple[str, bytes]]) -> None:
        """Write records, durable on return; all of them or none, `BackendError` if none."""
        try:
            if self._fd < 0:
                self._open()
            data = b"".join(_record(kind, payload) for kind, payload in records)
            _write(self._fd, data, self._end)
            os.fdatasync(self._fd)
        except OSError as e:
            self._cut()
            raise BackendError(
                f"{self.home} cannot be written: {e.strerror}: the last rows are in memory only"
            ) from e
        self._end += len(data)

    def rotate(self) -> list[Path]:
        """Begin a new file with the next record; gives the ones before, for `remove`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        return files(self.home)

    def close(self, *, empty: bool) -> None:
        """Let go of the folder; with ``empty`` it goes too, since nothing in it is needed."""
        self.rotate()
        if empty:
            clear(self.home)
        self._lock.release()

    def _open(self) -> None:
        self._number += 1
        path = self.home / f"{self._number:06d}.wal"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        first = _record("runs", encode_runs(self._owner, {}))
        _write(self._fd, first, 0)
        self._end = len(first)
        sync_folder(self.home)
        sync_folder(self.home.parent)

    def _cut(self) -> None:
        """Take back what a failed write left; what cannot be taken back is no whole record."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose rows a file holds: a repository's id and a namespace."""

    repository: str
    namespace: str


@dataclass(slots=True)
class Contents:
    """What a writer's files hold. ``lost`` bytes at the end of a file were no whole record."""

    owner: Owner | None = None
    tables: dict[str, list[pa.Table]] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    lost: int = 0


def writers(folder: Path) -> list[str]:
    """The writers that have a folder below ``folder``, sorted; none if it does not exist."""
    try:
        return sorted(p.name for p in folder.iterdir() if _WRITER.fullmatch(p.name))
    except FileNotFoundError:
        return []
    except OSError as e:
        raise BackendError(f"{folder} cannot be read: {e.strerror}") from e


def files(home: Path) -> list[Path]:
    """A writer's files, oldest first."""
    try:
        found = [p for p in home.iterdir() if _FILE.fullmatch(p.name) and p.is_file()]
    except OSError as e:
        raise BackendError(f"{home} cannot be read: {e.strerror}") from e
    return sorted(found, key=lambda p: int(p.stem))


def read(home: Path) -> Contents:
    """Everything whole in a writer's files."""
    contents = Contents()
    for path in files(home):
        try:
            data = path.read_bytes()
        except OSError as e:
            raise BackendError(f"{path} cannot be read: {e.strerror}") from e
        _read_file(data, str(path), contents)
    return contents


def remove(paths: Sequence[Path]) -> None:
    """Delete files whose rows are in the repository."""
    try:
        for path in paths:
            path.unlink(missing_ok=True)
    except OSError as e:
        raise BackendError(f"{path} cannot be removed: {e.strerror}") from e


def clear(home: Path) -> None:
    """Delete a writer's folder; the caller holds its lock. What is not ours in it stays."""
    remove([*files(home), home / "lock"])
    with contextlib.suppress(OSError):
        home.rmdir()


def encode_table(rows: pa.Table) -> bytes:
    """Rows as an Arrow IPC stream."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    return bytes(sink.getvalue())


def encode_runs(owner: Owner, runs: Mapping[str, Run]) -> bytes:
    """Runs, and whose they are, as JSON."""
    return json.dumps(asdict(owner) | {"runs": [r.to_json() for r in runs.values()]}).encode()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _own(home: Path) -> WriterLock:
    """The lock of a writer's folder, made if missing.

    `recover` in another process may hold the new, empty folder, and take it away: for a moment, or
    for as long as that process is kept from running. Only a folder that was there before may be a
    live writer's, and is tried for a second.
    """
    fresh, tries = False, 0
    while tries < (_TRIES_OF_FRESH if fresh else _TRIES):
        fresh |= _make(home)
        lock = WriterLock.take(home / "lock")
        if lock is not None:
            return lock
        tries += 1
        time.sleep(0.02)
    raise BackendError(f"{home} belongs to a live writer: let each have its own")


def _make(home: Path) -> bool:
    """Whether the folder had to be made."""
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        home.mkdir()
    except FileExistsError:
        return False
    except OSError as e:
        raise BackendError(f"{home} cannot be made: {e.strerror}") from e
    return True


def _record(kind: str, payload: bytes) -> bytes:
    head = _HEAD.pack(_MAGIC, _KINDS.index(kind), len(payload))
    return head + _SUM.pack(_checksum(head, payload)) + payload


def _checksum(head: bytes, payload: bytes) -> int:
    sum = xxhash.xxh3_64(head)
    sum.update(payload)
    return sum.intdigest()


def _write(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done


def _read_file(data: bytes, where: str, into: Contents) -> None:
    at, start = 0, _HEAD.size + _SUM.size
    while at < len(data):
        head = data[at : at + _HEAD.size]
        if len(data) - at < start:
            break
        magic, kind, length = _HEAD.unpack(head)
        payload = data[at + start : at + start + length]
        (expected,) = _SUM.unpack(data[at + _HEAD.size : at + start])
        if magic != _MAGIC or len(payload) != length or expected != _checksum(head, payload):
            break
        _take(kind, payload, where, into)
        at += start + length
    into.lost += len(data) - at


def _take(kind: int, payload: bytes, where: str, into: Contents) -> None:
    import pyarrow as pa

    if kind >= len(_KINDS):
        raise FormatError(
            f"{where}: a record of kind {kind} is of a newer castore: upgrade castore"
        )
    name = _KINDS[kind]
    try:
        if name == "runs":
            body = json.loads(payload)
            into.owner = Owner(body["repository"], body["namespace"])
            into.runs.update({r["id"]: Run.from_json(r, where) for r in body["runs"]})
        else:
            rows = pa.ipc.open_stream(payload).read_all().cast(arrow_schema(name))
            into.tables.setdefault(name, []).append(rows)
    except (pa.ArrowException, ValueError, KeyError, TypeError) as e:
        raise FormatError(f"{where}: a record of {name} cannot be read: {e}") from e
