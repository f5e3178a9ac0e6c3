"""Random streams one by one: the three global ones that a sampler may draw from, and generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

from castore_experiments.packing import pack, unpack

States: TypeAlias = dict[str, Any]


class _Stream(NamedTuple):
    get: Callable[[], Any]
    put: Callable[[Any], None]
    same: Callable[[Any, Any], bool]


def _globals() -> dict[str, _Stream]:
    import numpy as np
    import torch

    def same_numpy(a: Any, b: Any) -> bool:
        x, y = a["state"], b["state"]
        same = x["pos"] == y["pos"] and a["has_gauss"] == b["has_gauss"]
        return bool(same and np.array_equal(x["key"], y["key"]))

    return {
        "torch": _Stream(torch.get_rng_state, torch.set_rng_state, torch.equal),
        "numpy": _Stream(
            lambda: np.random.get_state(legacy=False), np.random.set_state, same_numpy
        ),
        "python": _Stream(random.getstate, random.setstate, lambda a, b: bool(a == b)),
    }


def now() -> States:
    """The three global streams' states, by name; not packed."""
    return {name: stream.get() for name, stream in _globals().items()}


def put(states: Mapping[str, Any]) -> None:
    """Set global streams to ``states``, as from `now`."""
    streams = _globals()
    for name, state in states.items():
        streams[name].put(state)


def drawn(before: Mapping[str, Any]) -> States:
    """Those of ``before`` that were drawn from since."""
    streams = _globals()
    return {n: s for n, s in before.items() if not streams[n].same(s, streams[n].get())}


@contextmanager
def aside(states: Mapping[str, Any]) -> Iterator[None]:
    """Within, the global streams stand at ``states``; after, all are as they were before."""
    before = now()
    put(states)
    try:
        yield
    finally:
        put(before)


def pack_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """As plain JSON."""
    return {name: pack(state, name) for name, state in states.items()}


def unpack_states(states: Mapping[str, Any]) -> States:
    return {name: unpack(state) for name, state in states.items()}


# -- generator objects


def is_generator(value: Any) -> bool:
    """Whether `read` and `write` know this object: torch's, NumPy's or Python's generators."""
    import numpy as np
    import torch

    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return isinstance(value, kinds)


@contextmanager
def kept(generators: Iterable[Any]) -> Iterator[None]:
    """After, these generators are as they were before."""
    before = [(g, read(g)) for g in generators]
    try:
        yield
    finally:
        for generator, state in before:
            write(generator, state)


def read(generator: Any) -> Any:
    """A generator's state in plain JSON types."""
    import numpy as np
    import torch

    if isinstance(generator, torch.Generator):
        return pack(generator.get_state())
    if isinstance(generator, np.random.Generator):
        return pack(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return pack(generator.get_state(legacy=False))
    return pack(generator.getstate())


def write(generator: Any, state: Any) -> None:
    """Put a generator to what `read` gave."""
    import numpy as np
    import torch

    value = unpack(state)
    if isinstance(generator, torch.Generator):
        generator.set_state(value)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = value
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(value)
    else:
        generator.setstate(value)
