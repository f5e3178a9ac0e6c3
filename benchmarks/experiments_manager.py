"""A whole save by CheckpointManager beside ``torch.save`` + fsync and a clone in memory.

    python benchmarks/experiments_manager.py WORKDIR [--rounds 7] [--layers 22] [--width 1024]
                                             [--cold]

One process, one model with AdamW; each round fills the page cache (see ``local.py``), trains a
step, then measures all ways one after the other. ``block`` is how long
``save_model_checkpoint(wait=False)`` holds up the training loop. A save is delta-coded against the
last one, whose file is in the page cache as it is in a training; with ``--cold`` it may be not.
Prints seconds and CPU seconds of each round, medians, and medians of the ratios of each round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from local import fill_cache

from castore_experiments import CheckpointManager

WAYS = {
    "none": {"compression": "none", "materialize": "documents"},
    "defaults": {},
}


def clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {k: clone(v) for k, v in value.items()}
    return [clone(v) for v in value] if isinstance(value, list | tuple) else value


class Bench:
    def __init__(self, work: Path, layers: int, width: int, cold: bool = False):
        self.cold, self.work, self.width, self.step = cold, work, width, 0
        self.net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-4)
        self.times: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.train()
        self.managers = {}
        for name, options in WAYS.items():
            manager = CheckpointManager(work / name, checkpoint_manager=options)
            manager.watch(model=self.net, optimizer=self.opt, hyperparameters={"lr": 1e-4})
            manager.update_experiment_hash(dump_immediately=True)
            self.managers[name] = manager

    def train(self) -> None:
        self.opt.zero_grad()
        self.net(torch.randn(8, self.width)).square().mean().backward()
        self.opt.step()
        self.step += 1

    def state(self) -> dict[str, Any]:
        return {"model": self.net.state_dict(), "optimizer": self.opt.state_dict()}

    def plain(self) -> None:
        with open(self.work / f"plain{self.step % 2}.pt", "wb") as file:
            torch.save(self.state(), file)
            file.flush()
            os.fsync(file.fileno())

    def timed(self, name: str, call: Callable[[], Any]) -> Any:
        began, cpu = time.perf_counter(), time.process_time()
        result = call()
        self.times[name].append((time.perf_counter() - began, time.process_time() - cpu))
        return result

    def round(self) -> None:
        fill_cache(self.work, patience=10)
        if not self.cold:
            for path in self.work.glob("*/checkpoints/models/*/*.pt"):
                path.read_bytes()
        self.train()
        self.timed("clone", lambda: clone(self.state()))
        self.timed("plain", self.plain)
        for name, manager in self.managers.items():
            self.timed(name, lambda m=manager: m.save_model_checkpoint(step=self.step))
        self.train()
        manager = self.managers["none"]
        handle = self.timed(
            "block", lambda: manager.save_model_checkpoint(step=self.step, wait=False)
        )
        handle.result()


def ratio(times: dict[str, list[tuple[float, float]]], a: str, b: str) -> float:
    return statistics.median(x[0] / y[0] for x, y in zip(times[a], times[b], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--cold", action="store_true")
    given = parser.parse_args()
    given.work.mkdir(parents=True)
    bench = Bench(given.work, given.layers, given.width, given.cold)
    bench.round()
    bench.times.clear()
    for _ in range(given.rounds):
        bench.round()
    size = sum(v.nbytes for v in bench.net.state_dict().values()) * 3
    print(f"{size / 1e6:.0f} MB of weights and moments, {given.rounds} rounds")
    for name, found in bench.times.items():
        wall, cpu = (statistics.median(t[i] for t in found) for i in (0, 1))
        each = " ".join(f"{t[0]:.3f}" for t in found)
        print(f"{name:9} {wall:.3f} s  {cpu:.3f} CPU s   ({each})")
    for a, b in (("none", "plain"), ("defaults", "plain"), ("block", "clone")):
        print(f"{a} / {b}: {ratio(bench.times, a, b):.2f}")


if __name__ == "__main__":
    main()
