"""Any other fsspec file system: exact for ``memory://``, single-writer for the rest.

fsspec promises neither an exclusive create nor a compare-and-swap, so for an unknown protocol
`probe` says no, and whoever writes must be alone. In memory one lock per store makes both exact.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import os
import re
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any

from castore.backend import MAX_REPLACE, MISSING, ExpiredError, Stat, check_name
from castore.backends._rules import refuse_large, scrub, secrets_in, span, without_secrets
from castore.backends._thread_lock import Store, store_of
from castore.digest import Buffer
from castore.errors import (
    AlreadyExistsError,
    BackendError,
    CastoreError,
    ObjectNotFoundError,
)

_TIMES = ("mtime", "modified", "LastModified", "last_modified", "updated", "created")
_MARKS = ("size", "ETag", "etag", "md5", "md5Hash", "generation", "ino", *_TIMES)
_hashes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Digests of files in memory, which are made anew at each write."""

_BLOCK = 1 << 16  # bytes that a file opened for a part of it may read ahead
_LOGIN = re.compile(r"[^/@:]*:([^/@]+)@")  # at the start of a path: user, password


class FsspecBackend:
    """One fsspec file system below one path; see `castore.backend.Backend`.

    ``path`` and names are literal: nothing in them is a pattern.
    """

    parallel = 4

    def __init__(self, protocol: str, path: str, storage_options: dict[str, Any]):
        self.kind, self._raw, self._options = protocol, path, storage_options
        self._secrets = secrets_in(storage_options)
        if login := _LOGIN.match(path):
            self._secrets.append(login[1])
        self.url = scrub(f"{protocol}://{path}".rstrip("/"), self._secrets)
        self._made: dict[int, tuple[Any, str]] = {}

    def __repr__(self) -> str:
        return f"FsspecBackend({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return FsspecBackend, (self.kind, _LOGIN.sub("", self._raw), without_secrets(self._options))

    @property
    def _opened(self) -> tuple[Any, str]:
        """This process's file system and the path in it."""
        pid = os.getpid()
        if pid not in self._made:
            from fsspec.core import url_to_fs

            with self._told("open"):
                options = {"use_listings_cache": False, **self._options}
                fs, root = url_to_fs(f"{self.kind}://{self._raw}", **options)
                self._made.setdefault(pid, (fs, root.rstrip("/")))
        return self._made[pid]

    @property
    def _fs(self) -> Any:
        return self._opened[0]

    @property
    def _store(self) -> Store:
        return store_of(self._fs)

    def _full(self, name: str) -> str:
        root = self._opened[1]
        return f"{root}/{name}" if name else root

    # -- reading

    def get(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        check_name(name)
        first, last = span(start, stop)
        with self._told("read"):
            try:
                if self.kind == "memory":
                    return bytes(self._fs.cat_file(self._full(name), first, last))
                if last is not None:
                    return self._part(self._full(name), first, last)
                return bytes(self._fs.cat_file(self._full(name)))[first:]
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                raise ObjectNotFoundError(f"{self.url}/{name} does not exist") from None

    def _part(self, path: str, first: int, last: int) -> bytes:
        """Bytes ``[first, last)``; little more is fetched, however long the file is.

        Not by `cat_file`, whose ranges beyond a file's end some servers take for an error.
        """
        with self._fs.open(path, "rb", block_size=_BLOCK) as file:
            if first:
                file.seek(first)
            parts, missing = [], last - first
            while missing > 0 and (part := file.read(missing)):
                parts.append(part)
                missing -= len(part)
        return b"".join(parts)

    def get_versioned(self, name: str) -> tuple[bytes, str]:
        with self._store.writing:
            return self.get(name), self.stat(name).version

    def stat(self, name: str) -> Stat:
        check_name(name)
        with self._store.writing, self._told("read"):
            try:
                info = self._fs.info(self._full(name))
            except (FileNotFoundError, NotADirectoryError):
                info = {"type": "directory"}
            if info["type"] == "directory":
                raise ObjectNotFoundError(f"{self.url}/{name} does not exist")
            return self._stat(name, info)

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> Iterator[Stat]:
        if prefix:
            check_name(prefix)
        skip = len(self._full("")) + 1
        with self._told("list"):
            root = self._full(prefix)
            try:
                found = self._fs.find(root, detail=True) if self._fs.isdir(root or "/") else {}
            except FileNotFoundError:
                found = {}
        infos = sorted((path[skip:], info) for path, info in found.items())
        wanted = [
            (n, i)
            for n, i in infos
            if (after is None or n > after) and (prefix or not n.startswith("tmp/"))
        ]
        for name, info in wanted[:limit]:
            with contextlib.suppress(KeyError):  # vanished from memory meanwhile
                yield self._stat(name, info)

    def folders(self, prefix: str) -> builtins.list[str]:
        skip = len(prefix) + 1 if prefix else 0
        names = (s.name[skip:] for s in self.list(prefix))
        return sorted({n.partition("/")[0] for n in names if "/" in n})

    def now(self) -> float:
        return time.time()

    # -- writing

    def create(self, name: str, data: Buffer) -> str:
        check_name(name)
        refuse_large(name, data)
        with self._store.writing, self._told("write"):
            if self._fs.exists(self._full(name)):
                raise AlreadyExistsError(f"{self.url}/{name} exists already")
            return self._put(name, data)

    def create_many(self, items: Sequence[tuple[str, Buffer]]) -> builtins.list[str | None]:
        result: builtins.list[str | None] = []
        for name, data in items:
            try:
                result.append(self.create(name, data))
            except AlreadyExistsError:
                result.append(None)
        return result

    def write_many(
        self, items: Sequence[tuple[str, Sequence[Buffer]]]
    ) -> builtins.list[str | None]:
        return self.create_many([(name, b"".join(parts)) for name, parts in items])

    def sync(self, names: Iterable[str]) -> None:
        """Nothing to sync."""

    def replace(self, name: str, data: Buffer, if_version: str) -> str:
        check_name(name)
        refuse_large(name, data, limit=MAX_REPLACE)
        with self._store.writing, self._told("write"):
            try:
                current = self.stat(name).version
            except ObjectNotFoundError:
                current = MISSING
            if current != if_version:
                raise AlreadyExistsError(f"{self.url}/{name} was changed by another writer")
            return self._put(name, data)

    def delete(self, name: str, expires: float | None = None) -> None:
        check_name(name)
        if expires is not None and self.now() > expires:
            raise ExpiredError(f"{self.url}/{name}: not deleted, its time is over")
        with self._store.writing, self._told("delete"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._full(name))

    def delete_many(
        self, names: Sequence[str], expires: float | None = None
    ) -> builtins.list[BaseException | None]:
        outcomes: builtins.list[BaseException | None] = []
        for name in names:
            try:
                self.delete(name, expires)
                outcomes.append(None)
            except BackendError as e:
                outcomes.append(e)
        return outcomes

    def lock(self, *, exclusive: bool, timeout: float) -> AbstractContextManager[None]:
        if self.kind != "memory":
            return contextlib.nullcontext()
        return self._store.lock_for(self._full("")).hold(self.url, exclusive, timeout)

    def probe(self) -> bool:
        return self.kind == "memory"

    def prepare(self, *, shared: bool) -> None:
        with self._told("make"):
            self._fs.makedirs(self._full(""), exist_ok=True)

    # -- within

    def _put(self, name: str, data: Buffer) -> str:
        full = self._full(name)
        self._fs.makedirs(full.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(full, bytes(data))
        return self.stat(name).version

    def _stat(self, name: str, info: dict[str, Any]) -> Stat:
        if self.kind == "memory":
            file = self._fs.store[self._full(name)]
            if file not in _hashes:
                _hashes[file] = hashlib.sha256(file.getbuffer()).hexdigest()
            return Stat(name, file.size, file.modified.timestamp(), _hashes[file])
        marks = [(k, str(info[k])) for k in _MARKS if info.get(k) is not None]
        version = hashlib.sha256(repr(marks).encode()).hexdigest()
        times = [info[k] for k in _TIMES if info.get(k) is not None]
        return Stat(name, info["size"] or 0, _seconds(times[0] if times else 0.0), version)

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except CastoreError:
            raise
        except Exception as e:
            text = scrub(f"{type(e).__name__}: {e}", self._secrets)
            raise BackendError(f"{self.url}: could not {what}: {text}") from e


def _seconds(time_of: Any) -> float:
    if isinstance(time_of, datetime):
        return time_of.timestamp()
    try:
        return float(time_of)
    except (TypeError, ValueError):
        with contextlib.suppress(ValueError):
            return datetime.fromisoformat(str(time_of)).timestamp()
        return 0.0
