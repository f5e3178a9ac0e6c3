"""The files of a root, local or remote: read, written whole and durably, compared and swapped.

A remote root is a castore backend. A local one is not: it holds people's own files too, so there is
no ``tmp/`` beside them, no rule on their names, and other programs may write at any time.
"""

from __future__ import annotations

import builtins
import logging
from collections.abc import Iterable, Iterator
from os import PathLike
from typing import Any, Protocol, TypeAlias

from castore import ObjectNotFoundError
from castore.backend import MISSING, Backend, Stat, UnansweredError
from castore.backends import open_backend
from castore.digest import Buffer

Data: TypeAlias = Buffer | Iterable[Buffer]
"""Bytes, or parts that follow one another; whoever gives parts may raise to call the write off."""

_TRIES = 4


class Files(Protocol):
    """Named bytes below a root's URL: what a root needs of `castore.backend.Backend`.

    Names are relative and ``/``-separated. A missing name is `ObjectNotFoundError`, also where the
    root itself is not there yet; permission, disk and network are `BackendError`. A version changes
    whenever the content does. `castore.backend.MISSING` is the version of what is not there.
    """

    @property
    def url(self) -> str:
        """Where the root is, without secrets; local: an absolute path."""

    @property
    def kind(self) -> str:
        """``local``, ``s3`` or another protocol."""

    def get(self, name: str) -> bytes:
        """The content of ``name``."""

    def get_versioned(self, name: str) -> tuple[bytes, str]:
        """Content and version, of one and the same moment."""

    def stat(self, name: str) -> Stat:
        """Size, time and version."""

    def list(self, prefix: str) -> Iterator[Stat]:
        """Every file below the folder ``prefix``, sorted by name; none where it is missing."""

    def folders(self, prefix: str) -> builtins.list[str]:
        """The names of the folders directly below ``prefix``, sorted."""

    def create(self, name: str, data: Data) -> str:
        """Store a new name: whole, durable, `AlreadyExistsError` if it is taken; its version."""

    def replace(self, name: str, data: Data, if_version: str) -> str:
        """Store ``data`` if ``if_version`` stands there; whole, durable; the new version.

        `AlreadyExistsError` if another one does. Local: another program that writes between the
        comparison and the rename is not seen; `castore_experiments.manifest_file` does better.
        """

    def delete(self, name: str) -> None:
        """Take a name away; a missing one is no error."""


def open_files(url: str | PathLike[str], storage_options: dict[str, Any] | None = None) -> Files:
    """The files below a path or URL; nothing is read or made yet. Paths are literal."""
    backend = open_backend(url, storage_options)
    if backend.kind == "local":
        from castore_experiments.local_files import LocalFiles

        return LocalFiles(backend.url)
    return RemoteFiles(backend)


class RemoteFiles:
    """A root on S3 or another fsspec store; see `Files`."""

    def __init__(self, backend: Backend):
        self.backend = backend
        self._probed = False

    @property
    def url(self) -> str:
        return self.backend.url

    @property
    def kind(self) -> str:
        return self.backend.kind

    def get(self, name: str) -> bytes:
        return self.backend.get(name)

    def get_versioned(self, name: str) -> tuple[bytes, str]:
        return self.backend.get_versioned(name)

    def stat(self, name: str) -> Stat:
        return self.backend.stat(name)

    def list(self, prefix: str) -> Iterator[Stat]:
        return self.backend.list(prefix)

    def folders(self, prefix: str) -> builtins.list[str]:
        return self.backend.folders(prefix)

    def create(self, name: str, data: Data) -> str:
        return self.replace(name, data, MISSING)

    def replace(self, name: str, data: Data, if_version: str) -> str:
        """One PutObject with a condition; where no answer came, a look decides.

        The condition also keeps a lost request from coming late: whatever stands there by then has
        another version.
        """
        self._probe()
        content = whole(data)
        for attempt in range(_TRIES):
            try:
                return self.backend.replace(name, content, if_version)
            except UnansweredError:
                current, version = self._look(name)
                if current == content:
                    return version
                if version != if_version or attempt == _TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def delete(self, name: str) -> None:
        self.backend.delete(name)

    def _look(self, name: str) -> tuple[bytes | None, str]:
        try:
            return self.backend.get_versioned(name)
        except ObjectNotFoundError:
            return None, MISSING

    def _probe(self) -> None:
        """Ask once whether the store honours conditions; say so where it does not."""
        if not self._probed:
            self._probed = True
            if not self.backend.probe():
                logging.getLogger("castore").warning(
                    "%s: this store cannot keep two writers apart: train from one process at a"
                    " time in this root",
                    self.url,
                )


def whole(data: Data) -> bytes:
    """Parts joined, or bytes as they are."""
    if isinstance(data, bytes):
        return data
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    return b"".join(data)


def parts(data: Data) -> Iterable[Buffer]:
    """Bytes as their one part, or the parts as they are."""
    return (data,) if isinstance(data, bytes | bytearray | memoryview) else data
