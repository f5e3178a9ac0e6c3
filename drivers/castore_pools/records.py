"""What the registry's record of a cell says; pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from castore_pools.freeze import count_elements
from castore_pools.names import Cell
from castore_pools.pins import FIELD, Pin


def counts(state: Mapping[str, Any], frozen: Sequence[str]) -> dict[str, int]:
    """Elements in all, frozen, and left to generate; tied tensors count once."""
    total, held = count_elements(state), count_elements(state, frozen)
    return {"total_params": total, "frozen_params": held, "generated_params": total - held}


def record(
    cell: Cell,
    base: Mapping[str, Any],
    settings: Mapping[str, Any],
    pin: Pin,
    logs: Sequence[Mapping[str, Any]],
    counted: Mapping[str, int],
    check: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The record: base training, collection, per-checkpoint logs, statistics, counts, digests."""
    training = {
        "config": base.get("config"),
        "val_metric": base.get("val_metric"),
        "val_loss": base.get("val_loss"),
        "assemble_check": dict(check) if check is not None else None,
    }
    return {
        "cell": cell.name,
        "task": cell.task,
        "arch": cell.arch,
        "dataset": cell.dataset,
        "model_id": cell.model_id,
        "ckpt_path": cell.base_path,
        "pool_path": cell.pool_folder,
        "training_info": training,
        "collect_config": dict(settings),
        "frozen_keys": list(settings["frozen_keys"]),
        **counted,
        "pool": pool_statistics(logs),
        FIELD: pin.document(),
        "checkpoints": [dict(log) for log in logs],
    }


def pool_statistics(logs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Count, and the spread of metric and loss over the pool."""
    found: dict[str, Any] = {"count": len(logs)}
    for name in ("val_metric", "val_loss"):
        values = [float(log[name]) for log in logs if log.get(name) is not None]
        if values:
            found[name] = {
                "min": min(values),
                "max": max(values),
                "mean": fmean(values),
                "std": pstdev(values),
            }
    return found
