"""States of models and optimizers taken apart: plain values, and what memory their tensors need.

Policy for tensors: what is stored is the values that are visible, in row-major order. So a slice
costs its own size, not its base's, and equal values give equal bytes whatever their strides.
Tensors over the same memory share one storage in the file: the same tensor under two names, and
a tensor within the memory of a contiguous other. Views that do not overlap are stored apart.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from castore import InvalidInputError

_DEEPEST = 60
_PLAIN = (type(None), bool, int, float, complex, bytes, torch.Size, torch.dtype, torch.device)


@dataclass(slots=True, eq=False)
class Stored:
    """One storage of the file: the values of ``source``, row-major."""

    source: torch.Tensor
    nbytes: int
    key: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Stands for a tensor in a state: a view of a `Stored`; offset and strides in elements."""

    stored: Stored
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Ordered:
    """Stands for a set, whose own order differs from process to process."""

    items: tuple[Any, ...]


@dataclass
class Parts:
    """A state taken apart; ``value`` holds a `Slot` for each tensor."""

    value: Any = None
    stored: list[Stored] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Found:
    """A tensor met in a state, before its place is known."""

    tensor: torch.Tensor
    slot: Slot | None = None


def take_apart(state: Mapping[str, Any]) -> Parts:
    """Plain copies of all values, tensors aside; no tensor is copied yet.

    Raises
    ------
    InvalidInputError
        A value that ``torch.load(weights_only=True)`` would not read back, or a tensor without
        values or of a kind whose bytes are not its values; its path is named.
    """
    walk = _Walk()
    value = walk.copy(state, "")
    stored = _place(walk.found)
    for i, one in enumerate(stored):
        one.key = str(i)
    return Parts(_filled(value), stored)


class _Walk:
    def __init__(self) -> None:
        self.found: list[_Found] = []
        self._texts: dict[str, str] = {}

    def copy(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            self.found.append(_Found(_checked(value, path)))
            return self.found[-1]
        if type(value) in _PLAIN:
            return value
        if isinstance(value, enum.Enum):
            return self.copy(value.value, path)
        if isinstance(value, str):
            # Pickles refer back to the same object: equal texts must be one for equal bytes.
            text = "".join(value)
            return self._texts.setdefault(text, text)
        if path.count("/") > _DEEPEST:
            raise InvalidInputError(f"{path[:200]}...: over {_DEEPEST} levels, or a circle")
        return self._copy_container(value, path)

    def _copy_container(self, value: Any, path: str) -> Any:
        if type(value) in (list, tuple):
            items = [self.copy(v, f"{path}/{i}") for i, v in enumerate(value)]
            return items if type(value) is list else tuple(items)
        if type(value) in (dict, OrderedDict, Counter):
            return self._copy_mapping(value, path)
        if type(value) is set:
            return Ordered(tuple(self.copy(v, f"{path}/{{}}") for v in sorted(value, key=repr)))
        if type(value) is bytearray:
            return bytearray(value)
        return _converted(value, path)

    def _copy_mapping(self, value: Any, path: str) -> Any:
        made: Any = OrderedDict() if type(value) is OrderedDict else {}
        for key, item in value.items():
            if isinstance(key, torch.Tensor):
                raise InvalidInputError(f"{path or '/'}: a tensor as a key cannot be kept")
            made[self.copy(key, f"{path}/{key!r}")] = self.copy(item, f"{path}/{key}")
        metadata = getattr(value, "_metadata", None)
        if metadata is not None and type(value) is OrderedDict:
            made._metadata = self.copy(metadata, f"{path}/_metadata")
        return Counter(made) if type(value) is Counter else made


def _converted(value: Any, path: str) -> Any:
    """Numbers of NumPy, and of classes made from Python's, as Python's own."""
    import numpy as np

    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return value.item()
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    kind_name = f"{type(value).__module__}.{type(value).__qualname__}"
    hint = " (make it a tensor)" if isinstance(value, np.ndarray) else ""
    raise InvalidInputError(
        f"{path or '/'}: a value of type {kind_name} cannot be kept{hint}: a weight file holds"
        " tensors, numbers, text, lists, tuples, sets and mappings, so that opening it runs no code"
    )


def _checked(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """The tensor without its history, if its bytes are its values."""
    kind = type(tensor)
    why = ""
    if torch.nn.parameter.is_lazy(tensor):
        why = "a lazy parameter that was never used has no values: run one batch first"
    elif kind not in (torch.Tensor, torch.nn.Parameter) and not isinstance(tensor, torch.nn.Buffer):
        why = f"a tensor of type {kind.__module__}.{kind.__qualname__} is not just values"
    elif tensor.device.type == "meta":
        why = "a tensor on the meta device has no values"
    elif tensor.layout != torch.strided:
        why = f"layout {tensor.layout}: make it dense with to_dense()"
    elif tensor.is_quantized:
        why = "a quantized tensor: keep its int_repr(), scale and zero point"
    if why:
        raise InvalidInputError(f"{path or '/'}: {why}")
    # Thousands of small tensors are common: what needs no change is taken as it is.
    tensor = tensor.detach() if tensor.requires_grad or kind is not torch.Tensor else tensor
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


# -- which memory


def _place(found: list[_Found]) -> list[Stored]:
    """Give each tensor its slot; the storages in order of their first tensor."""
    groups: dict[Any, list[_Found]] = {}
    for f in found:
        t = f.tensor
        memory = t.untyped_storage().data_ptr()
        alone = id(f) if not t.numel() or not memory else 0
        groups.setdefault((t.device, memory, t.dtype, alone), []).append(f)
    for group in groups.values():
        _place_group(group)
    slots = (f.slot for f in found)
    return list(dict.fromkeys(s.stored for s in slots if s is not None))


def _place_group(group: list[_Found]) -> None:
    """Tensors over one memory, by where they begin, the longest first."""
    host: _Found | None = None
    same: dict[Any, Slot] = {}
    ordered = [group[0]] if len(group) == 1 else sorted(group, key=_begin_and_length)
    for f in ordered:
        t = f.tensor
        place = (t.storage_offset(), t.shape, t.stride())
        if place in same:
            f.slot = same[place]
            continue
        if host is not None and _reach(t) <= _reach(host.tensor) and host.slot is not None:
            shift = int(t.storage_offset() - host.tensor.storage_offset())
            f.slot = Slot(host.slot.stored, t.dtype, tuple(t.shape), shift, tuple(t.stride()))
        else:
            f.slot = _alone(t)
            if t.is_contiguous():
                host = f
        same[place] = f.slot


def _alone(t: torch.Tensor) -> Slot:
    shape = tuple(t.shape)
    return Slot(Stored(t, t.numel() * t.element_size()), t.dtype, shape, 0, _row_major(shape))


def _begin_and_length(f: _Found) -> tuple[int, int, bool]:
    t = f.tensor
    return int(t.storage_offset()), -_reach(t), not t.is_contiguous()


def _reach(t: torch.Tensor) -> int:
    """Just past the last element that a (not empty) tensor touches."""
    steps = zip(t.shape, t.stride(), strict=True)
    return int(t.storage_offset()) + 1 + sum((n - 1) * s for n, s in steps)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def _filled(value: Any) -> Any:
    """The same value with each `_Found` replaced by its slot, containers in place."""
    if isinstance(value, _Found):
        return value.slot
    if isinstance(value, list):
        value[:] = [_filled(v) for v in value]
    elif type(value) is tuple:
        return tuple(_filled(v) for v in value)
    elif isinstance(value, dict):
        for key in value:
            value[key] = _filled(value[key])
    return value
