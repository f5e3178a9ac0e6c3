"""Repair, asked for by name: good content from another repository in place of damaged frames."""

from __future__ import annotations

from collections.abc import Callable

from castore.check import check
from castore.errors import BackendError, FormatError, IntegrityError, NotFoundError
from castore.frame import check_frame
from castore.objects import digest_of_name
from castore.repository import Repository


def repair(
    repository: Repository, other: Repository, *, progress: Callable[[int], None] = lambda _: None
) -> list[str]:
    """Replace frames whose own checksum fails, and put back missing ones, from another repository.

    Only content whose digest was verified is written, in frames without a base. Gives the digests
    replaced; what ``other`` cannot give stays as it is, for `check` to tell.
    """
    replaced = []
    for digest in _damaged(repository, progress):
        try:
            content = other.store.read(digest)
        except (NotFoundError, IntegrityError):
            continue
        repository.store.put_self_contained(digest, content)
        replaced.append(digest)
    return replaced


def _damaged(repository: Repository, progress: Callable[[int], None]) -> list[str]:
    found = [p.object for p in check(repository) if p.kind in ("missing", "corrupt")]
    for stat in repository.store.list():
        digest = digest_of_name(stat.name)
        try:
            data = repository.store.frame(digest)
            progress(len(data))
            check_frame(data, digest)
        except IntegrityError:
            found.append(digest)
        except (NotFoundError, FormatError, BackendError):
            continue  # it went, or is out of reach: `check` tells
    return list(dict.fromkeys(found))
