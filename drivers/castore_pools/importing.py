"""A layout as snapshots: one of each base, then one of each cell with base, pool and record.

The base comes first so that the first pool file can be stored as a difference to it; every later
pool file is one to the file before it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from castore import Commit, Draft, File, MemoryFile, Options, Repository, disk_file
from castore_pools.layout import CellFiles, survey
from castore_pools.names import STATE, Cell
from castore_pools.places import FolderPlace

DRIVER = "pools"
MAX_CHAIN = 4
"""Deltas that a read of a pool file goes through, at most."""


def drafts(root: str | os.PathLike[str]) -> Iterator[Draft]:
    """The snapshots that a local layout amounts to: of each cell first the base, then all of it.

    What belongs to no cell (bases without a pool, other files) comes last, as one snapshot. The
    file of an interrupted collection is left out. `LayoutError` if it is no layout.
    """
    found = survey(FolderPlace(root))
    folder = Path(root)
    for files in found.cells:
        if files.base is not None:
            yield _base_draft(folder, files)
        if files.pool:
            yield _pool_draft(folder, files)
    alone: dict[str, Any] = {p: disk_file(folder / p) for p in [*found.bases, *found.rest]}
    for files in found.cells:
        if not files.pool:
            alone |= {p: disk_file(folder / p) for p in _beside_base(files)}
    alone |= _records_alone(found.cells)
    if alone:
        yield Draft(alone, DRIVER, "rest", {"part": "rest"})


def _beside_base(files: CellFiles) -> list[str]:
    """What a cell without pool files holds that its base's snapshot does not."""
    held = _own_configs(files) if files.base is not None else []
    return [p for p in (*files.configs, *_other(files)) if p not in held]


def _own_configs(files: CellFiles) -> list[str]:
    return [p for p in files.configs if p.endswith("/config.json")]


def _other(files: CellFiles) -> list[str]:
    return [p for p in files.other if not p.endswith("/" + STATE)]


def _records_alone(cells: Iterable[CellFiles]) -> dict[str, MemoryFile]:
    """Registries of the records that no pool files belong to."""
    bodies: dict[str, list[Any]] = {}
    for files in cells:
        if files.record is not None and not files.pool:
            bodies.setdefault(files.cell.registry_path, []).append(files.record.body)
    return {path: _registry_file(found) for path, found in bodies.items()}


def _registry_file(bodies: list[Any]) -> MemoryFile:
    return MemoryFile(json.dumps(bodies, indent=1).encode() + b"\n")


def _base_draft(folder: Path, files: CellFiles) -> Draft:
    paths = [files.cell.base_path, *_own_configs(files)]
    entries = {p: disk_file(folder / p) for p in paths}
    return Draft(entries, DRIVER, snapshot_key(files.cell, "base"), _labels(files.cell, "base"))


def _pool_draft(folder: Path, files: CellFiles) -> Draft:
    base = [files.base] if files.base else []
    paths = [*base, *files.configs, *files.pool.values(), *_other(files)]
    entries: dict[str, Any] = {p: disk_file(folder / p) for p in paths}
    if files.record is not None:
        entries[files.cell.registry_path] = _registry_file([files.record.body])
    facts = {"files": len(files.pool), **_summary(files)}
    return Draft(
        entries, DRIVER, snapshot_key(files.cell, "pool"), _labels(files.cell, "pool"), facts
    )


def _summary(files: CellFiles) -> dict[str, Any]:
    """What of the record stands in the snapshot itself."""
    body = files.record.body if files.record is not None else {}
    names = ("total_params", "frozen_params", "generated_params", "frozen_keys", "pool")
    return {n: body[n] for n in names if n in body}


def _labels(cell: Cell, part: str) -> dict[str, str]:
    return {
        "task": cell.task,
        "arch": cell.arch,
        "dataset": cell.dataset,
        "model": cell.model_id,
        "part": part,
    }


def snapshot_key(cell: Cell, part: str) -> str:
    """A cell's part in snapshot names: lower case, at most 64 characters; the labels are exact."""
    return f"{part}." + re.sub(r"[^a-z0-9._]", "_", f"{cell.name}.{cell.model_id}".lower())[:58]


def import_zoo(
    repository: Repository,
    root: str | os.PathLike[str],
    namespace: str = "main",
    *,
    max_chain: int = MAX_CHAIN,
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[Commit]:
    """Commit a local layout; gives each snapshot as it becomes durable.

    Raises
    ------
    LayoutError
        ``root`` holds nothing of this layout, or a registry is malformed.
    InvalidInputError, BackendError
        As `Repository.commit`.
    """
    options = Options(max_chain=max_chain)
    stored: dict[str, File] = {}
    for draft in drafts(root):
        made = repository.commit(
            _with_base(draft, stored), namespace=namespace, options=options, progress=progress
        )
        is_base = draft.labels.get("part") == "base"
        stored = dict(repository.tree(made.name).files()) if is_base else {}
        yield made


def _with_base(draft: Draft, stored: Mapping[str, File]) -> Draft:
    """The draft of a cell with its base as it was just stored, the first pool file's delta base."""
    pool = [p for p in draft.entries if p.startswith("ckpt/")]
    base = next((f for p, f in stored.items() if p.startswith("zoo/")), None)
    if base is None or not pool:
        return draft
    same = {p: f for p, f in stored.items() if p in draft.entries}
    return replace(draft, entries={**draft.entries, **same}, base={min(pool): base})
