"""A namespace that begins as a copy of another: new documents, the same objects."""

from __future__ import annotations

from dataclasses import replace

from castore import Repository


def fork_namespace(repository: Repository, old: str, new: str) -> int:
    """Commit every snapshot of ``old`` again in ``new``, the oldest first; gives their number.

    Begun anew it goes on after the last one that ``new`` has.
    """
    names = list(repository.snapshots(old))[::-1]
    done = sum(1 for _ in repository.snapshots(new))
    for name in names[done:]:
        repository.republish(replace(repository.snapshot(name), namespace=new))
    return len(names[done:])
