"""The base checkpoint: the converged model that a pool is collected from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castore import InvalidInputError
from castore_pools.files import write_file, write_json
from castore_pools.freeze import saved_state
from castore_pools.names import Cell

if TYPE_CHECKING:
    from torch.nn import Module


def save_base(
    root: str | os.PathLike[str],
    cell: Cell,
    model: Module,
    *,
    config: Mapping[str, Any],
    val_metric: float,
    val_loss: float | None = None,
    stoi: Mapping[str, int] | None = None,
) -> Path:
    """Write ``zoo/<dataset>/<arch>/<model_id>.pth`` and its ``config.json``; gives the first.

    The file holds the full ``model_state_dict``, ``config``, ``val_metric``, ``val_loss`` and, for
    a word-level model, ``stoi``; each file whole or not at all, durable on return.

    Raises
    ------
    InvalidInputError
        A value that is not plain, named.
    """
    import torch

    config_, words = plain_config(config), dict(stoi) if stoi is not None else None
    if words is not None and not all(type(k) is str and type(v) is int for k, v in words.items()):
        raise InvalidInputError("stoi maps words to whole numbers")
    document: dict[str, Any] = {
        "model_state_dict": saved_state(model.state_dict(keep_vars=True)),
        "config": config_,
        "val_metric": float(val_metric),
        "val_loss": None if val_loss is None else float(val_loss),
    }
    if words is not None:
        document["stoi"] = words
    path = Path(root) / cell.base_path
    write_json(Path(root) / cell.config_path, config_)
    write_file(path, lambda file: torch.save(document, file))
    return path


def plain_config(value: Any, at: str = "config") -> Any:
    """A configuration of plain values; NumPy and torch scalars become numbers.

    So a weights-only reader takes what was written; `InvalidInputError` names anything else.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain_config(v, f"{at}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_config(v, f"{at}[{i}]") for i, v in enumerate(value)]
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", 1) == 0:
        return plain_config(item(), at)
    raise InvalidInputError(
        f"{at} is a {type(value).__name__}: expected texts, numbers, lists and dicts"
    )
