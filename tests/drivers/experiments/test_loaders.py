"""Positions of data loaders: field cases RS2, RS3, RS5."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from castore import FormatError, InvalidInputError
from castore_experiments import rng
from castore_experiments.loaders import LoaderWatch, watch_loader

pytestmark = pytest.mark.filterwarnings(
    # torchdata calls what newer torch warns about.
    "ignore:.set_vital. is deprecated:UserWarning"
)

N = 22
SIZE = 4
PER_EPOCH = 6


class Numbers(Dataset[int]):
    """The numbers below ``n``; notes what was read (in this process)."""

    def __init__(self, n: int = N):
        self.n, self.was_read = n, list[int]()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        self.was_read.append(int(i))
        return int(i)


class Lazy(Sampler[int]):
    """Draws from Python's global stream as it goes."""

    def __init__(self, n: int):
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return (random.randrange(self.n) for _ in range(self.n))

    def __len__(self) -> int:
        return self.n


class Own(Sampler[int]):
    """Generators of its own and an epoch, shuffles a fresh list each time."""

    def __init__(self, n: int):
        self.n, self.epoch = n, 0
        self.generator, self.python = np.random.default_rng(3), random.Random(4)

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        order = self.generator.permutation(self.n).tolist()
        self.python.shuffle(order)
        return iter(order[self.epoch % 3 :] + order[: self.epoch % 3])

    def __len__(self) -> int:
        return self.n


class InPlace(Sampler[int]):
    """Shuffles the same hidden list again and again: order that no attribute tells."""

    def __init__(self, n: int):
        self.n, self.box = n, (list(range(n)),)

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.box[0])
        return iter(list(self.box[0]))

    def __len__(self) -> int:
        return self.n


class Remembering(InPlace):
    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.box[0])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.box[0][:] = state["order"]


def shuffled(**more: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), batch_size=SIZE, shuffle=True, **more)


def with_generator(**more: Any) -> DataLoader[int]:
    return shuffled(generator=torch.Generator().manual_seed(5), **more)


def sampled(make: Callable[[Numbers], Any]) -> Callable[..., DataLoader[int]]:
    def loader(**more: Any) -> DataLoader[int]:
        data = Numbers()
        return DataLoader(data, batch_size=SIZE, sampler=make(data), **more)

    return loader


def in_batches(**more: Any) -> DataLoader[int]:
    data = Numbers()
    sampler = BatchSampler(RandomSampler(data), SIZE, drop_last=False)
    return DataLoader(data, batch_sampler=sampler, **more)


def one_by_one(**more: Any) -> DataLoader[int]:
    return DataLoader(Numbers(PER_EPOCH), batch_size=None, shuffle=True, **more)


def stateful(**more: Any) -> Any:
    return StatefulDataLoader(Numbers(), batch_size=SIZE, shuffle=True, **more)


def stateful_with_generator(**more: Any) -> Any:
    return stateful(generator=torch.Generator().manual_seed(6), **more)


LOADERS: dict[str, Callable[..., Any]] = {
    "shuffle": shuffled,
    "generator": with_generator,
    "drop-last": lambda **m: shuffled(drop_last=True, **m),
    "in-order": lambda **m: DataLoader(Numbers(), batch_size=SIZE, **m),
    "batch-sampler": in_batches,
    "one-by-one": one_by_one,
    "replacement": sampled(
        lambda d: RandomSampler(d, replacement=True, generator=torch.Generator().manual_seed(7))
    ),
    "twice-over": sampled(lambda d: RandomSampler(d, num_samples=2 * len(d))),
    "subset": sampled(lambda d: SubsetRandomSampler(list(range(0, len(d), 2)))),
    "weighted": sampled(lambda d: WeightedRandomSampler(list(range(1, N + 1)), N)),
    "distributed": sampled(lambda d: DistributedSampler(d, num_replicas=2, rank=1, seed=9)),
    "own": sampled(lambda d: Own(len(d))),
    "remembering": sampled(lambda d: Remembering(len(d))),
    "stateful": stateful,
    "stateful-generator": stateful_with_generator,
}
WORKERS = {
    "0": {},
    "2": {"num_workers": 2},
    "2-kept": {"num_workers": 2, "persistent_workers": True},
}


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def epochs(loader: Any, first: int = 0) -> Iterator[tuple[int, Any]]:
    """Batches of epoch after epoch; each step of training draws from all global streams."""
    for epoch in itertools.count(first):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            torch.rand(1)
            np.random.rand()
            yield epoch, plain(batch)


def straight(make: Callable[..., Any], how: dict[str, Any], steps: int) -> list[Any]:
    seed(1)
    return list(itertools.islice(epochs(make(**how)), steps))


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def saved_at(
    make: Callable[..., Any], how: dict[str, Any], step: int
) -> tuple[dict[str, Any], Any]:
    """State and streams after ``step`` steps, within the loop, by way of JSON."""
    seed(1)
    loader = make(**how)
    watch = watch_loader("train", loader)
    loop = epochs(loader)
    for _ in range(step):
        next(loop)
    state = json.loads(json.dumps(watch.state()))
    streams = rng.capture()
    return state, streams


def resumed(
    make: Callable[..., Any], how: dict[str, Any], state: dict[str, Any], streams: Any, steps: int
) -> tuple[list[Any], LoaderWatch]:
    seed(99)
    loader = make(**how)
    watch = watch_loader("train", loader)
    assert watch.restore(state).exact
    rng.restore(streams)
    epoch = state["castore"].get("epoch", 0)
    return list(itertools.islice(epochs(loader, epoch), steps)), watch


@pytest.mark.parametrize("kind", LOADERS)
def test_every_loader_goes_on_exactly_without_workers(kind: str) -> None:
    """RS2: "Union of before+after is each id exactly once per epoch, same order"."""
    make = LOADERS[kind]
    expected = [b for _, b in straight(make, {}, 26)]
    for step in (0, 1, 4, 5, 6, 7, 11, 12, 13):
        state, streams = saved_at(make, {}, step)
        assert state["castore"]["exact"], state["castore"]["why"]
        found, _ = resumed(make, {}, state, streams, 26 - step)
        assert [b for _, b in found] == expected[step:], step


@pytest.mark.parametrize("how", ["2", "2-kept"])
@pytest.mark.parametrize("kind", ["shuffle", "generator", "replacement", "stateful", "own"])
def test_loaders_go_on_exactly_with_workers(kind: str, how: str) -> None:
    """RS5: in the middle and at the end of an epoch, workers kept or not."""
    make = LOADERS[kind]
    expected = [b for _, b in straight(make, WORKERS[how], 20)]
    for step in (2, 6, 8):
        state, streams = saved_at(make, WORKERS[how], step)
        assert state["castore"]["exact"], state["castore"]["why"]
        found, _ = resumed(make, WORKERS[how], state, streams, 20 - step)
        assert [b for _, b in found] == expected[step:], step
