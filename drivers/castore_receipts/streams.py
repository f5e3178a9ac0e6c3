"""Random streams and plain attributes as JSON and arrays, and back. No pickle.

`Pack` gathers what `json.dumps` cannot say as named tensors beside the JSON.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from castore import FormatError, InvalidInputError
from castore_receipts.arrays import Tensor, tensor

_NESTED = ("RunningMeanStd", "StackedObservations")


class Pack:
    """Values as JSON, arrays among them as references into ``tensors``."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def put(self, value: Any, name: str) -> Any:
        """``value`` as JSON; `TypeError` for what is neither plain nor an array of numbers."""
        if isinstance(value, np.generic | np.ndarray):
            try:
                self.tensors[name] = tensor(np.asarray(value), name)
            except InvalidInputError as e:
                raise TypeError(name) from e
            return {"array": name, "scalar": isinstance(value, np.generic)}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, np.random.Generator):
            return {"generator": self.put(value.bit_generator.state, f"{name}/generator")}
        if isinstance(value, Mapping):
            return {"map": [[k, self.put(v, f"{name}/{k}")] for k, v in _texts(value, name)]}
        if isinstance(value, list | tuple):
            items = [self.put(v, f"{name}/{i}") for i, v in enumerate(value)]
            return {"tuple" if isinstance(value, tuple) else "list": items}
        raise TypeError(name)


def _texts(value: Mapping[Any, Any], name: str) -> list[tuple[str, Any]]:
    if not all(isinstance(k, str) for k in value):
        raise TypeError(name)
    return list(value.items())


def get(held: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `Pack.put` was given (a generator comes back as its state).

    Raises
    ------
    FormatError
        Not something that `Pack.put` makes.
    """
    if held is None or isinstance(held, bool | int | float | str):
        return held
    if not isinstance(held, dict) or not held:
        raise FormatError(f"training state: {str(held)[:80]!r} is no packed value")
    kind, value = next(iter(held.items()))
    if kind == "array" and value in tensors:
        array = tensors[value].numpy().copy()
        return array[()] if held.get("scalar") is True else array
    if kind == "float":
        return float(value)
    if kind == "generator":
        return get(value, tensors)
    if kind == "map":
        return {k: get(v, tensors) for k, v in value}
    if kind in ("list", "tuple"):
        items = [get(v, tensors) for v in value]
        return tuple(items) if kind == "tuple" else items
    raise FormatError(f"training state: {kind[:80]!r} is no packed value")


# -- plain attributes of an object


def attributes(thing: Any, pack: Pack, name: str) -> dict[str, Any]:
    """The object's plain attributes (numbers, arrays, generators, lists of them) as JSON.

    Text is left out: it does not change as an environment runs, and must not be set from a file.
    """
    found: dict[str, Any] = {}
    for key, value in vars(thing).items():
        if isinstance(value, str) or _has_text(value):
            continue
        if type(value).__name__ in _NESTED:
            found[key] = {"fields": attributes(value, pack, f"{name}/{key}")}
            continue
        try:
            found[key] = pack.put(value, f"{name}/{key}")
        except TypeError:
            continue
    return found


def _has_text(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(isinstance(v, str) or _has_text(v) for v in value.values())
    return isinstance(value, list | tuple) and any(
        isinstance(v, str) or _has_text(v) for v in value
    )


def set_attributes(thing: Any, held: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Put back what `attributes` gave, in place for arrays.

    An attribute that is text now, or that would hide one of the class, is left alone.
    """
    for key, value in held.items():
        now = vars(thing).get(key)
        if isinstance(now, str) or (key not in vars(thing) and hasattr(type(thing), key)):
            continue
        if isinstance(value, dict) and "fields" in value:
            set_attributes(now, value["fields"], tensors)
        elif isinstance(value, dict) and "generator" in value:
            setattr(thing, key, generator(get(value, tensors), now))
        else:
            _set(thing, key, now, get(value, tensors))


def _set(thing: Any, key: str, now: Any, value: Any) -> None:
    if _alike(now, value) and now.flags.writeable:
        now[...] = value
    else:
        setattr(thing, key, value)


def _alike(now: Any, value: Any) -> bool:
    arrays = isinstance(now, np.ndarray) and isinstance(value, np.ndarray)
    return arrays and bool(now.shape == value.shape and now.dtype == value.dtype)


def generator(state: Mapping[str, Any], now: Any) -> np.random.Generator:
    """A generator in ``state``: ``now`` itself where it is one of the same kind."""
    kind = state.get("bit_generator")
    if not isinstance(now, np.random.Generator) or type(now.bit_generator).__name__ != kind:
        if kind not in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"):
            raise FormatError(f"training state: no bit generator {str(kind)[:40]!r}")
        now = np.random.Generator(getattr(np.random, str(kind))())
    stream: np.random.Generator = now
    stream.bit_generator.state = state
    return stream


# -- global streams


def global_streams(pack: Pack) -> dict[str, Any]:
    """The streams of torch, NumPy's global one and `random`."""
    import torch

    pack.tensors["rng/torch"] = tensor(torch.get_rng_state().numpy(), "rng/torch")
    found = {
        "numpy": pack.put(dict(_legacy()), "rng/numpy"),
        "python": pack.put(random.getstate(), "rng/python"),
        "cuda": torch.cuda.is_available(),
    }
    if torch.cuda.is_available():
        for i, state in enumerate(torch.cuda.get_rng_state_all()):
            pack.tensors[f"rng/cuda/{i}"] = tensor(state.numpy(), f"rng/cuda/{i}")
    return found


def _legacy() -> dict[str, Any]:
    state: dict[str, Any] = np.random.get_state(legacy=False)
    return state


def set_global_streams(held: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Put back what `global_streams` gave."""
    import torch

    torch.set_rng_state(torch.from_numpy(tensors["rng/torch"].numpy().copy()))
    np.random.set_state(get(held["numpy"], tensors))
    random.setstate(get(held["python"], tensors))
    if held["cuda"] and torch.cuda.is_available():
        states = [t for n, t in sorted(tensors.items()) if n.startswith("rng/cuda/")]
        torch.cuda.set_rng_state_all([torch.from_numpy(t.numpy().copy()) for t in states])
