"""``metadata/registry/<task>.json``: one record a cell, read from anywhere, written atomically.

Written as a list of records. Read also as a mapping of cell to record, or below ``records`` or
``cells``; the form that a file has is kept when a record is put into it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from castore import LayoutError
from castore_pools.files import folder_lock, write_json
from castore_pools.names import Cell, base_names, check_base_path, check_id, registry_task
from castore_pools.places import Place

MAX_REGISTRY = 256 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """One record, its identity checked; ``body`` is the record as it stands."""

    cell: Cell
    body: Mapping[str, Any]

    @property
    def ckpt_path(self) -> str:
        return check_base_path(self.body.get("ckpt_path"), f"{self.cell}: ckpt_path")

    @property
    def pool_folder(self) -> str:
        return self.cell.pool_folder

    @property
    def base_digest(self) -> str:
        return str(self.part("pin").get("base", ""))

    @property
    def checkpoints(self) -> list[Mapping[str, Any]]:
        """The per-checkpoint logs."""
        logs = self.body.get("checkpoints", [])
        if not isinstance(logs, list) or not all(isinstance(c, dict) for c in logs):
            raise LayoutError(f"{self.cell}: 'checkpoints' is no list of records")
        for name in ("val_metric", "val_loss"):
            if not all(c.get(name) is None or _is_finite(c[name]) for c in logs):
                raise LayoutError(f"{self.cell}: a {name} of 'checkpoints' is no finite number")
        if not all(isinstance(c.get("file", ""), str) for c in logs):
            raise LayoutError(f"{self.cell}: a file of 'checkpoints' is no text")
        return logs

    def part(self, name: str) -> Mapping[str, Any]:
        """One of the record's objects, empty where it is none."""
        found = self.body.get(name)
        return found if isinstance(found, dict) else {}


def _is_finite(value: Any) -> bool:
    """Whether it is a number that a float64 holds."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def parse_registry(data: bytes, task: str, where: str) -> list[Record]:
    """The records of a registry file; `LayoutError` that names the field for a bad one."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise LayoutError(f"{where}: not JSON: {e}") from e
    return [Record(_cell(body, name, task, where), body) for name, body in _bodies(document, where)]


def _bodies(document: Any, where: str) -> Iterator[tuple[str | None, dict[str, Any]]]:
    inner = _inner(document)
    pairs = inner.items() if isinstance(inner, dict) else ((None, b) for b in inner or ())
    for name, body in pairs:
        if name is not None and not isinstance(body, dict):
            continue  # a word about the whole registry
        if not isinstance(body, dict):
            raise LayoutError(f"{where}: a record that is a {type(body).__name__}, expected a dict")
        yield name, body


def _inner(document: Any) -> Any:
    """The list or mapping that holds the records."""
    for name in ("records", "cells"):
        if isinstance(document, dict) and isinstance(document.get(name), list | dict):
            return document[name]
    return document if isinstance(document, list | dict) else []


def _cell(body: Mapping[str, Any], name: str | None, task: str, where: str) -> Cell:
    dataset, arch, model_id = base_names(
        check_base_path(body.get("ckpt_path"), f"{where}: ckpt_path")
    )
    for field, value in (("arch", arch), ("dataset", dataset), ("model_id", model_id)):
        said = check_id(f"{where}: {field}", body.get(field, value))
        if said != value:
            raise LayoutError(f"{where}: {field} {said!r} contradicts ckpt_path's {value!r}")
    cell = Cell(task, arch, dataset, model_id)
    said = body.get("cell", name)
    if said is not None and said not in (cell.name, str(cell), f"{cell.name}/{model_id}"):
        raise LayoutError(f"{where}: cell {said!r} contradicts ckpt_path's {cell.name!r}")
    return cell


def read_registries(place: Place) -> list[Record]:
    """All records of a layout."""
    found = []
    for path in place.paths("metadata/registry"):
        task = registry_task(path)
        if task is not None:
            source = place.source(path)
            if source.size > MAX_REGISTRY:
                raise LayoutError(f"{source.where}: {source.size} bytes, at most {MAX_REGISTRY}")
            found += parse_registry(source.read(0, source.size), task, source.where)
    return found


def find_record(place: Place, *, ckpt_path: str) -> dict[str, Any] | None:
    """The record of the base at ``ckpt_path``, or None."""
    for record in read_registries(place):
        if record.ckpt_path == ckpt_path:
            return dict(record.body)
    return None


def read_record(root: Path, cell: Cell) -> dict[str, Any] | None:
    """The record of one cell in a local layout, or None."""
    path = root / cell.registry_path
    if not path.exists():
        return None
    for record in parse_registry(path.read_bytes(), cell.task, str(path)):
        if record.cell == cell:
            return dict(record.body)
    return None


def put_record(root: Path, cell: Cell, body: Mapping[str, Any]) -> None:
    """Put one cell's record into its registry, all or nothing; others' records stay.

    Writers of different cells wait for one another; readers never do.
    """
    change_registry(root / cell.registry_path, cell.task, {cell: body})


def change_registry(path: Path, task: str, records: Mapping[Cell, Mapping[str, Any]]) -> None:
    """Put several records into a registry file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with folder_lock(path.parent):
        document = _document(path, task) if path.exists() else []
        for cell, body in records.items():
            _put(document, cell, body, lambda b, n: _cell(b, n, task, str(path)))
        write_json(path, document)


def _document(path: Path, task: str) -> Any:
    """A registry that a record can be put into; `LayoutError` for one that has none of the forms.

    Nothing is written over what somebody meant otherwise.
    """
    data = path.read_bytes()
    parse_registry(data, task, str(path))
    document = json.loads(data)
    if not isinstance(document, list | dict):
        raise LayoutError(f"{path}: a {type(document).__name__}, expected a list of records")
    return document


def _put(
    document: Any,
    cell: Cell,
    body: Mapping[str, Any],
    cell_of: Callable[[Mapping[str, Any], str | None], Cell],
) -> None:
    inner = _inner(document)
    names = list(inner) if isinstance(inner, dict) else range(len(inner))
    for name in names:
        if not isinstance(inner[name], dict):
            continue  # a word about the whole registry
        if cell_of(inner[name], name if isinstance(name, str) else None) == cell:
            inner[name] = dict(body)
            return
    if isinstance(inner, dict):
        inner[cell.name if cell.name not in inner else f"{cell.name}/{cell.model_id}"] = dict(body)
    else:
        inner.append(dict(body))
        inner.sort(key=lambda b: str(cell_of(b, None)))
