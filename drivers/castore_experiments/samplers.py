"""What decides the order that a sampler gives: its generators, counters and lists.

A loader's sampler may hold others (a batch sampler holds a sampler). Of each are kept, as plain
JSON: the class; generators (torch, NumPy, Python); attributes that are numbers, text or switches,
such as the ``epoch`` that ``set_epoch`` sets; a digest of attributes that are sequences of
numbers; and ``state_dict()`` where the sampler has one that says more.

A sampler whose order hangs on anything else needs ``state_dict`` and ``load_state_dict``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from castore import InvalidInputError
from castore_experiments import streams
from castore_experiments.packing import pack, unpack

_DEEPEST = 8


def is_stateful(value: Any) -> bool:
    """Whether it has ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def chain(sampler: Any) -> Iterator[tuple[str, Any]]:
    """``sampler`` and those that it holds as attributes, each once, with their dotted places."""
    from torch.utils.data import Sampler

    seen: set[int] = set()
    todo = [("", sampler)]
    while todo:
        place, at = todo.pop(0)
        if id(at) in seen or place.count(".") > _DEEPEST:
            continue
        seen.add(id(at))
        yield place, at
        inner = [(n, v) for n, v in _attributes(at).items() if isinstance(v, Sampler)]
        todo += [(f"{place}.{name}".lstrip("."), v) for name, v in inner]


def _attributes(sampler: Any) -> dict[str, Any]:
    return dict(getattr(sampler, "__dict__", {}))


def generators(sampler: Any) -> dict[str, Any]:
    """The generator objects among the attributes, by dotted place."""
    return {
        f"{place}.{name}".lstrip("."): value
        for place, at in chain(sampler)
        for name, value in _attributes(at).items()
        if streams.is_generator(value)
    }


def read(sampler: Any) -> dict[str, Any]:
    """Everything named above, by dotted place, in plain JSON types.

    Raises
    ------
    InvalidInputError
        A ``state_dict`` holds what plain JSON cannot; its place is named.
    """
    return {place: _read_one(place, at) for place, at in chain(sampler)}


def _read_one(place: str, sampler: Any) -> dict[str, Any]:
    plain, drawn, lists = {}, {}, {}
    for name, value in _attributes(sampler).items():
        if type(value) in (bool, int, float, str):
            plain[name] = pack(value)
        elif streams.is_generator(value):
            drawn[name] = streams.read(value)
        elif (digest := _digest(value)) is not None:
            lists[name] = digest
    found = {"class": type(sampler).__qualname__, "plain": plain, "generators": drawn}
    if is_stateful(sampler):
        state = pack(sampler.state_dict(), f"state_dict of sampler {place or '.'}")
        # A state that only repeats attributes may be a position, which at the end of an epoch
        # would make the next one empty.
        if not isinstance(state, dict) or any(plain.get(k, state) != v for k, v in state.items()):
            return {**found, "state_dict": state}
    return {**found, "lists": lists}


def _digest(value: Any) -> str | None:
    """Digest of a sequence of numbers; None for anything else."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy() if value.dtype != torch.bfloat16 else None
    elif type(value) in (list, tuple) and value and type(value[0]) in (int, float, bool):
        try:
            value = np.asarray(value)
        except (ValueError, OverflowError):
            return None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        return None
    return hashlib.blake2b(np.ascontiguousarray(value).data, digest_size=16).hexdigest()


def differences(sampler: Any, saved: Mapping[str, Any]) -> list[str]:
    """In words: why ``sampler`` cannot be brought to the state ``saved`` by `write`."""
    here = dict(chain(sampler))
    found = [f"no sampler at {p or 'its place'}" for p in saved if p not in here]
    for place, at in here.items():
        was = saved.get(place)
        if was is None:
            found.append(f"{type(at).__qualname__} was not there when saved")
        elif was["class"] != type(at).__qualname__:
            found.append(f"{type(at).__qualname__} instead of {was['class']}")
        else:
            found += _changed(type(at).__qualname__, _read_one(place, at), was)
    return found


def _changed(name: str, now: Mapping[str, Any], was: Mapping[str, Any]) -> list[str]:
    """Attributes that only the program that makes the sampler can set."""
    fixed = ("batch_size", "drop_last", "shuffle", "replacement", "num_replicas", "rank")
    plain, before = now["plain"], was.get("plain", {})
    found = [
        f"{name}.{key} is {plain.get(key)!r}, was {before[key]!r}"
        for key in fixed
        if key in before and plain.get(key) != before[key]
    ]
    lists, listed = now.get("lists", {}), was.get("lists", {})
    found += [f"{name}.{k} is not what it was" for k in listed if lists.get(k) != listed[k]]
    if set(now["generators"]) != set(was.get("generators", {})):
        found.append(f"{name} has other generators")
    return found


def write(sampler: Any, saved: Mapping[str, Any]) -> None:
    """Put ``sampler`` and those it holds to the state ``saved``, as from `read`.

    Raises
    ------
    InvalidInputError
        A sampler refuses its own state.
    """
    for place, at in list(chain(sampler)):
        was = saved[place]
        have = _attributes(at)
        for name, value in was["plain"].items():
            # Properties and slots are not ours to set; what is equal is left alone.
            if name in have and have[name] != unpack(value):
                setattr(at, name, unpack(value))
        for name, state in was["generators"].items():
            streams.write(have[name], state)
        if "state_dict" in was:
            _load(at, unpack(was["state_dict"]), type(at).__qualname__)


def _load(sampler: Any, state: Any, name: str) -> None:
    try:
        sampler.load_state_dict(state)
    except Exception as e:
        raise InvalidInputError(f"{name} does not take its own saved state: {e}") from e
