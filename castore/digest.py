"""BLAKE3-256 digests: the names of objects."""

from __future__ import annotations

import re
from typing import TypeAlias

from blake3 import blake3

Buffer: TypeAlias = bytes | bytearray | memoryview

_DIGEST = re.compile(r"[0-9a-f]{64}")


def digest_of(data: Buffer) -> str:
    """64 lower-case hex characters, BLAKE3-256 of ``data`` (one thread, releases the GIL)."""
    return blake3(data).hexdigest()


def is_digest(text: object) -> bool:
    """Whether ``text`` is spelled like a digest."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None
