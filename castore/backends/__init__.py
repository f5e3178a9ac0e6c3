"""What implements the storage contract: local folders, S3, and any other fsspec file system."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from typing import Any

from castore.backend import Backend
from castore.backends._rules import without_secrets
from castore.errors import BackendError, InvalidInputError

__all__ = ["open_backend", "without_secrets"]

_URL = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.-]*|[A-Za-z0-9+.:-]*::[A-Za-z0-9+.-]+))://(.*)", re.S)


def open_backend(
    url: str | os.PathLike[str], storage_options: dict[str, Any] | None = None
) -> Backend:
    """The backend for a path or fsspec URL; nothing is read or made yet.

    Paths are literal: ``[ ] ? * # %`` and spaces stand for themselves. ``storage_options`` go to
    the fsspec file system; they are never stored or shown. A missing s3fs is a `BackendError`.
    """
    text = os.fspath(url)
    if "\0" in text:
        raise InvalidInputError(f"{text!r}: a NUL is in no path")
    match = _URL.fullmatch(text)
    protocol, rest = match.groups() if match else ("file", text)
    if protocol in ("file", "local"):
        from castore.backends.local import LocalBackend

        if not rest:
            raise InvalidInputError("an empty path is no place for a repository")
        return LocalBackend(rest if match else os.path.expanduser(rest))
    if protocol in ("s3", "s3a"):
        if find_spec("s3fs") is None:
            raise BackendError("S3 needs s3fs: pip install 'castore[s3]'")
        from castore.backends.s3 import S3Backend

        return S3Backend(rest, storage_options or {})
    from castore.backends.generic import FsspecBackend

    return FsspecBackend(protocol, rest, storage_options or {})
