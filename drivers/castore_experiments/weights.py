"""Weight files: one consistent copy of the state, its documented file, and the way back.

A weight file is a ``torch.save`` zip that ``torch.load(weights_only=True)`` opens, with the
documented keys ``step``, ``model_state_dict``, ``timestamp``, ``exp_hash``, ``rng_state``, and
where there are such ``optimizer_state_dict``, ``scheduler_state_dict``,
``dataloader_iteration_state``, ``metadata``. Equal content gives equal bytes.

The copy that `capture` makes is laid out as the file will be, in memory that is kept between
saves: `encode` fills in headers, checksums and the pickle around it and copies nothing.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from castore import InvalidInputError
from castore_experiments import archive
from castore_experiments.tensors import Ordered, Parts, Slot, Stored, take_apart
from castore_experiments.weightfile import WeightFile, apply, decode, other_kind

__all__ = [
    "Buffers",
    "Captured",
    "Shapes",
    "WeightFile",
    "apply",
    "capture",
    "decode",
    "encode",
    "other_kind",
]

Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]

_PROTOCOL = 2
_ROOM = 1 << 20


class Buffers:
    """Memory kept between saves, so that a copy touches no fresh page.

    One `Captured` at a time has it; a `capture` before the last one's `release` takes memory of
    its own, which goes with it. Not for several threads that capture at once.
    """

    def __init__(self) -> None:
        self._kept: torch.Tensor | None = None

    def take(self, size: int) -> torch.Tensor:
        """At least ``size`` bytes."""
        kept, self._kept = self._kept, None
        if kept is not None and kept.numel() >= size:
            return kept
        return torch.empty(size, dtype=torch.uint8)

    def give(self, memory: torch.Tensor) -> None:
        """Memory that is not needed any more; the larger is kept."""
        if self._kept is None or self._kept.numel() < memory.numel():
            self._kept = memory

    def clear(self) -> None:
        """Give the kept memory back to the system."""
        self._kept = None


class Captured:
    """The state at one instant, independent of what the caller does next: see `capture`."""

    def __init__(self, parts: Parts, buffers: Buffers):
        self._parts, self._buffers = parts, buffers
        lengths = [(f"data/{s.key}", s.nbytes) for s in parts.stored]
        self._places = archive.plan(lengths)
        self._end = self._places[-1].stop if self._places else 0
        room = archive.tail_size(self._places) + _ROOM
        self._memory: torch.Tensor | None = buffers.take(self._end + room)
        _copy(self._memory, self._places, parts.stored)
        for s in parts.stored:
            # Not to keep the caller's memory, which is free to change or go.
            s.source = s.source.new_empty(0)

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that were copied."""
        return sum(p.length for p in self._places)

    def model_shapes(self) -> Shapes:
        """Names and shapes of the model's tensors, as its ``state_dict()`` has them."""
        state = self._parts.value.get("model_state_dict")
        items = state.items() if isinstance(state, Mapping) else ()
        return tuple((n, t.shape) for n, t in items if isinstance(t, Slot))

    def release(self) -> None:
        """Give the memory back; views of an encoding are void then. Twice is once."""
        if self._memory is not None:
            self._buffers.give(self._memory)
            self._memory = None

    def fill(self, head: Mapping[str, Any]) -> memoryview:
        """The whole file: see `encode`."""
        if self._memory is None:
            raise InvalidInputError("this copy of the state was released; capture it again")
        value = {**head, **self._parts.value}
        members = {
            "data.pkl": _pickled({k: value[k] for k in _ORDER if k in value}),
            "byteorder": b"little",
            ".format_version": b"1",
            ".storage_alignment": str(archive.ALIGNMENT).encode(),
            "version": b"3\n",
        }
        rest = archive.plan([(n, len(d)) for n, d in members.items()], self._end)
        places = [*self._places, *rest]
        view = self._grown(rest[-1].stop + archive.tail_size(places))
        for place, data in zip(rest, members.values(), strict=True):
            view[place.start : place.stop] = data
        return view[: archive.close(view, places)]

    def _grown(self, size: int) -> memoryview:
        assert self._memory is not None
        if self._memory.numel() < size:
            larger = torch.empty(size, dtype=torch.uint8)
            larger[: self._end] = self._memory[: self._end]
            self._memory = larger
        return memoryview(self._memory.numpy())  # type: ignore[arg-type]


_ORDER = (
    "step",
    "model_state_dict",
    "optimizer_state_dict",
    "scheduler_state_dict",
    "rng_state",
    "dataloader_iteration_state",
    "metadata",
    "exp_hash",
    "timestamp",
)


def capture(
    model: Any | None,
    optimizer: Any | None = None,
    scheduler: Any | None = None,
    *,
    buffers: Buffers,
) -> Captured:
    """Copy what ``state_dict()`` of each gives, at one instant.

    On return nothing that the caller does changes the copy. `Captured.release` gives the memory
    back to ``buffers``.

    Raises
    ------
    InvalidInputError
        A value that ``weights_only=True`` could not read back, or a tensor whose bytes are not
        its values; its path is named, such as ``/optimizer_state_dict/param_groups/0/lr``.
    """
    given = {
        "model_state_dict": model,
        "optimizer_state_dict": optimizer,
        "scheduler_state_dict": scheduler,
    }
    states = {key: one.state_dict() for key, one in given.items() if one is not None}
    return Captured(take_apart(states), buffers)


def _copy(memory: torch.Tensor, places: list[archive.Place], stored: list[Stored]) -> None:
    targets, sources = [], []
    for place, one in zip(places, stored, strict=True):
        if not one.nbytes:
            continue
        target, source = memory[place.start : place.stop], one.source
        if source.is_contiguous():
            # As bytes: also what has no arithmetic of its own is copied bit for bit.
            targets.append(target)
            sources.append(source.reshape(-1).view(torch.uint8))
        else:
            targets.append(target.view(source.dtype).view(source.shape))
            sources.append(source)
    if targets:
        torch._foreach_copy_(targets, sources)


def encode(
    captured: Captured,
    *,
    step: int,
    exp_hash: str,
    timestamp: str,
    rng_state: Mapping[str, Any],
    loaders: Mapping[str, Mapping[str, Any]] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> memoryview:
    """The documented file, over the captured memory: valid until ``captured.release()``.

    Parameters
    ----------
    loaders : mapping, optional
        State of each data loader by name; left out of the file when there is none.

    Raises
    ------
    InvalidInputError
        A value of ``rng_state``, ``loaders`` or ``metadata`` that could not be read back; its
        path is named. Tensors are not welcome in these.
    """
    head: dict[str, Any] = {
        "step": int(step),
        "timestamp": timestamp,
        "exp_hash": exp_hash,
        "rng_state": dict(rng_state),
    }
    if loaders:
        head["dataloader_iteration_state"] = {k: dict(v) for k, v in loaders.items()}
    if metadata:
        head["metadata"] = dict(metadata)
    parts = take_apart(head)
    if parts.stored:
        raise InvalidInputError("RNG, loader states and metadata hold plain values, no tensors")
    return captured.fill(parts.value)


# -- the pickle


class _Pickler(pickle.Pickler):
    """Writes slots as torch writes tensors (torch/_tensor.py, ``_reduce_ex_internal``)."""

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _StorageOf):
            return None
        kind, width = value.kind, value.width
        stored = value.stored
        return ("storage", kind, stored.key, "cpu", stored.nbytes // width)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Ordered):
            return set, (list(value.items),)
        if not isinstance(value, Slot):
            return NotImplemented
        kind = _storage_kind(value.dtype)
        typed = kind is not torch.UntypedStorage
        storage = _StorageOf(value.stored, kind, value.dtype.itemsize if typed else 1)
        view: tuple[Any, ...] = (
            storage,
            value.offset,
            value.shape,
            value.stride,
            False,
            OrderedDict(),
        )
        if typed:
            return torch._utils._rebuild_tensor_v2, view
        return torch._utils._rebuild_tensor_v3, (*view, value.dtype)


class _StorageOf:
    __slots__ = ("kind", "stored", "width")

    def __init__(self, stored: Stored, kind: type, width: int):
        self.stored, self.kind, self.width = stored, kind, width


def _storage_kind(dtype: torch.dtype) -> type:
    """The class by which a pickle names storages of ``dtype``."""
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    return getattr(torch, name) if name else torch.UntypedStorage


def _pickled(value: Any) -> bytes:
    out = io.BytesIO()
    _Pickler(out, protocol=_PROTOCOL).dump(value)
    return out.getvalue()
