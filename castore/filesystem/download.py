"""One path of the view to the local disk, there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO
from uuid import uuid4

from castore.filesystem.file import CastoreFile

_STEP = 64 << 20  # bytes asked for at once, so that several blobs are fetched in parallel


def copy_into(file: CastoreFile, out: BinaryIO, callback: Any) -> None:
    """Write all of a file to ``out``; ``callback`` is fsspec's, told the size and the progress."""
    callback.set_size(file.size)
    while data := file.read(_STEP):
        out.write(data)
        callback.relative_update(len(data))


@contextmanager
def beside(target: str) -> Iterator[str]:
    """A name beside ``target``, made its content on success, gone otherwise."""
    part = f"{target.rstrip('/')}.{uuid4().hex}.part"
    os.makedirs(os.path.dirname(part) or ".", exist_ok=True)
    try:
        yield part
        os.replace(part, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(part)
        raise
