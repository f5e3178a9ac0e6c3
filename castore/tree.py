"""A tree: what a folder holds. Pure data, no I/O.

A file is the concatenation of slices of blobs, and nothing else is recorded of how it was cut.
Owner, times, extended attributes and hard links are not kept.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any, TypeAlias

from castore import document
from castore.digest import is_digest
from castore.errors import FormatError, InvalidInputError

MAX_PATH, MAX_ELEMENT = 4096, 255
DEEPEST = 300
"""Folders within folders: what lies deeper is in no tree."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\\]")  # Unicode's category Cc is these
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Slice:
    """``length`` bytes of ``blob`` from ``offset``; lengths are positive."""

    blob: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class File:
    """``size`` in bytes, ``sha256`` of the whole file in hex, its ``slices`` in order."""

    size: int
    sha256: str
    executable: bool = False
    slices: tuple[Slice, ...] = ()

    def blobs(self) -> list[str]:
        """The digests it needs, in the order of their first use."""
        return list(dict.fromkeys(s.blob for s in self.slices))


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link, kept as its text; never followed."""

    target: str


@dataclass(frozen=True, slots=True)
class Folder:
    """An empty folder; others follow from the paths."""


Entry: TypeAlias = File | Link | Folder


@dataclass(frozen=True, slots=True)
class Tree:
    """Sorted map from relative path to entry."""

    entries: Mapping[str, Entry] = field(default_factory=dict)

    def files(self) -> Iterator[tuple[str, File]]:
        return ((p, e) for p, e in self.entries.items() if isinstance(e, File))

    def blobs(self) -> list[str]:
        """Every digest the tree needs, each once."""
        return list(dict.fromkeys(b for _, f in self.files() for b in f.blobs()))

    def blob_lengths(self) -> dict[str, int]:
        """For each digest how many bytes of it the tree uses, from its first."""
        lengths: dict[str, int] = {}
        for _, f in self.files():
            for s in f.slices:
                lengths[s.blob] = max(lengths.get(s.blob, 0), s.offset + s.length)
        return lengths

    @property
    def size(self) -> int:
        """Logical bytes of all files."""
        return sum(f.size for _, f in self.files())

    def below(self, path: str) -> Tree:
        """The part at or under ``path``; a file or link is found under its last name."""
        if path in self.entries:
            return Tree({path.rpartition("/")[2]: self.entries[path]})
        head = path + "/"
        return Tree({p[len(head) :]: e for p, e in self.entries.items() if p.startswith(head)})

    def encode(self) -> bytes:
        return document.encode("tree", {"entries": {p: _pack(e) for p, e in self.entries.items()}})

    @staticmethod
    def decode(data: bytes, where: str = "tree") -> Tree:
        """The tree in ``data``; `FormatError` for anything that `build_tree` would refuse."""
        body = document.decode(data, "tree", ["entries"], where)
        entries = document.parsed(
            lambda: {p: _unpack(e, f"{where}: {p!r}") for p, e in body["entries"].items()}, where
        )
        try:
            return build_tree(entries)
        except InvalidInputError as e:
            raise FormatError(f"{where}: {e}") from e


def build_tree(entries: Mapping[str, Entry]) -> Tree:
    """A tree of ``entries``, sorted, after all their names were checked (`InvalidInputError`)."""
    # As sorted here, names that share a folded folder stand together, and an entry right before
    # what lies below it: comparing neighbours is enough, and costs no more than their lengths.
    folded = sorted((_fold(check_path(p)).replace("/", "\0"), p) for p in entries)
    for (fold, path), (next_fold, next_path) in pairwise(folded):
        parts, others = path.split("/"), next_path.split("/")
        if parts[:-1] == others[:-1] and fold != next_fold:
            continue  # two names in one folder: by far the most
        shared = _shared(fold.split("\0"), next_fold.split("\0"))
        if parts[:shared] != others[:shared]:
            here, other = ("/".join(p[:shared]) for p in (parts, others))
            raise InvalidInputError(
                f"{here!r} and {other!r} are one name on file systems that ignore case or"
                " normalise Unicode: rename one"
            )
        if shared == len(parts):
            raise InvalidInputError(f"{path!r} is both an entry and the folder of {next_path!r}")
    return Tree({p: entries[p] for p in sorted(entries)})


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """How many elements two paths have in common from their first."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def check_path(path: str) -> str:
    """``path`` if a tree may hold it, else `InvalidInputError` that shows it."""

    def bad(why: str) -> InvalidInputError:
        return InvalidInputError(f"the name {path[:300]!r} cannot be stored: {why}")

    try:
        raw = path.encode()
    except UnicodeEncodeError:
        raise bad("it is not valid Unicode") from None
    if not path or path.startswith("/"):
        raise bad("a path in a tree is relative and not empty")
    if len(raw) > MAX_PATH:
        raise bad(f"{len(raw)} bytes, at most {MAX_PATH}")
    if path.count("/") > DEEPEST:
        raise bad(f"over {DEEPEST} folders within folders")
    if _CONTROL.search(path):
        raise bad("it has a control character or a backslash")
    for part in path.split("/"):
        if part in ("", ".", ".."):
            raise bad("it has an empty, '.' or '..' element")
        if len(part.encode()) > MAX_ELEMENT:
            raise bad(f"an element has over {MAX_ELEMENT} bytes")
    return path


def _fold(path: str) -> str:
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def _pack(entry: Entry) -> dict[str, Any]:
    if isinstance(entry, Folder):
        return {"type": "folder"}
    if isinstance(entry, Link):
        return {"type": "link", "target": entry.target}
    blobs = entry.blobs()
    index = {b: i for i, b in enumerate(blobs)}
    return {
        "type": "file",
        "size": entry.size,
        "sha256": entry.sha256,
        "executable": entry.executable,
        "blobs": blobs,
        "slices": [[index[s.blob], s.offset, s.length] for s in entry.slices],
    }


def _unpack(packed: dict[str, Any], where: str) -> Entry:
    kinds = {
        "folder": {"type"},
        "link": {"type", "target"},
        "file": {"type", "size", "sha256", "executable", "blobs", "slices"},
    }
    kind = packed["type"]
    if packed.keys() != kinds.get(kind):
        raise FormatError(f"{where}: unknown type of entry or wrong keys")
    if kind == "folder":
        return Folder()
    if kind == "link":
        return Link(check_target(packed["target"], where))
    blobs = packed["blobs"]
    if not all(is_digest(b) for b in blobs):
        raise FormatError(f"{where}: a blob is not named by a digest")
    slices = tuple(Slice(blobs[_count(i)], _count(o), _count(n, 1)) for i, o, n in packed["slices"])
    file = File(_count(packed["size"]), packed["sha256"], packed["executable"] is True, slices)
    if not _SHA256.fullmatch(file.sha256) or type(packed["executable"]) is not bool:
        raise FormatError(f"{where}: malformed sha256 or executable")
    if sum(s.length for s in slices) != file.size or file.blobs() != blobs:
        raise FormatError(f"{where}: the slices do not add up to the file")
    return file


def check_target(target: str, where: str) -> str:
    """The text of a link if it can be stored."""
    if not isinstance(target, str) or not target or "\0" in target:
        raise FormatError(f"{where}: a link's target is empty or holds a NUL")
    try:
        size = len(target.encode())
    except UnicodeEncodeError:
        raise FormatError(f"{where}: a link's target is not valid Unicode") from None
    if size >= MAX_PATH:
        raise FormatError(f"{where}: a link's target has {size} bytes, less than {MAX_PATH} can be")
    return target


def _count(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a count")
    return value
