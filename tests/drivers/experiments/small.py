"""Small roots, and what is told while they are used, for the tests of live roots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from castore_experiments import CheckpointManager
from castore_experiments.files import open_files


class Said(list[str]):
    """What a manager told people."""

    def has(self, text: str) -> bool:
        return any(text in line for line in self)


def opened(root: str | Path, said: Said | None = None, **more: Any) -> CheckpointManager:
    """A manager whose words go to ``said``."""
    return CheckpointManager(root, report=(Said() if said is None else said).append, **more)


def net(width: int = 4, fill: float = 0.0) -> torch.nn.Linear:
    """A model without randomness: every weight is ``fill``."""
    made = torch.nn.Linear(2, width)
    with torch.no_grad():
        for p in made.parameters():
            p.fill_(fill)
    return made


def filled(found: Any) -> float:
    """What `net` filled the weights of a loaded checkpoint with."""
    value: float = found["weights"]["model_state_dict"]["weight"][0, 0].item()
    return value


def started(root: str | Path, said: Said | None = None, **options: Any) -> CheckpointManager:
    """A root with one hash, weights of step 1 (filled with 1) and a point of a curve."""
    manager = opened(root, said, checkpoint_manager=options)
    manager.watch(model=net(fill=1.0), hyperparameters={"lr": 1.0})
    manager.update_experiment_hash()
    manager.log("loss", 0.5, 1)
    manager.save_model_checkpoint(step=1)
    return manager


def listing(root: str | Path) -> dict[str, tuple[float, str]]:
    """Time and version of every file of a root, its repository's too."""
    return {s.name: (s.modified, s.version) for s in open_files(root).list("")}


def read(root: str | Path, name: str) -> bytes:
    return open_files(root).get(name)
