"""Hypothesis strategies for what a repository holds, for tests of backends and drivers."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as some

from castore.snapshot import Snapshot
from castore.source import Draft, MemoryFile

_ELEMENTS = "abcdefghijklmnopqrstuvwxyz0123456789._- üñ"


def elements() -> some.SearchStrategy[str]:
    """One part of a path: legal, not ``.`` or ``..``, 1 to 12 characters."""
    return some.text(_ELEMENTS, min_size=1, max_size=12).filter(
        lambda t: t not in (".", "..") and t == t.strip(" .")
    )


def paths(depth: int = 3) -> some.SearchStrategy[str]:
    """A path of at most ``depth`` parts."""
    return some.lists(elements(), min_size=1, max_size=depth).map("/".join)


def contents(largest: int = 200_000) -> some.SearchStrategy[bytes]:
    """Bytes of a file: empty, short, repeated, and noise of up to ``largest`` bytes."""
    repeated = some.tuples(some.binary(min_size=1, max_size=64), some.integers(1, largest // 64))
    noise = some.tuples(some.integers(0, 2**32 - 1), some.integers(1, largest))
    return some.one_of(
        some.binary(max_size=200),
        repeated.map(lambda pair: pair[0] * pair[1]),
        noise.map(lambda pair: _noise(*pair)),
    )


def folders(largest: int = 200_000) -> some.SearchStrategy[Mapping[str, bytes]]:
    """A folder's files: no path is a folder of another, none differs from another in case only."""
    return some.dictionaries(paths(), contents(largest), max_size=6).filter(_is_a_folder)


def drafts(largest: int = 200_000) -> some.SearchStrategy[Draft]:
    """A snapshot to be."""
    labels = some.dictionaries(some.text(max_size=8), some.text(max_size=8), max_size=2)
    return some.builds(
        lambda files, labels: Draft({p: MemoryFile(d) for p, d in files.items()}, labels=labels),
        folders(largest).filter(bool),
        labels.filter(_can_be_stored),
    )


def _is_a_folder(files: Mapping[str, bytes]) -> bool:
    folded = {p.casefold() for p in files}
    above = {p.casefold()[:i] for p in files for i, c in enumerate(p) if c == "/"}
    return (
        len(folded) == len(files)
        and not folded & above
        and len(_cased(files)) == len({c.casefold() for c in _cased(files)})
    )


def _cased(files: Mapping[str, bytes]) -> set[str]:
    return {p[:i] for p in files for i, c in enumerate(p) if c == "/"}


def _can_be_stored(labels: Mapping[str, str]) -> bool:
    try:
        Snapshot("0" * 64, 0, "main", labels=labels).encode()
    except ValueError:
        return False
    return True


def _noise(seed: int, length: int) -> bytes:
    import numpy as np

    return np.random.default_rng(seed).bytes(length)
