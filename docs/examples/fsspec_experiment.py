"""Experiments: the whole layout of a root, also the weight files that are not on the disk."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import fsspec
import torch

from castore_experiments import CheckpointManager

with TemporaryDirectory() as folder:
    root, model = Path(folder, "exp"), torch.nn.Linear(4, 2)
    with CheckpointManager(root) as manager:
        manager.watch(model=model, hyperparameters={"lr": 0.1})
        manager.update_experiment_hash(dump_immediately=True)
        for step in (1, 2, 3):
            torch.nn.init.constant_(model.weight, step)
            manager.save_model_checkpoint(step=step)
    namespace = json.loads((root / ".castore/root.json").read_text())["namespace"]

    fs = fsspec.filesystem("castore", repository=str(root / ".castore"))
    weights = fs.glob(f"{namespace}/checkpoints/models/*/*.pt")
    real = sorted(root.glob("checkpoints/models/*/*.pt"))
    assert len(weights) > len(real) == 1
    with fs.open(weights[1]) as file:
        state = torch.load(file, weights_only=True)
    print(weights[1], state["step"], state["model_state_dict"]["weight"][0])
    print(fs.cat(f"{namespace}/checkpoints/manifest.yaml").decode()[:60])
