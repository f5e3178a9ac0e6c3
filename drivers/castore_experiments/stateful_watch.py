"""The watch over a loader that has a state of its own, such as torchdata's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from castore import InvalidInputError
from castore_experiments import samplers, streams
from castore_experiments.hook import Hook
from castore_experiments.loaders import FORMAT, LoaderWatch
from castore_experiments.packing import pack, unpack
from castore_experiments.passes import SUPERSEDED


class _Superseded:
    """In the place of a sampler's iterator, once the loader's position was restored."""

    def __iter__(self) -> _Superseded:
        return self

    def __next__(self) -> Any:
        raise InvalidInputError(SUPERSEDED)


class StatefulWatch(LoaderWatch):
    """A loader with ``state_dict`` and ``load_state_dict`` of its own, such as torchdata's."""

    def __init__(self, name: str, loader: Any):
        super().__init__(name, loader)
        self._hooked = callable(getattr(type(loader), "_get_iterator", None))
        self._restored: dict[str, Any] | None = None
        if self._hooked:
            vars(loader)["_get_iterator"] = Hook(self)

    def make_iterator(self) -> Any:
        """An iterator of the loader's own kind: called in the place of its method."""
        resumed = getattr(self.loader, "next_iter_state", None) is not None
        self._arrive()
        generators = self._generators()
        unseeded = streams.aside({}) if resumed else nullcontext()
        with unseeded, streams.kept(generators.values() if resumed else ()):
            made = type(self.loader)._get_iterator(self.loader)
        self._restored = None
        return made

    def _sampler(self) -> Any:
        own = getattr(self.loader, "batch_sampler", None)
        return own if own is not None else getattr(self.loader, "sampler", None)

    def _generators(self) -> dict[str, Any]:
        found = samplers.generators(self._sampler())
        if getattr(self.loader, "generator", None) is not None:
            found["loader"] = self.loader.generator
        return found

    def state(self) -> dict[str, Any]:
        if self._restored is not None:
            return self._restored
        own, handed, why = self._own()
        ours = {
            "format": FORMAT,
            "kind": "stateful",
            "exact": not why,
            "why": why,
            "batches": handed,
            "own": own,
            "generators": {n: streams.read(g) for n, g in self._generators().items()},
        }
        size = getattr(self.loader, "batch_size", None)
        return {
            "samples_yielded": handed * (size or 1),
            "batch_size": size,
            "castore": ours,
        }

    def _own(self) -> tuple[Any, int, str]:
        """The loader's own state, packed, the batches handed out, and why it is not exact."""
        it = getattr(self.loader, "_iterator", None) if self._hooked else None
        if self._hooked and it is None:
            # To ask would make an iterator, and draw for it.
            return {}, 0, ""
        state, handed = self.loader.state_dict(), int(getattr(it, "_num_yielded", 0))
        if self._hooked and "_iterator_finished" in state and self._is_over(handed):
            # After the last batch the next iterator is a new epoch, not an empty rest.
            state = {**state, "_iterator_finished": True}
            handed = 0
        why = ""
        if getattr(self.loader, "num_workers", 0) and not getattr(self.loader, "in_order", True):
            why = "its workers hand out batches in any order (in_order=False)"
        return pack(state, "state_dict of the data loader"), handed, why

    def _is_over(self, handed: int) -> bool:
        try:
            return handed >= len(self.loader)
        except (TypeError, NotImplementedError):
            return False

    def _refusal(self, state: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
        if ours["kind"] != "stateful":
            return "it was saved of a loader without a state of its own"
        if not ours["exact"]:
            return str(ours["why"])
        if set(ours["generators"]) != set(self._generators()):
            return "its samplers have other generators"
        size = getattr(self.loader, "batch_size", None)
        return (
            "" if state["batch_size"] == size else f"batch size {size}, {state['batch_size']} saved"
        )

    def _apply(self, ours: Mapping[str, Any]) -> None:
        under_way = getattr(self.loader, "_iterator", None)
        try:
            self.loader.load_state_dict(unpack(ours["own"]))
        except Exception as e:
            raise InvalidInputError(f"the loader does not take its own state: {e}") from e
        if self._hooked and under_way is not None:
            under_way._sampler_iter = _Superseded()
        for name, generator in self._generators().items():
            streams.write(generator, ours["generators"][name])
        if self._hooked and ours["own"]:
            size = getattr(self.loader, "batch_size", None)
            samples = ours["batches"] * (size or 1)
            self._restored = {"samples_yielded": samples, "batch_size": size, "castore": dict(ours)}
