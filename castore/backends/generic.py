"""Any other fsspec file system: exact for ``memory://``, single-writer for the rest.

fsspec promises neither an exclusive create nor a compare-and-swap, so for an unknown protocol
`probe` says no, and whoever writes must be alone.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any

from castore.backend import MAX_OBJECT, MISSING, ExpiredError, Stat, check_name
from castore.digest import Buffer
from castore.errors import (
    AlreadyExistsError,
    BackendError,
    CastoreError,
    InvalidInputError,
    ObjectNotFoundError,
)

_writes: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
_versions: dict[str, tuple[int, float]] = {}
"""Of the memory file system, which keeps neither: a count of writes, and when the last one was."""
_count = iter(range(1, 1 << 62))


class FsspecBackend:
    """One fsspec file system below one path; see `castore.backend.Backend`."""

    parallel = 4

    def __init__(self, protocol: str, path: str, storage_options: dict[str, Any]):
        self.kind = protocol
        self._path = path.strip("/")
        self._options = storage_options
        self.url = f"{protocol}://{self._path}"
        self._made: Any = None

    def __repr__(self) -> str:
        return f"FsspecBackend({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return FsspecBackend, (self.kind, self._path, {})

    @property
    def _fs(self) -> Any:
        if self._made is None:
            import fsspec

            with self._told("open"):
                self._made = fsspec.filesystem(self.kind, use_listings_cache=False, **self._options)
        return self._made

    def _full(self, name: str) -> str:
        return (
            f"/{self._path}/{name}".rstrip("/")
            if self.kind == "memory"
            else (f"{self._path}/{name}".rstrip("/"))
        )

    # -- reading

    def get(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        check_name(name)
        with self._told("read"):
            try:
                data: bytes = self._fs.cat_file(self._full(name))
            except (FileNotFoundError, IsADirectoryError):
                raise ObjectNotFoundError(f"{self.url}/{name} does not exist") from None
        return data[start or 0 : stop]

    def get_versioned(self, name: str) -> tuple[bytes, str]:
        with _writes[self.url]:
            data = self.get(name)
            return data, self._version(name, data)

    def stat(self, name: str) -> Stat:
        with _writes[self.url]:
            data = self.get(name)
            return Stat(name, len(data), self._modified(name), self._version(name, data))

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> Iterator[Stat]:
        if prefix:
            check_name(prefix)
        with self._told("list"):
            root = self._full(prefix)
            try:
                found = self._fs.find(root, detail=True) if self._fs.isdir(root) else {}
            except FileNotFoundError:
                found = {}
        cut = len(self._full("")) + 1
        infos = sorted(
            (path.strip("/")[cut - (self.kind == "memory") :], i) for path, i in found.items()
        )
        wanted = [
            (n, i)
            for n, i in infos
            if (after is None or n > after) and (prefix or not n.startswith("tmp/"))
        ]
        for name, info in wanted[:limit]:
            yield Stat(name, info["size"], self._modified(name), self._version(name, None))

    def folders(self, prefix: str) -> builtins.list[str]:
        skip = len(prefix) + 1 if prefix else 0
        names = (s.name[skip:] for s in self.list(prefix))
        return sorted({n.partition("/")[0] for n in names if "/" in n})

    def now(self) -> float:
        return time.time()

    # -- writing

    def create(self, name: str, data: Buffer) -> str:
        check_name(name)
        _refuse_large(name, data)
        with _writes[self.url], self._told("write"):
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

    def sync(self, names: Iterable[str]) -> None:
        """Nothing to sync."""

    def replace(self, name: str, data: Buffer, if_version: str) -> str:
        check_name(name)
        _refuse_large(name, data)
        with _writes[self.url], self._told("write"):
            try:
                current = self.get_versioned(name)[1]
            except ObjectNotFoundError:
                current = MISSING
            if current != if_version:
                raise AlreadyExistsError(f"{self.url}/{name} was changed by another writer")
            return self._put(name, data)

    def delete(self, name: str, expires: float | None = None) -> None:
        check_name(name)
        if expires is not None and self.now() > expires:
            raise ExpiredError(f"{name}: not deleted, its time is over")
        with _writes[self.url], self._told("delete"), contextlib.suppress(FileNotFoundError):
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
        return contextlib.nullcontext()

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
        _versions[f"{self.url}/{name}"] = next(_count), time.time()
        return self._version(name, bytes(data))

    def _version(self, name: str, data: bytes | None) -> str:
        if self.kind == "memory":
            return str(_versions.get(f"{self.url}/{name}", (0, 0.0))[0])
        return hashlib.sha256(self.get(name) if data is None else data).hexdigest()

    def _modified(self, name: str) -> float:
        known = _versions.get(f"{self.url}/{name}")
        if known:
            return known[1]
        try:
            modified = self._fs.modified(self._full(name))
        except Exception:
            return 0.0
        return modified.timestamp() if isinstance(modified, datetime) else float(modified)

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except CastoreError:
            raise
        except Exception as e:
            raise BackendError(f"{self.url}: could not {what}: {type(e).__name__}: {e}") from e


def _refuse_large(name: str, data: Buffer) -> None:
    if len(data) > MAX_OBJECT:
        raise InvalidInputError(f"{name}: {len(data)} bytes, at most {MAX_OBJECT}")
