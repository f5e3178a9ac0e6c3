"""What an open file holds: a file of a tree, or bytes that a driver made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from castore.tree import File


@dataclass(frozen=True, slots=True)
class Made:
    """Bytes that a driver made, and their SHA-256 in hex."""

    data: bytes
    sha256: str

    @property
    def size(self) -> int:
        return len(self.data)


Content: TypeAlias = File | Made
