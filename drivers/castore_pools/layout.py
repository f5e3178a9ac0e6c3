"""Which cells a layout holds, and which files belong to each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from castore import LayoutError
from castore_pools.names import Cell, cell_of, collected_index, is_base, registry_task
from castore_pools.places import Place
from castore_pools.registry import Record, read_registries


@dataclass(frozen=True, slots=True)
class CellFiles:
    """One cell: its base (whether it is there or not), numbered pool files, other files, record."""

    cell: Cell
    base: str | None
    pool: Mapping[int, str]
    configs: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    record: Record | None = None


@dataclass(frozen=True, slots=True)
class Survey:
    """A layout: cells, bases without a pool, and files that belong to nothing of it."""

    cells: tuple[CellFiles, ...]
    bases: tuple[str, ...]
    rest: tuple[str, ...]
    registries: tuple[str, ...] = field(default=())


def survey(place: Place) -> Survey:
    """What ``place`` holds.

    Raises
    ------
    LayoutError
        Nothing of this layout is there, or a registry is malformed.
    """
    paths = place.paths()
    files: dict[Cell, list[str]] = defaultdict(list)
    rest = []
    for path in paths:
        cell = cell_of(path)
        if cell is not None:
            files[cell].append(path)
        elif not is_base(path) and registry_task(path) is None:
            rest.append(path)
    records = {r.cell: r for r in read_registries(place)}
    for cell in records:
        files.setdefault(cell, [])
    bases = {p for p in paths if is_base(p)}
    cells = tuple(_cell(c, files[c], bases, records.get(c)) for c in sorted(files))
    used = {c.cell.base_path for c in cells}
    if not cells and not bases:
        raise LayoutError(
            f"{place.where}: neither zoo/<dataset>/<arch>/<model_id>.pth nor pool files below"
            " ckpt/<task>/<arch>__<dataset>/<model_id>/ are there: not a pools layout"
        )
    registries = tuple(p for p in paths if registry_task(p) is not None)
    return Survey(cells, tuple(sorted(bases - used)), tuple(rest), registries)


def _cell(cell: Cell, paths: list[str], bases: set[str], record: Record | None) -> CellFiles:
    pool: dict[int, str] = {}
    configs: list[str] = []
    other: list[str] = []
    for path in paths:
        index = collected_index(path) if path.startswith("ckpt/") else None
        if index is not None:
            pool[index] = path
        else:
            (configs if path.startswith("metadata/") else other).append(path)
    base = cell.base_path if cell.base_path in bases else None
    return CellFiles(cell, base, dict(sorted(pool.items())), tuple(configs), tuple(other), record)
