"""A zarr store whose commit is a snapshot."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Self

from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from castore.errors import InvalidInputError, NotFoundError
from castore.repository import Repository
from castore.snapshot import SnapshotName
from castore.zarr_view import dtypes
from castore.zarr_view.keys import children, folder, span
from castore.zarr_view.staging import Staging
from castore.zarr_view.working import Working

_read: ContextVar[tuple[int, str, str] | None] = ContextVar("castore_zarr_read", default=None)
"""Of the task at hand: the working set and key of the value it read whole last, and its version.

zarr changes a part of a shard by reading it, and writing it, in one task.
"""


class SnapshotStore(Store):
    """A zarr store over a snapshot: reads are verified, writes are staged, a commit makes a
    snapshot in which every chunk is deduplicated.

    A key that was never written is None to zarr, hence the fill value. One that was and is lost
    or damaged in the repository raises `ObjectNotFoundError` or `CorruptObjectError`, always.

    Writes go to a local folder, so their memory is bounded, and they are visible through this
    store at once. `commit` adds them to the snapshot that the store stands on. If the namespace
    has a newer one by then it refuses, and names both: nothing is merged. A store with writes
    that nobody commits leaves no trace.

    A shard that somebody else wrote after it was read to be changed is not written over:
    `AlreadyExistsError`, and the part is to be written again.

    Parameters
    ----------
    repository : Repository
    namespace : str
        Where commits go. One of its own for each dataset.
    snapshot : SnapshotName or str, optional
        What to stand on; one of another namespace starts a branch. Default: what ``staging`` was
        begun upon, else the newest of the namespace, else an empty store, which ``""`` asks for.
    path : str
        The folder of the snapshot that is the store's root; the rest of it is kept.
    staging : path, optional
        A local folder that outlives the store: processes of one machine that are given it write
        to one commit, and so does a program that was killed and starts again. Default: a folder
        of the store's own that goes with it; such a store can only be pickled to read.
    read_only : bool

    Raises
    ------
    SnapshotNotFoundError, NotFoundError
        No such snapshot; or, to read only, no such folder in it.
    InvalidInputError
        The staging folder holds writes upon something else.
    """

    supports_writes = True
    supports_deletes = True
    supports_listing = True

    def __init__(
        self,
        repository: Repository,
        namespace: str = "main",
        *,
        snapshot: SnapshotName | str | None = None,
        path: str = "",
        staging: str | os.PathLike[str] | None = None,
        read_only: bool = False,
    ):
        super().__init__(read_only=read_only)
        dtypes.register()
        self._working = Working(repository, namespace, snapshot, path.strip("/"), Staging(staging))
        if read_only and path and self.snapshot is not None and not self._working.keys():
            raise NotFoundError(f"there is nothing below {path!r} in {self.snapshot}")

    @property
    def repository(self) -> Repository:
        return self._working.repository

    @property
    def snapshot(self) -> SnapshotName | None:
        """The snapshot the store stands on; None for one that began empty."""
        return self._working.base.name

    def commit(self, labels: Mapping[str, str] | None = None) -> SnapshotName:
        """Make a snapshot of the store as it is, durable on return, and stand on it.

        Nobody may write to the store meanwhile: what comes too late stays staged.

        Raises
        ------
        AlreadyExistsError
            The namespace has a newer snapshot: nothing was committed, the writes stay staged.
        InvalidInputError
            Two keys that are one name where case is ignored, or one within the other.
        """
        self._check_writable()
        return self._working.commit(labels or {})

    def discard(self) -> None:
        """Forget what is staged."""
        self._check_writable()
        self._working.staging.clear()

    def with_read_only(self, read_only: bool = False) -> Self:
        """Another view of this store, of what is staged too."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)  # not copy.copy: that asks what a pickle asks
        other._read_only, other._is_open = read_only, False
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        staging, working = self._working.staging, self._working
        if not staging.shared and (not self.read_only or staging.base() is not None):
            raise InvalidInputError(
                "a store that stages in a folder of its own cannot be sent to another process:"
                " what that one writes would be lost; give it staging=FOLDER, or read_only=True"
            )
        if not self.read_only:
            working.claim()
        base = self.snapshot if self.snapshot is not None else ""
        where = staging.folder if staging.shared else None
        place = (working.repository, working.namespace, base, working.path)
        return _opened, (*place, where, self.read_only)

    def __str__(self) -> str:
        place = f"{self._working.namespace}/{self._working.path}".rstrip("/")
        return f"castore-zarr://{self.repository.url}#{place}"

    def __repr__(self) -> str:
        return f"SnapshotStore({str(self)!r}, snapshot={str(self.snapshot)!r})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, SnapshotStore)
            and self.read_only == other.read_only
            and (self._working is other._working or self._working.same(other._working))
        )

    __hash__ = None  # type: ignore[assignment]

    # -- reading

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """A value or a range of it, verified; None for a key that was never written.

        Raises
        ------
        ObjectNotFoundError, CorruptObjectError
            It was written, and the repository has lost or damaged it.
        """
        if byte_range is not None or self.read_only:
            return await asyncio.to_thread(
                self.get_sync, key, prototype=prototype, byte_range=byte_range
            )

        def versioned() -> tuple[str, Buffer | None]:
            # Before the value: a change in between is then noticed once too often, never missed.
            return self._working.version(key), self.get_sync(key, prototype=prototype)

        version, value = await asyncio.to_thread(versioned)
        _read.set((id(self._working), key, version))
        return value

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """As `get`."""
        self._is_open = True
        found = self._working.read(key, lambda size: span(byte_range, size))
        if found is None:
            return None
        return (prototype or default_buffer_prototype()).buffer.from_bytes(found)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return list(await asyncio.gather(*(self.get(k, prototype, r) for k, r in key_ranges)))

    async def exists(self, key: str) -> bool:
        return await asyncio.to_thread(self._working.size, key) is not None

    async def getsize(self, key: str) -> int:
        size = await asyncio.to_thread(self._working.size, key)
        if size is None:
            raise FileNotFoundError(key)
        return size

    # -- writing

    async def set(self, key: str, value: Buffer) -> None:
        """Stage a value.

        Raises
        ------
        AlreadyExistsError
            This task has just read the value whole, and somebody wrote it since.
        InvalidInputError
            No snapshot can hold a file of this name; or the staging folder was committed by
            another store, or holds writes upon something else.
        BackendError
            The staging folder cannot be written.
        """
        data = self._given(value)
        await asyncio.to_thread(self._working.write, key, data, replaces=self._taken(key))

    def set_sync(self, key: str, value: Buffer) -> None:
        """As `set`."""
        self._working.write(key, self._given(value))

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """Stage a value where there is none; of several that try at once, one does."""
        data = self._given(value)
        await asyncio.to_thread(self._working.write, key, data, new=True)

    def _given(self, value: Buffer) -> bytes:
        self._check_writable()
        self._is_open = True
        if not isinstance(value, Buffer):
            raise TypeError(f"a value is a zarr Buffer, found a {type(value).__name__}")
        return value.to_bytes()

    async def delete(self, key: str) -> None:
        """Stage a deletion; earlier snapshots keep the value. A key that is not there will do."""
        self._check_writable()
        await asyncio.to_thread(self._working.delete, key, replaces=self._taken(key))

    def _taken(self, key: str) -> str | None:
        """The version that this task read of ``key``, once."""
        found = _read.get()
        if found is None or found[:2] != (id(self._working), key):
            return None
        _read.set(None)
        return found[2]

    def delete_sync(self, key: str) -> None:
        """As `delete`."""
        self._check_writable()
        self._working.delete(key)

    async def delete_dir(self, prefix: str) -> None:
        self._check_writable()
        await asyncio.to_thread(self._delete_all, folder(prefix))

    def _delete_all(self, prefix: str) -> None:
        for key in self._working.keys(prefix):
            self._working.delete(key)

    # -- listing

    async def list(self) -> AsyncIterator[str]:
        for key in await asyncio.to_thread(self._working.keys):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for key in await asyncio.to_thread(self._working.keys, prefix):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        keys = await asyncio.to_thread(self._working.keys, folder(prefix))
        for name in children(keys, prefix):
            yield name


def _opened(
    repository: Repository,
    namespace: str,
    snapshot: SnapshotName | str,
    path: str,
    staging: str | os.PathLike[str] | None,
    read_only: bool,
) -> SnapshotStore:
    return SnapshotStore(
        repository,
        namespace,
        snapshot=snapshot,
        path=path,
        staging=staging,
        read_only=read_only,
    )
