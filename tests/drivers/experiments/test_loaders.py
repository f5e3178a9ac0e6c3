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
from castore_experiments.packing import unpack

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


@pytest.mark.parametrize(
    ("how", "step", "told"), [("2", 8, True), ("2", 6, False), ("0", 8, False)]
)
def test_fresh_seeds_of_workers_within_an_epoch_are_told(how: str, step: int, told: bool) -> None:
    """The order is exact, what workers draw is not: a resume says so, and only where it is so."""
    state, _ = saved_at(shuffled, WORKERS[how], step)
    seed(99)
    report = watch_loader("train", shuffled(**WORKERS[how])).restore(state)
    assert report.exact and ("fresh seeds" in report.why) is told


def drops_last(**more: Any) -> DataLoader[int]:
    """Its sampler draws from its generator once more when a pass ends, as torch's does."""
    sampler = RandomSampler(Numbers(), generator=torch.Generator().manual_seed(9))
    return DataLoader(Numbers(), batch_sampler=BatchSampler(sampler, SIZE, True), **more)


def test_a_pass_that_workers_brought_to_its_end_ahead_of_the_loop() -> None:
    """RS5: what the sampler drew at the end of its pass is drawn once: later epochs are the same"""
    expected = [b for _, b in straight(drops_last, WORKERS["2"], 18)]
    for step in (2, 3, 4):
        state, streams = saved_at(drops_last, WORKERS["2"], step)
        assert state["castore"]["exact"], state["castore"]["why"]
        found, _ = resumed(drops_last, WORKERS["2"], state, streams, 18 - step)
        assert [b for _, b in found] == expected[step:], step


def begun(loader: Any, steps: int) -> tuple[LoaderWatch, Any]:
    """A watch, and a loop that took ``steps`` batches and is held."""
    watch = watch_loader("train", loader)
    loop = iter(loader)
    for _ in range(steps):
        next(loop)
    return watch, loop


def ours(watch: LoaderWatch) -> dict[str, Any]:
    return dict(watch.state()["castore"])


@pytest.mark.parametrize("how", WORKERS)
def test_what_is_counted_was_handed_out_not_fetched_ahead(how: str) -> None:
    loader = shuffled(**WORKERS[how])
    watch, loop = begun(loader, 2)
    state = watch.state()
    assert (state["samples_yielded"], state["batch_size"]) == (8, SIZE)
    assert (ours(watch)["batches"], ours(watch)["epoch"]) == (2, 0)
    for _ in loop:
        pass
    assert (ours(watch)["batches"], ours(watch)["epoch"]) == (0, 1)


@pytest.mark.parametrize("how", WORKERS)
def test_a_loop_that_was_left_is_gone_on_with(how: str) -> None:
    """After ``break`` and a save, as when a step limit is reached, the epoch goes on."""
    straight = shuffled(**WORKERS[how])
    torch.manual_seed(3)
    whole = [i for batch in straight for i in plain(batch)]
    loader = shuffled(**WORKERS[how])
    watch = watch_loader("train", loader)
    torch.manual_seed(3)
    seen = []
    for i, batch in enumerate(loader):
        seen += plain(batch)
        if i == 2:
            break
    del batch
    assert (ours(watch)["batches"], ours(watch)["exact"], ours(watch)["left"]) == (3, True, True)
    state, streams = watch.state(), rng.capture()
    again = shuffled(**WORKERS[how])
    later = watch_loader("train", again)
    assert later.restore(state).why
    rng.restore(streams)
    assert seen + [i for batch in again for i in plain(batch)] == whole


@pytest.mark.parametrize("how", WORKERS)
def test_a_program_that_leaves_loops_ends_epochs_so(how: str) -> None:
    loader = shuffled(**WORKERS[how])
    watch = watch_loader("train", loader)
    for _ in range(2):
        for i, _ in enumerate(loader):
            if i == 2:
                break
    assert (ours(watch)["batches"], ours(watch)["epoch"], ours(watch)["leaves"]) == (0, 2, True)
    again = watch_loader("train", shuffled(**WORKERS[how]))
    assert again.restore(watch.state()).exact and ours(again)["leaves"]


def test_skipped_samples_are_not_read_again() -> None:
    state, streams = saved_at(shuffled, {}, 4)
    loader = shuffled()
    watch = watch_loader("train", loader)
    watch.restore(state)
    rng.restore(streams)
    assert loader.dataset.was_read == []
    rest = [i for batch in loader for i in plain(batch)]
    assert loader.dataset.was_read == rest and len(rest) == N - 4 * SIZE


@pytest.mark.parametrize("how", WORKERS)
def test_a_loop_under_way_is_told(how: str) -> None:
    """RS3: "Position applied, or an error that the loader is already iterating"."""
    state, streams = saved_at(shuffled, WORKERS[how], 4)
    expected = resumed(shuffled, WORKERS[how], state, streams, 6)[0]
    loader = shuffled(**WORKERS[how])
    watch, loop = begun(loader, 1)
    assert watch.restore(state).exact
    with pytest.raises(InvalidInputError, match="leave that loop"):
        next(loop)
    del loop
    rng.restore(streams)
    assert list(itertools.islice(epochs(loader), 6)) == expected
    assert watch_loader("train", loader) is watch


def test_a_loop_under_way_over_a_stateful_loader_is_told() -> None:
    """RS3, torchdata's loader."""
    state, _ = saved_at(stateful, {}, 4)
    watch, loop = begun(stateful(), 1)
    watch.restore(state)
    with pytest.raises(InvalidInputError, match="leave that loop"):
        next(loop)


@pytest.mark.parametrize("how", WORKERS)
def test_a_loop_begun_before_the_watch_gives_no_position(how: str) -> None:
    loader = shuffled(**WORKERS[how])
    loop = iter(loader)
    next(loop)
    watch = watch_loader("train", loader)
    assert "before it was watched" in ours(watch)["why"]
    with pytest.raises(InvalidInputError, match="before it was watched"):
        watch.restore(saved_at(shuffled, WORKERS[how], 4)[0])
    del loop
    assert ours(watch)["exact"]


def test_the_position_moves_on_after_a_restore() -> None:
    """RS3: "saved position moves on"; and before the loop begins it is what was restored."""
    state, streams = saved_at(shuffled, {}, 4)
    loader = shuffled()
    watch = watch_loader("train", loader)
    watch.restore(state)
    assert watch.state()["castore"]["pass"] == state["castore"]["pass"]
    rng.restore(streams)
    loop = iter(loader)
    next(loop)
    assert ours(watch)["batches"] == 5
    again = json.loads(json.dumps(watch.state()))
    other = shuffled()
    held = watch_loader("train", other)
    assert held.restore(again).exact
    assert plain(next(iter(other))) == plain(next(loop))


def test_two_iterators_in_use_have_no_one_position() -> None:
    watch, loop = begun(shuffled(), 2)
    other = iter(watch.loader)
    next(other)
    assert "two iterators" in ours(watch)["why"]
    del other
    assert "two iterators" in ours(watch)["why"]
    del loop
    assert ours(watch)["exact"]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


class Positioned(IterableDataset[int]):
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < N:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_an_iterable_without_a_state_claims_nothing() -> None:
    """RS2: "otherwise refuse to claim deterministic resume"."""
    watch, _ = begun(DataLoader(Stream(), batch_size=SIZE), 2)
    state = watch.state()
    assert not state["castore"]["exact"] and state["samples_yielded"] == 8
    with pytest.raises(InvalidInputError, match="'train'.*no state_dict"):
        watch.restore(state)
    report = watch.restore(state, strict=False)
    assert (report.name, report.exact) == ("train", False) and "state_dict" in report.why


def test_an_iterable_with_a_state_goes_on() -> None:
    watch, loop = begun(DataLoader(Positioned(), batch_size=SIZE), 2)
    state = json.loads(json.dumps(watch.state()))
    expected = [plain(b) for b in loop]
    fresh = DataLoader(Positioned(), batch_size=SIZE)
    held = watch_loader("train", fresh)
    assert held.restore(state).exact
    assert [plain(b) for b in fresh] == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_draws_as_it_goes(workers: int) -> None:
    """Without workers the global stream is enough; workers fetch ahead: not claimed then."""
    make = sampled(lambda d: Lazy(len(d)))
    how = {"num_workers": workers} if workers else {}
    state, streams = saved_at(make, how, 4)
    if workers:
        assert "as it goes" in state["castore"]["why"]
        return
    expected = [b for _, b in straight(make, how, 12)][4:]
    assert [b for _, b in resumed(make, how, state, streams, 8)[0]] == expected


def test_an_order_that_no_attribute_tells_is_refused() -> None:
    """RS2: the digest over the skipped part differs."""
    make = sampled(lambda d: InPlace(len(d)))
    state, _ = saved_at(make, {}, 8)
    watch = watch_loader("train", make())
    with pytest.raises(InvalidInputError, match="give it state_dict and load_state_dict"):
        watch.restore(state)
    assert ours(watch)["batches"] == 0 and len(list(watch.loader)) == PER_EPOCH


CHANGES: dict[str, tuple[Callable[..., Any], str]] = {
    "batch size": (lambda: DataLoader(Numbers(), batch_size=5, shuffle=True), "batch_size is 5"),
    "drop last": (lambda: shuffled(drop_last=True), "drop_last is True"),
    "no shuffle": (LOADERS["in-order"], "SequentialSampler instead of RandomSampler"),
    "less data": (lambda: DataLoader(Numbers(10), SIZE, shuffle=True), "batches of an epoch"),
    "a generator": (with_generator, "other generators"),
    "kept workers": (lambda: shuffled(**WORKERS["2-kept"]), "persistent_workers"),
    "stateful": (stateful, "without a state of its own"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_loader_made_otherwise_is_refused_by_name(change: str) -> None:
    state, _ = saved_at(shuffled, {}, 4)
    make, words = CHANGES[change]
    watch = watch_loader("train", make())
    before = rng.capture()
    with pytest.raises(InvalidInputError, match=words):
        watch.restore(state)
    assert not watch.restore(state, strict=False).exact
    assert rng.capture() == before


def test_a_generator_that_loaders_share() -> None:
    """A validation loader draws its seed from it in the middle of the training's epoch."""

    def run(watched: Any, loop: Any, steps: int) -> list[Any]:
        found = []
        for _ in range(steps):
            found.append(plain(next(loop)))
            found += [plain(b) for b in watched[1]]
        return found

    def made(value: int) -> tuple[Any, Any]:
        g = torch.Generator().manual_seed(value)
        return shuffled(generator=g), shuffled(generator=g)

    train, valid = made(1)
    loop, watches = iter(train), [watch_loader(n, x) for n, x in (("t", train), ("v", valid))]
    del loop
    loop = (b for _ in range(9) for b in train)
    run((train, valid), loop, 3)
    states = [json.loads(json.dumps(w.state())) for w in watches]
    expected = run((train, valid), loop, 7)
    train, valid = made(2)
    fresh = [watch_loader(n, x) for n, x in (("t", train), ("v", valid))]
    assert all(w.restore(s).exact for w, s in zip(fresh, states, strict=True))
    assert run((train, valid), (b for _ in range(9) for b in train), 7) == expected


def test_the_public_tools_position_is_never_exact() -> None:
    watch = watch_loader("train", shuffled())
    with pytest.raises(InvalidInputError, match="another tool's"):
        watch.restore({"samples_yielded": 4, "batch_size": SIZE})


@pytest.mark.parametrize(
    "state",
    [[], {"castore": 3}, {"castore": {"format": 2}}, {"castore": {"format": 1, "kind": "sampler"}}],
)
def test_a_malformed_position_is_told(state: Any) -> None:
    watch = watch_loader("train", shuffled())
    with pytest.raises(FormatError, match="'train'"):
        watch.restore(state)


def test_only_loaders_can_be_watched() -> None:
    with pytest.raises(InvalidInputError, match="'x' is a list"):
        watch_loader("x", [1])


def test_the_callers_objects_stay_in_use() -> None:
    loader = sampled(lambda d: DistributedSampler(d, num_replicas=1, rank=0))()
    sampler = loader.sampler
    watch = watch_loader("train", loader)
    assert loader.sampler is sampler and len(loader) == PER_EPOCH
    assert loader.batch_sampler.batch_size == SIZE and loader.batch_sampler.sampler is sampler
    del watch
    assert len(list(loader)) == PER_EPOCH
    assert watch_loader("again", loader).state()["castore"]["exact"]


@pytest.mark.parametrize("make", [shuffled, stateful])
def test_streams_can_be_put_back_when_the_loop_begins(make: Callable[..., Any]) -> None:
    """Whatever a program draws between the restore and the loop."""
    expected = [b for _, b in straight(make, {}, 20)]
    for step in (4, 6):
        state, streams = saved_at(make, {}, step)
        loader = make()
        watch = watch_loader("train", loader)
        watch.restore(state)
        watch.on_next_iter(lambda s=streams: rng.restore(s))
        torch.rand(5)
        assert [b for _, b in itertools.islice(epochs(loader), 20 - step)] == expected[step:]


@pytest.mark.parametrize(
    "value",
    [
        {"$array": ["1,(,", [1], ""]},
        {"$array": ["(1000000000,)f8", [1], ""]},
        {"$array": ["<f3", [1], "AAAA"]},
        {"$tensor": ["O", [1], "AAAAAAAAAAA="]},
        {"$float": 10**400},
    ],
)
def test_se1_a_hostile_position_is_refused(value: dict[str, Any]) -> None:
    """SE1: NumPy evaluates the text of a dtype; only plain ones are handed to it."""
    with pytest.raises(FormatError, match="packed state"):
        unpack({"samples": value})
