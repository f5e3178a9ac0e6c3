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
    replaced = []
    found = check(repository, read_data=True, progress=progress)
    damaged = [p.object for p in found if p.kind in ("missing", "corrupt")]
    for digest in filter(is_digest, damaged):  # not names of documents
        try:
            content = other.store.read(digest)
        except (NotFoundError, IntegrityError):
            continue
        repository.store.put_self_contained(digest, content)
        replaced.append(digest)
    return replaced
