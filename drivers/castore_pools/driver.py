"""The driver: a pools layout as snapshots and back, and what it promises recomputed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from castore import (
    AlreadyExistsError,
    Draft,
    File,
    IntegrityError,
    LayoutError,
    NotFoundError,
    Repository,
    SnapshotName,
)
from castore_pools.importing import DRIVER, drafts
from castore_pools.names import collected_index, is_base, registry_task
from castore_pools.places import SnapshotPlace
from castore_pools.registry import change_registry, parse_registry

_PARTS = ("zoo", "ckpt", "metadata/configs", "metadata/code")


class PoolsDriver:
    """See docs/layouts/pools.md. `castore_pools.import_zoo` also names the delta bases."""

    name = DRIVER

    def collect(self, root: str | os.PathLike[str]) -> Iterator[Draft]:
        """The snapshots a layout on disk amounts to: of each cell its base, then all of it."""
        return drafts(root)

    def materialize(
        self, repository: Repository, snapshot: SnapshotName, target: str | os.PathLike[str]
    ) -> None:
        """Write a snapshot into a layout; records go into the registries that are there.

        Files that are there with the same content stay; `AlreadyExistsError` for others.
        """
        root = Path(target)
        files = dict(repository.tree(snapshot).files())
        _refuse_other_content(files, root)
        registries = [p for p in files if registry_task(p) is not None]
        for part in _parts([p for p in files if p not in registries]):
            folder = root / (part if any(p.startswith(part + "/") for p in files) else _above(part))
            repository.checkout(f"{snapshot}:{part}", folder, force=True)
        for path in registries:
            task = registry_task(path) or ""
            data = b"".join(repository.read_file(files[path]))
            records = parse_registry(data, task, f"{snapshot}:{path}")
            change_registry(root / path, task, {r.cell: r.body for r in records})

    def verify(self, repository: Repository, snapshot: SnapshotName) -> Iterator[tuple[str, str]]:
        """Recompute what the layout promises; gives path and defect of each broken promise.

        Files that the layout promises nothing of are read, so that a lost one is found.
        """
        from castore_pools.verify import verify_place

        rest = repository.snapshot(snapshot).labels.get("part") == "rest"
        for path, file in repository.tree(snapshot).files():
            if rest or not (is_base(path) or collected_index(path) is not None):
                yield from _unreadable(repository, path, file)
        if rest:
            return
        try:
            for finding in verify_place(SnapshotPlace(repository, [str(snapshot)])):
                if finding.broken:
                    yield finding.path, f"{finding.check}: {finding.detail}"
        except (IntegrityError, NotFoundError, LayoutError) as e:  # of the registry
            yield "metadata/registry", f"layout: {e}"


def _unreadable(repository: Repository, path: str, file: File) -> Iterator[tuple[str, str]]:
    try:
        for _ in repository.read_file(file):
            pass
    except (IntegrityError, NotFoundError) as e:
        yield path, str(e)


def _parts(paths: list[str]) -> list[str]:
    """The folders that hold all of ``paths``, and files outside of them; none is within another."""
    found = []
    for path in paths:
        home = next((p for p in _PARTS if path.startswith(p + "/")), path)
        if home not in found:
            found.append(home)
    return found


def _above(path: str) -> str:
    return os.path.dirname(path) or "."


def _refuse_other_content(files: dict[str, File], root: Path) -> None:
    for path, file in files.items():
        there = root / path
        if registry_task(path) is not None or not there.exists():
            continue
        with open(there, "rb") as f:
            actual = hashlib.file_digest(f, "sha256").hexdigest()
        if actual != file.sha256:
            raise AlreadyExistsError(
                f"{there} holds other content (SHA-256 {actual}, the snapshot has {file.sha256}):"
                " nothing was written; choose another target"
            )
