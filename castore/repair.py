"""Repair, asked for by name: good content from another repository in place of damaged frames."""

from __future__ import annotations

from collections.abc import Callable

from castore.check import check
from castore.digest import is_digest
from castore.errors import IntegrityError, NotFoundError
from castore.repository import Repository


def repair(
    repository: Repository, other: Repository, *, progress: Callable[[int], None] = lambda _: None
) -> list[str]:
    """Replace frames whose checksum or content fails, and put back missing ones, from another.

    Only content whose digest was verified is written, in frames without a base. Gives the digests
    replaced; what ``other`` cannot give stays as it is, for `check` to tell.
    """
    replaced: list[str] = []
    found = check(repository, read_data=True, progress=progress)
    while True:
        damaged = [p.object for p in found if p.kind in ("missing", "corrupt")]
        new = [d for d in damaged if is_digest(d) and d not in replaced]  # no document's name
        new = [d for d in new if _put_back(repository, other, d)]
        if not new:
            return replaced
        replaced += new
        found = check(repository)  # a tree that is back may name what is missing, too


def _put_back(repository: Repository, other: Repository, digest: str) -> bool:
    try:
        content = other.store.read(digest)
    except (NotFoundError, IntegrityError):
        return False
    repository.store.put_self_contained(digest, content)
    return True
