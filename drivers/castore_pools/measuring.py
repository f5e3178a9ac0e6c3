"""What a collection does with a model beside training it: make its optimizer, measure, write."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from castore import InvalidInputError
from castore_pools.assembly import assemble
from castore_pools.files import write_file
from castore_pools.freeze import saved_state

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

Evaluate: TypeAlias = "Callable[[Module], tuple[float, float]]"
MakeOptimizer: TypeAlias = "Callable[[list[Parameter], float], Optimizer]"


def measure(
    model: Module, evaluate: Evaluate, state: Mapping[str, Any] | None = None
) -> tuple[float, float]:
    """Metric and loss of the model, with ``state`` loaded meanwhile where one is given.

    Weights and training modes are as before afterwards.
    """
    modes = [(m, m.training) for m in model.modules()]
    before = None if state is None else saved_state(model.state_dict(keep_vars=True))
    try:
        if state is not None:
            model.load_state_dict(state, strict=True)
        metric, loss = evaluate(model)
        return float(metric), float(loss)
    finally:
        if before is not None:
            model.load_state_dict(before, strict=True)
        for module, training in modes:
            module.training = training


def assemble_check(
    model: Module, evaluate: Evaluate, base: Path, folder: Path, first: Mapping[str, Any]
) -> dict[str, Any]:
    """Whether the reassembled first file reproduces its logged metric; weights are put back."""
    state = assemble(base, folder / first["file"])
    metric, loss = measure(model, evaluate, state)
    return {
        "ok": metric == first["val_metric"] and loss == first["val_loss"],
        "file": first["file"],
        "val_metric": metric,
        "val_loss": loss,
        "logged_val_metric": first["val_metric"],
        "logged_val_loss": first["val_loss"],
    }


def make_optimizer(kind: str | MakeOptimizer, parameters: list[Parameter], lr: float) -> Optimizer:
    """A fresh optimizer, torch's defaults but for the learning rate."""
    import torch

    if not isinstance(kind, str):
        return kind(parameters, lr)
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    if kind not in kinds:
        raise InvalidInputError(f"optimizer {kind!r}: expected {', '.join(kinds)} or a callable")
    made: Optimizer = kinds[kind](parameters, lr=lr)
    return made


def write_checkpoint(path: Path, document: Mapping[str, Any]) -> str:
    """Write a pool file, all or nothing; gives its SHA-256."""
    import torch

    write_file(path, lambda file: torch.save(dict(document), file))
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
