"""The layout's paths: what each file is called, and what its path says.

    zoo/<dataset>/<arch>/<model_id>.pth
    ckpt/<task>/<arch>__<dataset>/<model_id>/collect_000.pth ...
    metadata/configs/<task>/<arch>__<dataset>/<model_id>/config.json, collect_config.json
    metadata/registry/<task>.json

Names are checked by an allow-list before any path is made of them, so no path leaves the root.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from castore import InvalidInputError, LayoutError

_ID = r"[A-Za-z0-9](?:[A-Za-z0-9._+=-]{0,126}[A-Za-z0-9_+=-])?"
_NAME = re.compile(_ID)
_BASE = re.compile(rf"zoo/({_ID})/({_ID})/({_ID})\.pth")
_CELL_FILE = re.compile(rf"(?:ckpt|metadata/configs)/({_ID})/({_ID})/({_ID})/([^/]+)")
_COLLECTED = re.compile(r"collect_([0-9]{3,9})\.pth")
_REGISTRY = re.compile(rf"metadata/registry/({_ID})\.json")

STATE = "collect_state.pt"
"""Beside the pool files while a collection is under way: optimizer, random numbers, counters."""


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One pool: a model of one architecture on one dataset. Checked when made."""

    task: str
    arch: str
    dataset: str
    model_id: str

    def __post_init__(self) -> None:
        for field in ("task", "arch", "dataset", "model_id"):
            check_id(field, getattr(self, field))
        if "__" in self.arch:
            raise InvalidInputError(f"arch {self.arch!r}: '__' parts architecture from dataset")

    @property
    def name(self) -> str:
        """``<arch>__<dataset>``."""
        return f"{self.arch}__{self.dataset}"

    @property
    def base_path(self) -> str:
        return f"zoo/{self.dataset}/{self.arch}/{self.model_id}.pth"

    @property
    def pool_folder(self) -> str:
        return f"ckpt/{self.task}/{self.name}/{self.model_id}"

    @property
    def config_folder(self) -> str:
        return f"metadata/configs/{self.task}/{self.name}/{self.model_id}"

    @property
    def config_path(self) -> str:
        return f"{self.config_folder}/config.json"

    @property
    def collect_config_path(self) -> str:
        return f"{self.config_folder}/collect_config.json"

    @property
    def registry_path(self) -> str:
        return f"metadata/registry/{self.task}.json"

    def pool_path(self, index: int) -> str:
        return f"{self.pool_folder}/{collected_name(index)}"

    def __str__(self) -> str:
        return f"{self.task}/{self.name}/{self.model_id}"


def check_id(field: str, value: object) -> str:
    """``value`` if it may stand in a path, else `InvalidInputError` that names the field."""
    if not isinstance(value, str) or not _NAME.fullmatch(value) or ".." in value:
        raise InvalidInputError(
            f"{field} {value!r}: expected 1 to 128 letters, digits or . _ + = -, beginning with a"
            " letter or digit, without '..'"
        )
    return value


def check_base_path(value: object, field: str = "ckpt_path") -> str:
    """A base's path below a root, else `LayoutError` that names the field."""
    if not isinstance(value, str) or ".." in value or not _BASE.fullmatch(value):
        raise LayoutError(f"{field} {value!r}: expected zoo/<dataset>/<arch>/<model_id>.pth")
    return value


def base_names(path: str) -> tuple[str, str, str]:
    """Dataset, architecture and model of a base's path below a root."""
    match = _BASE.fullmatch(check_base_path(path, "base"))
    assert match is not None
    dataset, arch, model_id = match.groups()
    return dataset, arch, model_id


def cell_of(path: str) -> Cell | None:
    """The cell whose pool or configs ``path`` (below a root) belongs to, or None."""
    match = _CELL_FILE.fullmatch(path)
    if match is None or ".." in path:
        return None
    task, name, model_id, _ = match.groups()
    arch, parted, dataset = name.partition("__")
    if not parted or not _NAME.fullmatch(arch) or not _NAME.fullmatch(dataset):
        return None
    return Cell(task, arch, dataset, model_id)


def is_base(path: str) -> bool:
    return ".." not in path and _BASE.fullmatch(path) is not None


def registry_task(path: str) -> str | None:
    """The task whose registry ``path`` is, or None."""
    match = _REGISTRY.fullmatch(path)
    return match[1] if match else None


def collected_name(index: int) -> str:
    """``collect_000.pth``."""
    return f"collect_{index:03d}.pth"


def collected_index(path: str) -> int | None:
    """The number of a pool file, or None for any other."""
    match = _COLLECTED.fullmatch(path.rpartition("/")[2])
    if match is None or collected_name(int(match[1])) != path.rpartition("/")[2]:
        return None
    return int(match[1])


def split_root(path: str) -> tuple[str, str] | None:
    """A full address of a base or pool file as root and path below it, or None."""
    parts = path.split("/")
    for count, first in ((4, "zoo"), (5, "ckpt")):
        if len(parts) >= count and parts[-count] == first:
            below = "/".join(parts[-count:])
            if is_base(below) or (cell_of(below) and collected_index(below) is not None):
                return "/".join(parts[:-count]) or ("/" if path.startswith("/") else "."), below
    return None
