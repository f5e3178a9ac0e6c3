"""The watch over a plain loader: its position is that of its sampler."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from castore_experiments import samplers, streams
from castore_experiments.hook import Hook
from castore_experiments.loaders import FORMAT, LoaderWatch
from castore_experiments.packing import pack, unpack
from castore_experiments.passes import Pass


class _Followed(Sampler[Any]):
    """Stands for the caller's sampler; each pass over it is a `Pass`."""

    def __init__(self, inner: Any, watch: SamplerWatch):
        self.inner, self._watch = inner, weakref.ref(watch)

    def __iter__(self) -> Iterator[Any]:
        watch = self._watch()
        return watch.begin() if watch is not None else iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "_watch"):
            raise AttributeError(name)
        return getattr(self.inner, name)


class SamplerWatch(LoaderWatch):
    """A plain ``DataLoader``: its position is that of its sampler."""

    def __init__(self, name: str, loader: DataLoader[Any]):
        super().__init__(name, loader)
        own = vars(loader)
        slot = "batch_sampler" if own.get("batch_sampler") is not None else "sampler"
        found = own[slot]
        self._sampler = found.inner if isinstance(found, _Followed) else found
        self._iterators: list[weakref.ref[Any]] = list(_begun(self._sampler))
        followed = _Followed(self._sampler, self)
        # Not by setattr: the loader refuses that, since it would miss iterators under way.
        own[slot] = followed
        own["_get_iterator"] = Hook(self)
        if own.get("_iterator") is not None:
            own["_iterator"]._index_sampler = followed
        self._epoch = 0
        self._last: Pass | None = None
        self._pending: Pass | None = None
        self._seeded = False
        self._newest: Mapping[str, Any] = {}
        self._leaves = False

    # -- called by the loader

    def make_iterator(self) -> Any:
        """An iterator of the loader's own kind: called in the place of its method."""
        self._arrive()
        if self._seeded:
            # The workers of the saved loader had been started: its next epoch draws no seed.
            self._pending = self.begin()
            self._pending.prepare(None, streams.now())
            self._seeded = False
            unseeded: AbstractContextManager[None] = streams.kept(self._seeds())
        elif self._pending is not None and self._pending.waiting:
            unseeded = self._undrawn()
        else:
            unseeded = nullcontext()
        with unseeded:
            made = type(self.loader)._get_iterator(self.loader)
        self._iterators = [r for r in self._iterators if r() is not None]
        self._iterators.append(weakref.ref(made))
        # The attributes outlive the iterator, and with them how many batches it handed out.
        self._newest = vars(made)
        return made

    @contextmanager
    def _undrawn(self) -> Iterator[None]:
        """Within, the seed that a loader's iterator draws when it is made does not count."""
        with streams.aside({}), streams.kept(self._seeds()):
            yield

    def _seeds(self) -> list[Any]:
        """The loader's own generator; not if the sampler uses it, as the pass sees to that."""
        own = self.loader.generator
        used = self._pending.generators.values() if self._pending is not None else ()
        return [] if own is None or any(own is g for g in used) else [own]

    def begin(self) -> Pass:
        """The pass that the loader's next iterator is to go through."""
        self._arrive()
        if self._pending is not None and self._pending.waiting:
            return self._pending
        self._pending = None
        if self._left() is not None:
            self._leaves = True
        if self._last is not None and self._last.advanced:
            self._epoch += 1
        self._last = Pass(self._sampler, self._ahead())
        return self._last

    def _ahead(self) -> int:
        return int(self.loader.num_workers * (self.loader.prefetch_factor or 0))

    # -- where it stands

    def _alive(self) -> list[Any]:
        """Iterators that may yet be asked for a batch, oldest first."""
        held = [r for r in self._iterators if r() is not None and not self._is_left(r)]
        found = [it for r in held if (it := r()) is not None]
        return [it for it in found if not self._is_finished(it)]

    def _is_finished(self, it: Any) -> bool:
        at = it._sampler_iter
        if not isinstance(at, Pass):
            return False
        if getattr(getattr(it, "_dataset_fetcher", None), "ended", False):
            return True
        handed = at.offset + it._num_yielded
        length = self._length()
        return (at.exhausted and handed >= at.issued) or (length is not None and handed >= length)

    def _is_left(self, iterator: weakref.ref[Any]) -> bool:
        """Whether only the loader itself still holds the iterator (of kept workers)."""
        if vars(self.loader).get("_iterator") is not iterator():
            return False
        once = [_Probe()]
        return _holders(iterator) <= _holders(weakref.ref(once[0]))

    def _length(self) -> int | None:
        try:
            return len(self._sampler)
        except (TypeError, NotImplementedError):
            return None

    def state(self) -> dict[str, Any]:
        alive = self._alive()
        at, handed = self._place(alive)
        record = at.record(handed) if at is not None else None
        why = self._why(alive, at)
        ended = record is None and self._last is not None and self._last.advanced
        ours = {
            "format": FORMAT,
            "kind": "sampler",
            "exact": not why,
            "why": why,
            "epoch": self._epoch + (1 if ended else 0),
            "batches": record["batches"] if record else 0,
            "length": self._length(),
            "drop_last": bool(self.loader.drop_last),
            "kept_workers": bool(self.loader.persistent_workers),
            "seeded": self._seeded or vars(self.loader).get("_iterator") is not None,
            "samplers": samplers.read(self._sampler),
            "generator": _read_optional(self.loader.generator),
            "pass": record,
            "dataset": self._dataset_state(),
            "left": at is not None and not alive and not at.waiting,
            "leaves": self._leaves,
        }
        samples = record["samples"] if record else 0
        return {
            "samples_yielded": samples,
            "batch_size": self.loader.batch_size,
            "castore": ours,
        }

    def _place(self, alive: list[Any]) -> tuple[Pass | None, int]:
        if alive and isinstance(at := alive[-1]._sampler_iter, Pass) and not at.superseded:
            return at, at.offset + alive[-1]._num_yielded
        if self._pending is not None and self._pending.waiting:
            return self._pending, self._pending.offset
        left = None if alive or self._leaves else self._left()
        return (self._last, left) if left is not None else (None, 0)

    def _left(self) -> int | None:
        """How many batches the newest loop had when it was left before its end; else None.

        A loop that was left last thing before a save was stopped, so that a resume goes on within
        its epoch. A program that leaves loops and begins others says that leaving ends an epoch.
        """
        at = self._newest.get("_sampler_iter")
        if not isinstance(at, Pass) or at.superseded or at is not self._last:
            return None
        handed = at.offset + int(self._newest["_num_yielded"])
        length = self._length()
        ended = at.exhausted and handed >= at.issued
        return None if ended or not handed or (length is not None and handed >= length) else handed

    def _why(self, alive: list[Any], at: Pass | None) -> str:
        if any(not isinstance(it._sampler_iter, Pass) for it in alive):
            return "a loop over it was begun before it was watched"
        live = [it._sampler_iter for it in alive if not it._sampler_iter.superseded]
        if any(p is not self._last for p in live):
            return "two iterators over it are in use, so that it has no one position"
        if self.loader.num_workers and not getattr(self.loader, "in_order", True):
            return "its workers hand out batches in any order (in_order=False)"
        if isinstance(self.loader.dataset, IterableDataset):
            return self._why_iterable()
        return self._why_pass(at) if at is not None else ""

    def _why_iterable(self) -> str:
        if not samplers.is_stateful(self.loader.dataset):
            return "its IterableDataset has no state_dict and load_state_dict"
        if self.loader.num_workers:
            return (
                "its IterableDataset is copied to workers, whose position is not to be had from"
                " torch's DataLoader; torchdata's StatefulDataLoader gives it"
            )
        return ""

    def _why_pass(self, at: Pass) -> str:
        if at.draws_global and self.loader.num_workers:
            return (
                "its sampler draws from a global random stream as it goes, ahead of the batches"
                " handed out; give it a generator of its own"
            )
        if at.draws_generators and at.is_shared():
            return "its sampler draws as it goes from a generator that others draw from as well"
        return ""

    def _dataset_state(self) -> Any:
        dataset = self.loader.dataset
        if self.loader.num_workers or not samplers.is_stateful(dataset):
            return None
        return pack(dataset.state_dict(), "state_dict of the data set")

    # -- and there again

    def _refusal(self, state: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
        if ours["kind"] != "sampler":
            return "it was saved of a loader with a state of its own"
        if not ours["exact"]:
            return str(ours["why"])
        if (ours["dataset"] is not None) != (self._dataset_state() is not None):
            return "its data set has a state_dict on one side only"
        if any(not isinstance(it._sampler_iter, Pass) for it in self._alive()):
            return "a loop over it was begun before it was watched"
        found = samplers.differences(self._sampler, ours["samplers"])
        if ours["kept_workers"] != self.loader.persistent_workers:
            found.append(f"persistent_workers is {self.loader.persistent_workers} now")
        if ours["pass"] is not None:
            now = (self.loader.batch_size, self.loader.drop_last, self._length())
            was = (state["batch_size"], ours["drop_last"], ours["length"])
            names = ("batch size", "drop_last", "batches of an epoch")
            found += [
                f"{n}: {a} now, {b} saved"
                for n, a, b in zip(names, now, was, strict=True)
                if a != b
            ]
        return "; ".join(found)

    def _apply(self, ours: Mapping[str, Any]) -> None:
        before = samplers.read(self._sampler)
        pending: Pass | None = None
        try:
            if ours["pass"] is not None:
                pending = self._skipped(ours["pass"], ours["samplers"])
            else:
                samplers.write(self._sampler, ours["samplers"])
        except BaseException:
            samplers.write(self._sampler, before)
            raise
        if ours["generator"] is not None and self.loader.generator is not None:
            streams.write(self.loader.generator, ours["generator"])
        if ours["dataset"] is not None:
            self.loader.dataset.load_state_dict(unpack(ours["dataset"]))
        for reference in self._iterators:
            it = reference()
            if it is not None and isinstance(it._sampler_iter, Pass):
                it._sampler_iter.superseded = True
        # Workers that run already draw none either; without a pass to go on with it matters.
        self._seeded = ours["seeded"] and pending is None and not vars(self.loader).get("_iterator")
        self._epoch, self._last, self._pending = int(ours["epoch"]), pending, pending
        self._leaves = bool(ours["leaves"])

    def _skipped(self, record: Mapping[str, Any], now: Mapping[str, Any]) -> Pass:
        at = Pass(self._sampler, self._ahead(), record)
        at.skip(record)
        at.prepare(None if record["draws_generators"] else _generators_of(now))
        return at


def _generators_of(read: Mapping[str, Any]) -> dict[str, Any]:
    """The generator states within `samplers.read`, by dotted place."""
    return {
        f"{place}.{name}".lstrip("."): state
        for place, one in read.items()
        for name, state in one["generators"].items()
    }


class _Probe:
    """Something that nobody but one variable holds."""


def _holders(reference: weakref.ref[Any]) -> int:
    return sys.getrefcount(reference())


def _begun(sampler: Any) -> Iterator[weakref.ref[Any]]:
    """Iterators over ``sampler`` that were made before the loader was watched."""
    for found in gc.get_objects():
        if issubclass(type(found), _BaseDataLoaderIter) and found._index_sampler is sampler:
            yield weakref.ref(found)


def _read_optional(generator: Any) -> Any:
    return None if generator is None else streams.read(generator)
