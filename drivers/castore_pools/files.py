"""Files of a layout written whole or not at all, durable on return; locks on folders."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from castore import BackendError, InvalidInputError


def write_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replace ``path`` by what ``write`` puts into a file, all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as e:
        raise BackendError(f"{path} cannot be written: {e}") from e
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def remove_leftovers(folder: Path) -> None:
    """Remove what writers that were killed left in ``folder``; for its only writer."""
    for path in folder.glob(".*.tmp"):
        if re.fullmatch(r"\..+\.[0-9a-f]{12}\.tmp", path.name):
            path.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    write_file(path, lambda file: file.write(data))


def write_json(path: Path, document: Any) -> None:
    """Indented, in the given order; `InvalidInputError` for what JSON cannot say."""
    try:
        text = json.dumps(document, indent=1, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise InvalidInputError(f"{path}: only plain, finite values can be recorded: {e}") from e
    write_bytes(path, text.encode() + b"\n")


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def folder_lock(folder: Path, busy: str = "") -> Iterator[None]:
    """Hold a folder for this process; freed when it dies.

    With ``busy`` another holder is an `InvalidInputError` of that text, else it is waited for.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError as e:
            raise InvalidInputError(busy) from e
        yield
    finally:
        os.close(fd)
