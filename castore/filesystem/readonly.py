"""The half of fsspec's interface that writes: every call of it says the same."""

from __future__ import annotations

import errno
from typing import Any, NoReturn

from fsspec import AbstractFileSystem


def refuse(path: object) -> NoReturn:
    """`OSError` with ``EROFS``: what programs understand that write to file systems."""
    what = "castore:// is read-only: 'castore commit', or Repository.commit, makes a new snapshot"
    raise OSError(errno.EROFS, what, str(path))


class ReadOnly(AbstractFileSystem):  # type: ignore[misc]
    """An fsspec file system that refuses to write, before it looks at anything."""

    def mkdir(self, path: Any, create_parents: bool = True, **_: Any) -> NoReturn:
        refuse(path)

    def makedirs(self, path: Any, exist_ok: bool = False) -> NoReturn:
        refuse(path)

    def rmdir(self, path: Any) -> NoReturn:
        refuse(path)

    def rm_file(self, path: Any) -> NoReturn:
        refuse(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> NoReturn:
        refuse(path)

    def cp_file(self, path1: Any, path2: Any, **_: Any) -> NoReturn:
        refuse(path2)

    def copy(self, path1: Any, path2: Any, **_: Any) -> NoReturn:
        refuse(path2)

    def mv(self, path1: Any, path2: Any, **_: Any) -> NoReturn:
        refuse(path1)

    def touch(self, path: Any, truncate: bool = True, **_: Any) -> NoReturn:
        refuse(path)

    def pipe_file(self, path: Any, value: Any, mode: str = "overwrite", **_: Any) -> NoReturn:
        refuse(path)

    def pipe(self, path: Any, value: Any = None, **_: Any) -> NoReturn:
        refuse(path)

    def put_file(self, lpath: Any, rpath: Any, **_: Any) -> NoReturn:
        refuse(rpath)

    def put(self, lpath: Any, rpath: Any, **_: Any) -> NoReturn:
        refuse(rpath)

    def write_text(self, path: Any, value: Any, **_: Any) -> NoReturn:
        refuse(path)

    def start_transaction(self) -> NoReturn:
        refuse("a transaction")
