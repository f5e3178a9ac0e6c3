"""Train a small real model, keep its checkpoints in a repository, get them back, compare.

python scripts/quickstart.py --work DIR --repository URL
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

WIDTH, CHECKPOINTS, STEPS = 620, 5, 60


class Digits(nn.Module):
    """Tells which of ten hidden patterns a noisy vector was made from."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of shape (batch, 10) for x of shape (batch, 64)."""
        return self.layers(x)


def batch(
    patterns: torch.Tensor, count: int, source: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy copies of random patterns, and which ones they are."""
    labels = torch.randint(len(patterns), (count,), generator=source)
    noise = torch.randn(count, patterns.shape[1], generator=source)
    return patterns[labels] + 2.5 * noise, labels


def train(folder: Path) -> None:
    """Train with AdamW; a checkpoint of weights and optimizer state every few steps."""
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(1)
    patterns = torch.randn(10, 64, generator=source)
    model = Digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    held_out, answers = batch(patterns, 2000, source)
    folder.mkdir(parents=True)
    for number in range(1, CHECKPOINTS + 1):
        for _ in range(STEPS):
            x, y = batch(patterns, 128, source)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = (model(held_out).argmax(1) == answers).float().mean().item()
        state = {
            "step": number * STEPS,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        path = folder / f"step_{number * STEPS:06d}.pt"
        torch.save(state, path)
        size = path.stat().st_size / 1e6
        print(
            f"  step {number * STEPS:4d}  loss {loss.item():.3f}  accuracy {right:.3f}"
            f"  {path.name} {size:.1f} MB",
            flush=True,
        )


def castore(*words: str) -> None:
    """Run one command of the command line, shown as one would type it."""
    print(f"\n$ castore {shlex.join(words)}", flush=True)
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "castore.cli", *words], check=True)
    print(f"  ({time.monotonic() - began:.1f} s)", flush=True)


def compare(run: Path, copy: Path) -> None:
    """Byte by byte, and as torch reads it."""
    for path in sorted(run.iterdir()):
        again = copy / path.name
        digests = [hashlib.sha256(p.read_bytes()).hexdigest() for p in (path, again)]
        if digests[0] != digests[1]:
            sys.exit(f"{again} differs from {path}")
        state = torch.load(again, weights_only=True)
        Digits().load_state_dict(state["model"])
        print(
            f"  {again.name}: same bytes, sha256 {digests[0][:16]}..., loads (step {state['step']})"
        )


def main() -> None:
    """Everything, from nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder to work in; emptied first")
    parser.add_argument("--repository", required=True, help="path or URL of the repository to make")
    options = parser.parse_args()
    os.environ["CASTORE_REPOSITORY"] = options.repository
    shutil.rmtree(options.work, ignore_errors=True)
    run, copy = options.work / "run", options.work / "copy"

    print(f"training {CHECKPOINTS} checkpoints into {run}", flush=True)
    train(run)
    castore("init")
    castore("commit", str(run), "-n", "quickstart", "--label", "optimizer=adamw")
    castore("snapshots")
    castore("ls", "latest")
    castore("usage")
    castore("check", "--read-data")
    castore("checkout", "latest", str(copy))
    print("\ncomparing what came back", flush=True)
    compare(run, copy)


if __name__ == "__main__":
    main()
