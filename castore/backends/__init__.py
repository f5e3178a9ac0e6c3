"""What implements the storage contract: local folders, S3, and any other fsspec file system."""

from __future__ import annotations

import os
from typing import Any

from castore.backend import Backend
from castore.errors import InvalidInputError


def open_backend(
    url: str | os.PathLike[str], storage_options: dict[str, Any] | None = None
) -> Backend:
    """The backend for a path or fsspec URL; nothing is read or made yet.

    ``storage_options`` go to the fsspec file system; they are never stored or shown.
    """
    text = os.fspath(url)
    protocol, separator, rest = text.partition("://")
    if not separator or protocol in ("file", "local"):
        from castore.backends.local import LocalBackend

        path = rest if separator else text
        if not path:
            raise InvalidInputError("an empty path is no place for a repository")
        return LocalBackend(os.path.expanduser(path))
    if protocol in ("s3", "s3a"):
        from castore.backends.s3 import S3Backend

        return S3Backend(rest, storage_options or {})
    from castore.backends.generic import FsspecBackend

    return FsspecBackend(protocol, rest, storage_options or {})
