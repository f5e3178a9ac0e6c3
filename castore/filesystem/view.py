"""The fsspec file system ``castore``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from fsspec.callbacks import DEFAULT_CALLBACK

from castore.backends import without_secrets
from castore.errors import CastoreError, InvalidInputError
from castore.filesystem.content import Content, Made
from castore.filesystem.download import beside, copy_into
from castore.filesystem.file import CastoreFile
from castore.filesystem.finding import Finding
from castore.filesystem.infos import Info
from castore.filesystem.lookup import Lookup
from castore.filesystem.readonly import refuse
from castore.ranges import Extent, Piece
from castore.repository import Repository
from castore.tree import File, Link

CACHE = 256 << 20
"""Bytes of decoded blobs that one file system keeps, unless told otherwise."""


class CastoreFileSystem(Finding):
    """The snapshots of a repository as files; see `castore.filesystem` for the paths.

    Namespaces, ``latest``, labels and layouts are looked up at each call; an open file stays what
    it was. A path that is not there is `FileNotFoundError`; what a repository raises (damage, a
    lost object, an outage) is raised as it is and never taken for "not there". Safe for many
    threads, after ``fork``, and pickled, without secrets: the environment stands in for them.

    Parameters
    ----------
    repository : str or path, optional
        URL of the repository; without it ``CASTORE_REPOSITORY``, as it is at each call.
    repository_options : dict, optional
        Options of the file system the repository lies on, as ``storage_options`` of
        `Repository.open`.
    cache_bytes : int
        How many bytes of decoded blobs are kept; the last blob is kept in any case.
    storage_options
        fsspec's own.
    """

    protocol = "castore"
    root_marker = ""

    def __init__(
        self,
        repository: str | os.PathLike[str] | None = None,
        repository_options: dict[str, Any] | None = None,
        cache_bytes: int = CACHE,
        **storage_options: Any,
    ):
        super().__init__(**storage_options)
        self._url = None if repository is None else os.fspath(repository)
        self._options, self._cache_bytes = repository_options, cache_bytes
        self._given: Repository | None = None
        self._live: tuple[tuple[int, str], Lookup] | None = None

    @staticmethod
    def of(repository: Repository, cache_bytes: int = CACHE) -> CastoreFileSystem:
        """The view of a repository that is open; with its client, and a cache of its own."""
        fs = CastoreFileSystem(repository.url, cache_bytes=cache_bytes, skip_instance_cache=True)
        fs._given = repository
        return fs

    def __reduce__(self) -> tuple[Any, ...]:
        if self._given is not None:
            return CastoreFileSystem.of, (self._given, self._cache_bytes)
        url = without_secrets(self._url)
        return CastoreFileSystem, (url, without_secrets(self._options), self._cache_bytes)

    def to_dict(self, *, include_password: bool = False) -> dict[str, Any]:
        """As fsspec has it; without secrets, whatever is asked for."""
        plain: dict[str, Any] = without_secrets(super().to_dict(include_password=False))
        return plain

    @property
    def fsid(self) -> str:
        """The repository's id."""
        return f"castore-{self._lookup.repository.id}"

    @property
    def _lookup(self) -> Lookup:
        """This process's access to the repository as it is named now."""
        url = self._url or os.environ.get("CASTORE_REPOSITORY")
        if not url:
            raise InvalidInputError(
                "castore:// needs a repository: give repository=URL (pandas and others:"
                " storage_options={'repository': URL}), or set CASTORE_REPOSITORY"
            )
        key = os.getpid(), url
        live = self._live
        if live is None or live[0] != key:
            repository = self._given or Repository.open(url, storage_options=self._options)
            live = self._live = key, Lookup(repository, self._cache_bytes)
        return live[1]

    @property
    def cached(self) -> int:
        """Bytes of decoded blobs that are kept now."""
        return self._lookup.blobs.cache.weight

    def read_extent(self, extent: Extent, start: int, stop: int) -> bytes:
        """Bytes of a file that was looked up before; what open files use."""
        return self._lookup.blobs.read(extent, start, stop)

    # -- reading

    def _file(self, path: str) -> tuple[Content, Info]:
        """What a file holds, and what is said of it."""
        place, inner, real = self._look(path)
        found = self._content(place, real)
        if found is None:
            raise IsADirectoryError(
                f"castore://{place.name(inner)} is a folder, or a link that leads to no file of its"
                " snapshot"
            )
        return found[0], self._describe(place, inner, real)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        cache_type: str = "none",
        **_: Any,
    ) -> CastoreFile:
        if mode != "rb":
            refuse(path)
        content, info = self._file(path)
        return CastoreFile(self, path, content, info, block_size, cache_type, cache_options)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """Bytes ``[start, end)`` of a file; negative bounds count from its end."""
        content, _info = self._file(path)
        first, last = _bounds(content.size, start, end)
        if isinstance(content, Made):
            return content.data[first:last]
        return self.read_extent(Extent.of(content), first, last)

    def cat_ranges(
        self,
        paths: Sequence[str],
        starts: Sequence[int | None] | int | None,
        ends: Sequence[int | None] | int | None,
        max_gap: int | None = None,
        on_error: str = "return",
        **_: Any,
    ) -> list[bytes | Exception]:
        """Many ranges at once: each path is looked up once, each blob fetched once, in parallel.

        With ``on_error="return"`` an error stands in the place of the range that met it.
        """
        if max_gap is not None:
            raise NotImplementedError("max_gap: blobs are fetched whole, gaps cost nothing")
        first = _each(starts, len(paths))
        last = _each(ends, len(paths))
        found: dict[str, Content | Extent | Exception] = {}
        for path in dict.fromkeys(paths):
            found[path] = self._prepared(path)
        pieces = [_pieces(found[p], a, b) for p, a, b in zip(paths, first, last, strict=True)]
        read = self._lookup.blobs.read_many(pieces)
        out: list[bytes | Exception] = [
            _whole(found[p], a, b, r) for p, a, b, r in zip(paths, first, last, read, strict=True)
        ]
        errors = [r for r in out if isinstance(r, Exception)]
        if errors and on_error != "return":
            raise errors[0]
        return out

    def _prepared(self, path: str) -> Content | Extent | Exception:
        try:
            content, _ = self._file(path)
        except (OSError, CastoreError) as e:
            return e
        return Extent.of(content) if isinstance(content, File) else content

    def get_file(
        self,
        rpath: str,
        lpath: Any,
        callback: Any = DEFAULT_CALLBACK,
        outfile: Any = None,
        **_: Any,
    ) -> None:
        """One path to the local disk, there whole or not at all: a link to no file as a link."""
        place, inner, real = self._look(rpath)
        found = self._content(place, real)
        if found is not None:
            file = CastoreFile(
                self, place.name(inner), found[0], self._describe(place, inner, real)
            )
            if outfile is not None or not isinstance(lpath, str | os.PathLike):
                copy_into(file, lpath if outfile is None else outfile, callback)
                return
            with beside(os.fspath(lpath)) as part, open(part, "wb") as out:
                copy_into(file, out, callback)
            return
        entry = place.entries.get(inner)
        if isinstance(entry, Link):
            with beside(os.fspath(lpath)) as part:
                os.symlink(entry.target, part)
        else:
            os.makedirs(lpath, exist_ok=True)


def _bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


def _each(bounds: Sequence[int | None] | int | None, count: int) -> Sequence[int | None]:
    if bounds is None or isinstance(bounds, int):
        return [bounds] * count
    if len(bounds) != count:
        raise ValueError(f"{len(bounds)} bounds for {count} paths")
    return bounds


def _pieces(found: Content | Extent | Exception, start: int | None, end: int | None) -> list[Piece]:
    if not isinstance(found, Extent):
        return []
    return found.pieces(*_bounds(found.file.size, start, end))


def _whole(
    found: Content | Extent | Exception,
    start: int | None,
    end: int | None,
    read: bytes | CastoreError,
) -> bytes | Exception:
    if isinstance(found, Exception):
        return found
    if isinstance(found, Made):
        return found.data[slice(*_bounds(found.size, start, end))]
    return read
