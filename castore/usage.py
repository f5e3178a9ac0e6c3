"""Usage: where the bytes are, and what forgetting a snapshot would free."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from castore.reach import Roots, Stored, closure, list_objects
from castore.repository import Repository
from castore.snapshot import SnapshotName

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one namespace or snapshot, in bytes.

    ``logical``: sum of its files' sizes. ``stored``: frames it needs, bases and tree included.
    ``unique``: frames nothing else needs, which forgetting it (and a prune after the grace
    period) frees.
    """

    name: str
    logical: int
    stored: int
    unique: int
    snapshots: int


@dataclass(frozen=True, slots=True)
class Usage:
    """The whole repository. ``unreferenced``: bytes no listed snapshot needs."""

    logical: int
    stored: int
    objects: int
    unreferenced: int
    namespaces: tuple[Share, ...]
    snapshots: tuple[Share, ...]

    @property
    def ratio(self) -> float:
        """Stored bytes over logical bytes; 0 for an empty repository."""
        return self.stored / self.logical if self.logical else 0.0


def usage(
    repository: Repository,
    namespace: str | None = None,
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> Usage:
    """Measure a repository; ``namespace`` limits what is listed, not what counts as shared.

    ``progress`` is told the number of objects looked at.
    Raises as `Repository.tree` when a snapshot cannot be read.
    """
    roots = Roots(repository)
    needs = roots.read("snapshots")
    objects = list_objects(repository, progress=progress)
    closures = {name: closure(objects, need) & objects.keys() for name, need in needs.items()}
    logical = {name: roots.documents[name.path].size for name in needs}
    snapshots = _shares({n: [n] for n in needs}, closures, objects, logical)
    spaces: dict[str, list[SnapshotName]] = defaultdict(list)
    for name in needs:
        spaces[name.namespace].append(name)
    namespaces = _shares(spaces, closures, objects, logical)
    needed = set[str]().union(*closures.values())
    return Usage(
        sum(logical.values()),
        sum(o.size for o in objects.values()),
        len(objects),
        sum(o.size for d, o in objects.items() if d not in needed),
        tuple(s for n, s in namespaces.items() if namespace in (None, n)),
        tuple(s for n, s in snapshots.items() if namespace in (None, n.namespace)),
    )


def _shares(
    groups: Mapping[K, list[SnapshotName]],
    closures: Mapping[SnapshotName, set[str]],
    objects: Mapping[str, Stored],
    logical: Mapping[SnapshotName, int],
) -> dict[K, Share]:
    reached = {k: set[str]().union(*(closures[n] for n in names)) for k, names in groups.items()}
    counts = Counter(d for found in reached.values() for d in found)
    return {
        key: Share(
            str(key),
            sum(logical[n] for n in groups[key]),
            sum(objects[d].size for d in found),
            sum(objects[d].size for d in found if counts[d] == 1),
            len(groups[key]),
        )
        for key, found in reached.items()
    }
