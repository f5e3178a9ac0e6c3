"""A part of a repository: the objects whose digests begin with some of the 256 first bytes.

Byte ``b`` is of part ``b * N // 256 + 1`` of N, so a part is a run of the folders ``objects/00`` to
``objects/ff``, and lists those alone. What has no digest is of the part of its name's digest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from castore.backend import Backend, Stat, check_name
from castore.digest import digest_of
from castore.errors import InvalidInputError
from castore.objects import FOLDER

MAX_PARTS = 256

_PAIR = re.compile(rf"{FOLDER}/[0-9a-f]{{2}}")
_LEAST, _LAST = "+", "~"  # of the characters that a stored name is made of


@dataclass(frozen=True, slots=True)
class Part:
    """Part ``number`` (from 1) of ``of``; 1 of 1 is everything.

    Raises
    ------
    InvalidInputError
        Not 1 <= number <= of <= 256.
    """

    number: int = 1
    of: int = 1

    def __post_init__(self) -> None:
        whole = type(self.number) is int and type(self.of) is int
        if not (whole and 1 <= self.number <= self.of <= MAX_PARTS):
            raise InvalidInputError(
                f"part {self}: expected K/N with whole numbers, K from 1 to N, and N up to"
                f" {MAX_PARTS}"
            )

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @property
    def alone(self) -> bool:
        """Whether there is no other part."""
        return self.of == 1

    def holds(self, digest: str) -> bool:
        """Whether an object is of this part, by its digest in hex."""
        return int(digest[:2], 16) * self.of // 256 == self.number - 1

    def holds_name(self, name: str) -> bool:
        """Whether this part tells of something that has a name and no digest."""
        return self.holds(digest_of(name.encode()))

    def among(self, raw: NDArray[Any]) -> NDArray[np.bool_]:
        """Which of these raw digests (``S32``) are of this part."""
        first = raw.view(np.uint8).reshape(-1, 32)[:, 0].astype(np.int64)
        return np.equal(first * self.of // 256, self.number - 1)

    def list(self, backend: Backend) -> Iterator[Stat]:
        """Every name in the folders of this part, and for part 1 those in nobody's folder.

        One stream where there is no other part; else a stream for each of the part's folders, one
        after the other, and for part 1 at most some 520 requests of one name each.
        """
        if self.alone:
            yield from backend.list(FOLDER)
            return
        for byte in range(256):
            if byte * self.of // 256 == self.number - 1:
                yield from backend.list(f"{FOLDER}/{byte:02x}")
        if self.number == 1:
            yield from _in_no_part(backend)


def _in_no_part(backend: Backend) -> Iterator[Stat]:
    """Names below ``objects/`` that are in no folder of two hex digits.

    Found by jumping over such folders, a request of one name for each; a folder is jumped over
    twice, since some servers list ``ab/x`` before ``ab-y``. File systems that cannot begin a
    listing in the middle are listed as a whole, and so is a store with names that none can begin
    after.
    """
    found: dict[str, Stat] = {}
    if backend.kind in ("local", "s3") and _jump(backend, found):
        yield from found.values()
        return
    for stat in backend.list(FOLDER):
        if not _PAIR.fullmatch(_folder(stat.name)):
            yield stat


def _jump(backend: Backend, found: dict[str, Stat]) -> bool:
    """Fill ``found``; False where a name is met that a listing cannot go on after."""
    entered: set[str] = set()
    after: str | None = None
    while (stat := next(iter(backend.list(FOLDER, after, 1)), None)) is not None:
        try:
            check_name(stat.name)
        except InvalidInputError:
            return False
        folder = _folder(stat.name)
        if not folder:
            found[stat.name], after = stat, stat.name
        elif folder in entered:
            after = max(stat.name, f"{folder}/{_LAST}")
        elif _PAIR.fullmatch(folder):
            after = folder + _LEAST
        else:
            found.update((s.name, s) for s in backend.list(folder))
            after = f"{folder}/{_LAST}"
        entered.add(folder)
    return True


def _folder(name: str) -> str:
    """The folder directly below ``objects/`` that a name is in, or empty."""
    folder, slash, _ = name[len(FOLDER) + 1 :].partition("/")
    return f"{FOLDER}/{folder}" if slash else ""
