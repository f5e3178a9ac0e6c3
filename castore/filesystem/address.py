"""What a path of the view names. Pure; no I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from castore.snapshot import parse_name

LATEST = "latest"
_ID = re.compile(r"[0-9a-f]{4,16}")


@dataclass(frozen=True, slots=True)
class Address:
    """A path taken apart.

    ``snapshot`` is what names a snapshot, empty for a path of the layout; ``path`` is relative to
    that snapshot's tree, or to the layout's root. All three are empty for the root of the view.
    """

    namespace: str = ""
    snapshot: str = ""
    path: str = ""

    @property
    def root(self) -> str:
        """The path of the view that ``path`` is relative to."""
        return f"{self.namespace}/{self.snapshot}" if self.snapshot else self.namespace


def parse(path: str) -> Address:
    """The address of a path without protocol."""
    namespace, _, rest = path.strip("/").partition("/")
    part, _, below = rest.partition("/")
    if names_snapshot(namespace, part):
        return Address(namespace, part, below)
    return Address(namespace, "", rest)


def names_snapshot(namespace: str, part: str) -> bool:
    """Whether the second element of a path names a snapshot, by its spelling alone.

    ``latest``, 4 to 16 characters of 0-9 and a-f, a whole name, or anything with a ``=``.
    """
    return (
        part == LATEST
        or "=" in part
        or _ID.fullmatch(part) is not None
        or parse_name(f"snapshots/{namespace}/{part}") is not None
    )


def label(part: str) -> tuple[str, str] | None:
    """Key and value of a ``key=value``, percent-decoded; None for any other spelling."""
    key, equals, value = part.partition("=")
    return (unquote(key), unquote(value)) if equals else None
