"""What a check knows of every object, in some 55 bytes each: arrays instead of objects.

An object is its place (an int) in the table, which is in the order of digests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from castore.backend import Stat
from castore.digest import is_digest
from castore.frame import MAX_DEPTH, Header
from castore.objects import digest_of_name, object_name

Places: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]
Digests: TypeAlias = NDArray[Any]
"""Raw digests, ``S32``. numpy drops zero bytes at the end of one: see `hex_of`."""

NONE = -1
_CHUNK = 1 << 16


def raw_of(digests: Iterable[str]) -> Digests:
    """Digests in hex as an array."""
    return np.frombuffer(bytes.fromhex("".join(digests)), "S32")


def hex_of(raw: bytes) -> str:
    """An element of such an array in hex."""
    return raw.ljust(32, b"\0").hex()


class Table:
    """Every listed object, and what its header says once it was read.

    ``sizes`` of frames and ``lengths`` of contents in bytes; ``depths``; ``bases`` (places, `NONE`
    where there is none); ``known`` (the header was read), ``asked`` (or could not be). ``lost`` has
    the bases that are not there, by their deltas' places.

    The first ``listed`` places are of listed objects. Bases that were not listed may follow: see
    `adopt`.
    """

    def __init__(self, digests: Digests, sizes: Places, versions: Digests | None = None):
        if np.any(digests[1:] <= digests[:-1]):  # a server with an order of its own
            digests, order = np.unique(digests, return_index=True)
            sizes = sizes[order]
            versions = None if versions is None else versions[order]
        self._digests, self.sizes, self._versions = digests, sizes, versions
        count = self.listed = len(digests)
        self.lengths = np.zeros(count, np.uint32)
        self.depths = np.zeros(count, np.uint8)
        self.bases: Places = np.full(count, NONE, np.int64)
        self.known: Mask = np.zeros(count, np.bool_)
        self.asked: Mask = np.zeros(count, np.bool_)
        self.lost: dict[int, str] = {}
        self._unlisted: list[tuple[Places, Digests]] = []
        self._adopted: Places = np.zeros(0, np.int64)
        self._adopted_digests = digests[:0]

    def __len__(self) -> int:
        return len(self._digests)

    # -- names

    def digest(self, place: int) -> str:
        return hex_of(self._digests[place])

    def named(self, places: Iterable[int]) -> list[str]:
        return [self.digest(p) for p in places]

    def version(self, place: int) -> str:
        """The version that the listing gave; only of a table that keeps them."""
        assert self._versions is not None
        found: bytes = self._versions[place]
        return found.decode()

    def places(self, raw: Digests) -> Places:
        """Where digests are; `NONE` for those that are not."""
        places: Places = np.full(len(raw), NONE, np.int64)
        listed = self._digests[: self.listed]
        for i in range(0, len(raw), _CHUNK):
            some = raw[i : i + _CHUNK]
            found = _find(listed, some)
            if len(self._adopted):
                at = _find(self._adopted_digests, some)
                found = np.where(at != NONE, self._adopted[at], found)
            places[i : i + _CHUNK] = found
        return places

    def place(self, digest: str) -> int:
        return int(self.places(raw_of([digest]))[0]) if is_digest(digest) else NONE

    def is_far(self, digest: str) -> bool:
        """Whether it has a place, and was not listed."""
        return self.place(digest) >= self.listed

    def mask(self, places: Places | Sequence[int]) -> Mask:
        """True at these places."""
        mask = np.zeros(len(self), np.bool_)
        mask[places] = True
        return mask

    # -- headers

    def learn(self, places: Places, headers: Sequence[Header | None]) -> None:
        """Headers of objects; None where it could not be read."""
        self.asked[places] = True
        told = [(p, h) for p, h in zip(places.tolist(), headers, strict=True) if h is not None]
        if not told:
            return
        at = np.array([p for p, _ in told])
        self.known[at] = True
        self.lengths[at] = [h.content_length for _, h in told]
        self.depths[at] = [h.depth for _, h in told]
        above = np.array([p for p, h in told if h.base], np.int64)
        raw = raw_of(h.base for _, h in told if h.base)
        below = self.bases[above] = self.places(raw)
        if np.any(below == NONE):
            self._unlisted.append((above[below == NONE], raw[below == NONE]))

    def below(self, places: Places) -> Places:
        """The bases of these, as far as they have a place and were not asked for."""
        bases = self.bases[places]
        found: Places = np.unique(bases[bases != NONE])
        return found[~self.asked[found]]

    @property
    def incomplete(self) -> bool:
        """Whether a base has no place that may be somewhere."""
        return bool(self._unlisted)

    def adopt(self) -> Places:
        """Places, after all others, for the bases that have none yet: their deltas' bases now.

        Nothing is known of them. Gives the new places; `drop` those that turn out not to be there.
        """
        above, raw = self._take_unlisted()
        new = np.unique(raw)
        first, count = len(self), len(new)
        self.bases[above] = first + np.searchsorted(new, raw)
        self._digests = np.concatenate([self._digests, new])
        self.sizes = np.append(self.sizes, np.zeros(count, np.int64))
        self.lengths = np.append(self.lengths, np.zeros(count, np.uint32))
        self.depths = np.append(self.depths, np.zeros(count, np.uint8))
        self.bases = np.append(self.bases, np.full(count, NONE, np.int64))
        self.known = np.append(self.known, np.zeros(count, np.bool_))
        self.asked = np.append(self.asked, np.zeros(count, np.bool_))
        places = np.arange(first, first + count)
        self._find_adopted(np.append(self._adopted, places))
        return places

    def drop(self, gone: Sequence[int]) -> None:
        """Adopted objects that are not there: their deltas' bases are lost."""
        mask = self.mask(gone)
        above = np.flatnonzero((self.bases != NONE) & mask[self.bases])
        self.lost.update(zip(above.tolist(), self.named(self.bases[above]), strict=True))
        self.bases[above] = NONE
        self._find_adopted(self._adopted[~mask[self._adopted]])

    def lose(self) -> None:
        """All bases that have no place are lost."""
        above, raw = self._take_unlisted()
        self.lost.update(zip(above.tolist(), map(hex_of, raw.tolist()), strict=True))

    def _take_unlisted(self) -> tuple[Places, Digests]:
        taken = [(np.zeros(0, np.int64), raw_of([])), *self._unlisted]
        self._unlisted = []
        above, raw = zip(*taken, strict=True)
        return np.concatenate(above), np.concatenate(raw)

    def _find_adopted(self, places: Places) -> None:
        order = np.argsort(self._digests[places])
        self._adopted = places[order]
        self._adopted_digests = self._digests[self._adopted]

    # -- chains

    def unsound(self) -> Places:
        """Deltas whose base is known to have another length, or no less depth."""
        deltas = np.flatnonzero(self.bases != NONE)
        bases = self.bases[deltas]
        wrong = (self.lengths[bases] != self.lengths[deltas]) | (
            self.depths[bases] >= self.depths[deltas]
        )
        found: Places = deltas[self.known[bases] & wrong]
        return found

    def closure(self, mask: Mask) -> Mask:
        """``mask`` and every base below it."""
        seen, new = mask.copy(), np.flatnonzero(mask)
        while len(new):
            below = self.bases[new]
            new = np.unique(below[below != NONE])
            new = new[~seen[new]]
            seen[new] = True
        return seen

    def standing_on(self, mask: Mask) -> Mask:
        """``mask`` and every delta above it."""
        seen = mask.copy()
        linked = np.flatnonzero(self.bases != NONE)
        for _ in range(MAX_DEPTH + 1):
            new = linked[seen[self.bases[linked]] & ~seen[linked]]
            if not len(new):
                break
            seen[new] = True
        return seen

    def down(self, place: int) -> Iterator[int]:
        """An object and its bases, as far as headers tell."""
        seen: set[int] = set()
        while place != NONE and place not in seen:
            seen.add(place)
            yield place
            place = int(self.bases[place])

    def chain(self, digest: str) -> list[str]:
        """``digest`` and its bases, as far as headers tell, one that is lost included."""
        places = list(self.down(self.place(digest)))
        if not places:
            return [digest]
        lost = self.lost.get(places[-1])
        return self.named(places) + ([lost] if lost else [])

    def chains(self, chosen: Places) -> Iterator[Places]:
        """Each chain's root followed by all of ``chosen`` that hangs on it, depth first.

        What hangs on something not chosen, or no less deep, is a root: so chains end.
        """
        mask = np.zeros(len(self), np.bool_)
        mask[chosen] = True
        parents = np.full(len(self), NONE, np.int64)
        linked = chosen[self.bases[chosen] != NONE]
        below = self.bases[linked]
        linked = linked[mask[below] & (self.depths[below] < self.depths[linked])]
        parents[linked] = self.bases[linked]
        roots = np.arange(len(self))
        for _ in range(MAX_DEPTH):
            linked = linked[parents[roots[linked]] != NONE]
            if not len(linked):
                break
            roots[linked] = parents[roots[linked]]
        roots = roots[chosen]
        order = np.argsort(roots, kind="stable")
        chosen, roots = chosen[order], roots[order]
        ends = np.flatnonzero(np.diff(roots, append=NONE)) + 1
        at = 0
        for end in ends.tolist():
            group = chosen[at:end]
            yield group if len(group) == 1 else _depth_first(int(roots[at]), group, parents)
            at = end


def _find(digests: Digests, some: Digests) -> Places:
    """Where in sorted ``digests`` each of ``some`` is, or `NONE`."""
    if not len(digests):
        return np.full(len(some), NONE, np.int64)
    found = np.minimum(np.searchsorted(digests, some), len(digests) - 1)
    places: Places = np.where(digests[found] == some, found, NONE)
    return places


def _depth_first(root: int, group: Places, parents: Places) -> Places:
    children: dict[int, list[int]] = defaultdict(list)
    for place, parent in zip(group.tolist(), parents[group].tolist(), strict=True):
        if parent != NONE:
            children[parent].append(place)
    found, todo = [], [root]
    while todo:
        at = todo.pop()
        found.append(at)
        todo += children.get(at, ())
    return np.array(found)


def list_table(stats: Iterable[Stat], versions: bool) -> tuple[Table, list[str]]:
    """The table of listed objects, and names among them that are not the name of an object.

    ``versions``: keep those too, which takes about as much again.
    """
    strange: list[str] = []
    parts: list[tuple[Digests, Places, Digests]] = []
    todo = iter(stats)
    while chunk := list(islice(todo, _CHUNK)):
        good = []
        for stat in chunk:
            digest = digest_of_name(stat.name)
            if is_digest(digest) and stat.name == object_name(digest):
                good.append(stat)
            else:
                strange.append(stat.name)
        parts.append(
            (
                raw_of(digest_of_name(s.name) for s in good),
                np.array([s.size for s in good], np.int64),
                np.array([s.version.encode() for s in good] if versions else [], np.bytes_),
            )
        )
    if not parts:
        return Table(raw_of([]), np.zeros(0, np.int64), np.zeros(0, "S1")), strange
    digests, sizes, tokens = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Table(digests, sizes, tokens if versions else None), strange


class Needs:
    """Which objects trees need, how many bytes of each, and which tree wants most of it.

    Each object once, in some 45 bytes. Of several trees that want most, the last added counts.
    """

    def __init__(self) -> None:
        self._parts = [_needs(raw_of([]), np.zeros(0, np.int64), 0)]
        self._kept = self._count = 0

    def add(self, raw: Digests, lengths: Places, tree: int) -> None:
        """What one tree needs; ``tree`` is the caller's number for it."""
        self._parts.append(_needs(raw, lengths, tree))
        self._count += len(raw)
        if self._count > self._kept // 2 + _CHUNK:
            self._join()

    def table(self) -> NDArray[Any]:
        """``digest``, ``length`` and ``tree`` of each, in the order of digests."""
        self._join()
        return self._parts[0]

    def _join(self) -> None:
        rows = np.concatenate(self._parts)
        rows = rows[np.lexsort((rows["tree"], rows["length"], rows["digest"]))]
        last = np.append(rows["digest"][1:] != rows["digest"][:-1], True)
        self._parts = [rows[last[: len(rows)]]]
        self._kept = self._count = len(self._parts[0])


def _needs(raw: Digests, lengths: Places, tree: int) -> NDArray[Any]:
    rows = np.zeros(len(raw), [("digest", "S32"), ("length", np.int64), ("tree", np.int32)])
    rows["digest"], rows["length"], rows["tree"] = raw, lengths, tree
    return rows
