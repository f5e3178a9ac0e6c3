"""Trainings that `test_exact_resume` stops and goes on with, each time in a new process.

python exact_program.py FOLDER first|second
"""

from __future__ import annotations

import itertools
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from castore_experiments import rng, weights
from castore_experiments.loaders import LoaderWatch, watch_loader

STEPS = 20
PER_EPOCH = 6


class Noisy(Dataset[tuple[int, torch.Tensor]]):
    """Samples; ``noise`` draws from each global stream at every read."""

    def __init__(self, noise: bool):
        self.noise = noise
        self.x = torch.randn(45, 10, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 45

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor]:
        x = self.x[i]
        if self.noise:
            x = x + torch.randn(10) + random.random() + float(np.random.rand())
        return i, x


class Case(NamedTuple):
    optimizer: Callable[[Any], Any]
    schedule: Callable[[Any], Any]
    loader: dict[str, Any]
    stops: tuple[int, ...]
    noise: bool = False


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01)


def steps(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 11], gamma=0.3)


def once(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)


TWO = {"num_workers": 2}
KEPT = {"num_workers": 2, "persistent_workers": True}
CASES = {
    "sgd": Case(sgd, steps, {}, (4,)),
    "sgd, twice within an epoch, data draws": Case(sgd, steps, {}, (8, 10), noise=True),
    "adamw": Case(adamw, once, {}, (3,)),
    "adamw, two workers, twice within an epoch": Case(adamw, once, TWO, (8, 10)),
    "sgd, two kept workers": Case(sgd, once, KEPT, (9,)),
    "adamw, end of an epoch": Case(adamw, steps, {}, (6, 12)),
    "sgd, end of an epoch, workers that draw": Case(sgd, steps, TWO, (6,), noise=True),
    "adamw, end of an epoch, two kept workers": Case(adamw, once, KEPT, (12,)),
}


class Run:
    """One training, begun with the random streams at ``seed``."""

    def __init__(self, case: Case, seed: int):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Dropout(0.4), nn.Linear(16, 1)
        )
        self.optimizer = case.optimizer(self.model.parameters())
        self.scheduler = case.schedule(self.optimizer)
        data = Noisy(case.noise)
        self.loader = DataLoader(data, batch_size=8, shuffle=True, **case.loader)
        self.watch: LoaderWatch = watch_loader("train", self.loader)
        self.log: list[Any] = []

    def batches(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def train(self, count: int) -> Iterator[None]:
        for ids, x in itertools.islice(self.batches(), count):
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.log.append((ids.tolist(), loss.item(), random.random(), np.random.normal()))
            yield

    def save(self, step: int, buffers: weights.Buffers) -> bytes:
        parts = (self.model, self.optimizer, self.scheduler)
        captured = weights.capture(*parts, buffers=buffers)
        data = bytes(
            weights.encode(
                captured,
                step=step,
                exp_hash="0" * 24,
                timestamp="2026-01-01T00:00:00",
                rng_state=rng.capture(),
                loaders={"train": self.watch.state()},
            )
        )
        captured.release()
        return data

    def resume(self, path: Path) -> int:
        file = weights.decode(path.read_bytes(), path.name)
        weights.apply(file, self.model, self.optimizer, self.scheduler)
        assert self.watch.restore(file.loaders["train"]).exact
        assert rng.restore(file.rng_state).exact
        return file.step

    def result(self) -> dict[str, Any]:
        optimizer = [v for s in self.optimizer.state_dict()["state"].values() for v in s.values()]
        return {
            "log": self.log,
            "model": list(self.model.state_dict().values()),
            "optimizer": [v for v in optimizer if isinstance(v, torch.Tensor)],
            "lr": self.scheduler.get_last_lr(),
        }


def straight(case: Case) -> dict[str, Any]:
    run = Run(case, seed=1)
    for _ in run.train(STEPS):
        pass
    return run.result()


def first(case: Case, folder: Path) -> list[Any]:
    """Train and save at each stop, the last of which ends it; the log so far."""
    run, buffers = Run(case, seed=1), weights.Buffers()
    for step, _ in enumerate(run.train(case.stops[-1]), 1):
        if step in case.stops:
            (folder / f"{step}.pt").write_bytes(run.save(step, buffers))
    return run.log


def second(case: Case, folder: Path, stop: int) -> dict[str, Any]:
    """Go on from a stop to the end."""
    run = Run(case, seed=77)
    step = run.resume(folder / f"{stop}.pt")
    for _ in run.train(STEPS - step):
        pass
    return run.result()


def main(folder: Path, part: str) -> None:
    for i, case in enumerate(CASES.values()):
        here = folder / str(i)
        here.mkdir(exist_ok=True)
        if part == "first":
            torch.save(first(case, here), here / "log")
        else:
            for stop in case.stops:
                torch.save(second(case, here, stop), here / f"{stop}.result")


if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
