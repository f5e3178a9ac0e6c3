"""What ``info`` and ``ls`` say of a path. Pure; no I/O."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from castore.filesystem.content import Content
from castore.tree import File

Info = dict[str, Any]
"""``name``, ``size``, ``type`` (``file``, ``directory`` or ``link``), ``created`` and ``modified``
(time zone UTC), ``mtime`` (seconds), ``mode``; of files ``sha256`` in hex; of links ``islink`` and
``destination``; within a snapshot ``snapshot``, its ``NAMESPACE@ID``."""


def folder(name: str, time: int) -> Info:
    """A folder of the view; ``time`` in microseconds since the epoch."""
    return _info(name, "directory", 0, time, 0o555)


def file(name: str, content: Content, time: int) -> Info:
    """A file."""
    executable = isinstance(content, File) and content.executable
    info = _info(name, "file", content.size, time, 0o555 if executable else 0o444)
    return {**info, "sha256": content.sha256}


def link(name: str, time: int) -> Info:
    """A link that leads to no file of its snapshot."""
    return _info(name, "link", 0, time, 0o444)


def moment(time: int) -> datetime:
    """Microseconds since the epoch as a date."""
    return datetime.fromtimestamp(time / 1e6, UTC)


def _info(name: str, kind: str, size: int, time: int, mode: int) -> Info:
    when = moment(time)
    return {
        "name": name,
        "size": size,
        "type": kind,
        "created": when,
        "modified": when,
        "mtime": time / 1e6,
        "mode": mode,
    }
