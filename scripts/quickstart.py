"""Train a small real model under a CheckpointManager: edit, branch, resume, see what is kept.

python scripts/quickstart.py --work DIR --root URL --repository URL
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from castore_experiments import CheckpointManager
from castore_experiments.files import open_files

WIDTH, SAMPLES, NAMESPACE = 620, 2048, "quickstart"


class Digits(nn.Module):
    """Tells which of ten hidden patterns a noisy vector was made from."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, WIDTH),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(WIDTH, WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of shape (batch, 10) for x of shape (batch, 64)."""
        logits: torch.Tensor = self.layers(x)
        return logits


def dataset() -> TensorDataset:
    """Numbers of samples, noisy copies of random patterns, and which ones they are."""
    source = torch.Generator().manual_seed(1)
    patterns = torch.randn(10, 64, generator=source)
    labels = torch.randint(10, (SAMPLES,), generator=source)
    noise = torch.randn(SAMPLES, 64, generator=source)
    return TensorDataset(torch.arange(SAMPLES), patterns[labels] + 2.5 * noise, labels)


class Training:
    """What the manager watches, and the loop."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Digits()
        self.config: dict[str, Any] = {"lr": 2e-4, "width": WIDTH, "experiment_name": "digits"}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config["lr"])
        self.samples = pd.DataFrame(
            {
                "sample_id": [str(i) for i in range(SAMPLES)],
                "discarded": False,
                "tag:odd": False,
            }
        )
        self.loader = DataLoader(dataset(), batch_size=128, shuffle=True)
        self.step = 0

    def open(self, root: str, options: dict[str, Any]) -> CheckpointManager:
        """A manager that watches this training, and the step that it resumed."""
        manager = CheckpointManager(root, checkpoint_manager=options)
        manager.watch(
            model=self.model,
            optimizer=self.optimizer,
            hyperparameters=self.config,
            data=self.samples,
            dataloaders={"train": self.loader},
        )
        hash = manager.get_latest_hash()
        if hash is not None:
            self.step = manager.load_checkpoint(hash)["weights"]["step"]
        return manager

    def train(self, manager: CheckpointManager, steps: int) -> None:
        """Some steps over the samples that are not discarded, then a checkpoint."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config["lr"]
        discarded = torch.tensor(self.samples["discarded"].to_numpy(dtype=bool))
        end = self.step + steps
        while self.step < end:
            for ids, x, y in self.loader:
                kept = ~discarded[ids]
                loss = nn.functional.cross_entropy(self.model(x[kept]), y[kept])
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.step += 1
                manager.log("loss", loss.item(), self.step)
                if self.step == end:
                    break
        metrics = {"loss": loss.item()}
        path = manager.save_model_checkpoint(step=self.step, metrics=metrics)
        print(f"  step {self.step:4d}  loss {loss.item():.3f}  {Path(str(path)).name}", flush=True)


def say(text: str) -> None:
    """A headline."""
    print(f"\n== {text}", flush=True)


def castore(*words: str) -> str:
    """Run one command of the command line, shown as one would type it; gives what it printed."""
    print(f"\n$ castore {shlex.join(words)}", flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "castore.cli", *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    shown = lines if len(lines) <= 24 else [*lines[:12], "...", *lines[-6:]]
    print("\n".join([*shown, f"  ({time.monotonic() - began:.1f} s)"]), flush=True)
    return done.stdout


def first_run(root: str, options: dict[str, Any]) -> tuple[str, str, str]:
    """Train, edit the configuration, tag and discard samples; the hashes of all three."""
    training = Training(seed=0)
    with training.open(root, options) as manager:
        say("train")
        first = manager.update_experiment_hash(dump_immediately=True).hash
        training.train(manager, 40)
        training.train(manager, 40)
        say("edit the learning rate: it waits until the next save")
        training.config["lr"] = 5e-4
        second = manager.update_experiment_hash()
        print(f"  {second}\n  pending: {manager.has_pending_changes()}")
        training.train(manager, 40)
        say("tag and discard samples: written at once")
        training.samples.loc[[3, 7, 11], "discarded"] = True
        training.samples.loc[1::2, "tag:odd"] = True
        third = manager.update_experiment_hash(dump_immediately=True)
        print(f"  {third}")
        training.train(manager, 40)
    return first, second.hash, third.hash


def resume(root: str, options: dict[str, Any], hash: str) -> None:
    """A new program opens the root: everything is as it was left."""
    say("resume: the same call in a new program")
    training = Training(seed=99)
    with training.open(root, options) as manager:
        assert manager.current_exp_hash == hash
        assert manager.update_experiment_hash().changed == {"hp"}, "this program's lr differs"
        training.config["lr"] = 5e-4
        assert manager.update_experiment_hash().hash == hash
        count = int(training.samples["discarded"].sum())
        print(f"  {hash} at step {training.step}, {count} samples discarded")
        training.train(manager, 20)


def branch(root: str, options: dict[str, Any], hash: str) -> str:
    """Back to an older state, and on from there; the hash of the branch."""
    say("branch: back to the first hash at step 40, with another learning rate")
    training = Training(seed=5)
    with training.open(root, options) as manager:
        assert manager.load_state(hash, force=True, target_step=40)
        training.step = 40
        assert not training.samples["discarded"].any()
        training.config["lr"] = 1e-3
        update = manager.update_experiment_hash(dump_immediately=True)
        print(f"  {update}")
        training.train(manager, 40)
    return update.hash


def tree(root: str) -> None:
    """The documented files of the root, with their sizes."""
    say(f"the root {root}")
    for stat in open_files(root).list("checkpoints"):
        print(f"  {stat.size:>9}  {stat.name}")


def compare(copy: Path) -> None:
    """The weights that were checked out load into the model."""
    for path in sorted(copy.rglob("*.pt")):
        state = torch.load(path, weights_only=True)
        Digits().load_state_dict(state["model_state_dict"])
        print(f"  {path.name} loads (step {state['step']})")


def main() -> None:
    """Everything, from nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder to work in; emptied first")
    parser.add_argument("--root", required=True, help="path or URL of the experiment's root")
    parser.add_argument("--repository", required=True, help="path or URL of the repository to make")
    given = parser.parse_args()
    os.environ["CASTORE_REPOSITORY"] = given.repository
    os.environ["XDG_STATE_HOME"] = str(given.work.resolve() / "state")
    shutil.rmtree(given.work, ignore_errors=True)
    options = {"repository": given.repository, "namespace": NAMESPACE}

    first, second, third = first_run(given.root, options)
    resume(given.root, options, third)
    branched = branch(given.root, options, first)

    say("what there is")
    castore("experiments", "runs", given.root)
    castore("experiments", "why", given.root, first, second)
    castore("experiments", "why", given.root, second, third)
    castore("experiments", "curves", given.root, "loss", "--hash", branched)
    castore("experiments", "verify", given.root)
    tree(given.root)
    say("the store behind it")
    castore("snapshots", "-n", NAMESPACE)
    castore("usage")
    castore("check", "--read-data")
    copy = given.work / "copy"
    castore("checkout", f"{NAMESPACE}@latest", str(copy))
    compare(copy)


if __name__ == "__main__":
    main()
