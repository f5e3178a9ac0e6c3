"""castore_experiments: version an experiment by content, on a local root or on S3.

    from castore_experiments import CheckpointManager
    manager = CheckpointManager(root_log_dir="./logs/exp")

Importing this package is cheap: torch, pandas and DuckDB are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from castore_experiments.api import manager_of, watch_or_edit
    from castore_experiments.manager import CheckpointManager

_HOMES = {
    "CheckpointManager": "castore_experiments.manager",
    "manager_of": "castore_experiments.api",
    "watch_or_edit": "castore_experiments.api",
}

__all__ = ["CheckpointManager", "manager_of", "watch_or_edit"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(home), name)
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("castore"):
            raise
        raise ModuleNotFoundError(
            f"{name} needs {e.name}: pip install 'castore[experiments]'", name=e.name
        ) from e
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
