"""Which snapshot a reader means, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from castore import (
    File,
    LayoutError,
    Repository,
    SnapshotName,
    SnapshotNotFoundError,
    Tree,
)
from castore_dcp.layout import Item, Layout, Numbers, TensorEntry
from castore_dcp.names import METADATA, Checkpoint, is_key


@dataclass(frozen=True)
class Found:
    """A checkpoint: its snapshot, that one's tree, and its description."""

    name: SnapshotName
    tree: Tree
    layout: Layout

    @cached_property
    def items(self) -> dict[tuple[str, Numbers | None], Item]:
        """Where a chunk or a value lies, by its name and offsets."""
        return {(i.fqn, i.offsets): i for i in self.layout.items}

    @cached_property
    def chunks(self) -> dict[tuple[str, Numbers | None], tuple[TensorEntry, Numbers]]:
        """A chunk's tensor and lengths, by its name and offsets."""
        return {
            (fqn, c.offsets): (entry, c.sizes)
            for fqn, entry in self.layout.entries.items()
            if isinstance(entry, TensorEntry)
            for c in entry.chunks
        }

    @property
    def document(self) -> str:
        """SHA-256 of its ``dcp.json``: checkpoints with one are read by the same ranges."""
        return described(self.tree, self.name).sha256

    def file(self, path: str) -> File:
        """A file of it; `LayoutError` if its description names one that is not there."""
        entry = self.tree.entries.get(path)
        if not isinstance(entry, File):
            raise LayoutError(f"{self.name}: {METADATA} names {path!r}, which is not there")
        return entry


def resolve(repository: Repository, namespace: str, wanted: Checkpoint | str) -> SnapshotName:
    """The newest snapshot of a checkpoint; or ``latest``, or one named by its id or a prefix.

    ``latest`` is the newest checkpoint, whatever else was committed to the namespace since.

    Raises
    ------
    SnapshotNotFoundError
    """
    if wanted == "latest":
        found = newest(repository, namespace)
        if found is not None:
            return found
    if isinstance(wanted, str):
        return repository.resolve(wanted if "@" in wanted else f"{namespace}@{wanted}")
    for name in repository.snapshots(namespace):
        if name.key == wanted.key:
            return name
    steps = [n.key.removeprefix("step.") for n in repository.snapshots(namespace, limit=5)]
    raise _missing(repository, namespace, wanted, steps)


def newest(repository: Repository, namespace: str) -> SnapshotName | None:
    """A namespace's newest checkpoint, by a listing alone; None without any."""
    return next((n for n in repository.snapshots(namespace) if is_key(n.key)), None)


def read(repository: Repository, name: SnapshotName) -> Found:
    """The checkpoint in a snapshot.

    Raises
    ------
    LayoutError
        It holds none.
    FormatError, IntegrityError, ObjectNotFoundError, BackendError
    """
    tree = repository.tree(name)
    data = b"".join(repository.read_file(described(tree, name)))
    return Found(name, tree, Layout.decode(data, f"{name}:{METADATA}"))


def described(tree: Tree, name: SnapshotName) -> File:
    """The file ``dcp.json``; `LayoutError` where there is none."""
    entry = tree.entries.get(METADATA)
    if not isinstance(entry, File):
        raise LayoutError(f"{name} holds no distributed checkpoint: there is no {METADATA} in it")
    return entry


def _missing(
    repository: Repository, namespace: str, wanted: Checkpoint, some: list[str]
) -> SnapshotNotFoundError:
    return SnapshotNotFoundError(
        f"{repository.url} holds no {wanted} in {namespace!r}; its newest:"
        f" {', '.join(some) or 'none'}"
    )
