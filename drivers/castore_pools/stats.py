"""How far each tensor spreads over a pool, one stretch of elements at a time.

Memory is bounded by a stretch, whatever the model and the number of files: the files stay open
and each stretch is read from all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from castore import LayoutError
from castore.tensors import ITEMSIZE, TensorInfo, row_major
from castore_pools.checkpoint import Checkpoint, open_checkpoint
from castore_pools.layout import CellFiles
from castore_pools.places import Place
from castore_pools.values import is_floating, load_tensors

if TYPE_CHECKING:
    from torch import Tensor

STRETCH = 1 << 20
"""Elements looked at together."""

KEEP = 2 << 20
"""Bytes of blobs that each opened file of a snapshot may keep meanwhile."""


@dataclass(frozen=True, slots=True)
class Spread:
    """One tensor over a pool of ``files``.

    ``mean``, ``min``, ``max``: of all values of all files. ``std``: root of the mean, over
    elements, of the variance over files (divided by the number of files). ``largest``: the largest
    standard deviation of one element. ``from_base``: root mean square of the difference to the
    base, None without one. NaN where a value is not finite.
    """

    key: str
    elements: int
    files: int
    mean: float
    min: float
    max: float
    std: float
    largest: float
    from_base: float | None


def pool_stats(
    place: Place, files: CellFiles, keys: Sequence[str] | None = None
) -> Iterator[Spread]:
    """`spread` of a cell's pool; tensor by tensor, in the files' order."""
    base = open_checkpoint(place.source(files.base)) if files.base else None
    members = [open_checkpoint(place.source(path)) for path in files.pool.values()]
    return spread(members, base, keys)


def spread(
    members: Sequence[Checkpoint], base: Checkpoint | None, keys: Sequence[str] | None = None
) -> Iterator[Spread]:
    """The spread of each floating-point tensor over ``members``.

    Raises
    ------
    LayoutError
        No members, a key that they lack, or shapes that differ between them.
    """
    if not members:
        raise LayoutError("a pool without files has no spread")
    first = members[0]
    names = list(first.state) if keys is None else list(keys)
    for key in names:
        info = first.state.get(key)
        if info is None or any(_shape(m, key) != _shape(first, key) for m in members):
            raise LayoutError(f"{key!r}: missing from a member, or of another shape there")
        if isinstance(info, TensorInfo) and is_floating(info.dtype):
            against = base if base is not None and _shape(base, key) == info.shape else None
            yield _spread(key, info, members, against)


def _shape(member: Checkpoint, key: str) -> Any:
    return getattr(member.state.get(key), "shape", None)


def _spread(
    key: str, info: TensorInfo, members: Sequence[Checkpoint], base: Checkpoint | None
) -> Spread:
    n, elements = len(members), info.elements
    total = square = away = largest = 0.0
    low, high = math.inf, -math.inf
    for start in range(0, elements, STRETCH):
        stop = min(start + STRETCH, elements)
        mean = moment = anchor = None
        if base is not None:
            anchor = _stretch(base, key, start, stop)
        for count, member in enumerate(members, 1):
            value = _stretch(member, key, start, stop)
            low, high = _least(low, value.min()), _most(high, value.max())
            if anchor is not None:
                away += float(((value - anchor) ** 2).sum())
            if mean is None or moment is None:
                mean, moment = value.clone(), value * 0
                continue
            step = value - mean  # Welford's recurrence: no difference of large sums
            mean += step / count
            moment += step * (value - mean)
        assert mean is not None and moment is not None
        total += float(mean.sum())
        square += float(moment.sum()) / n
        largest = _most(largest, (moment / n).max().sqrt())
    one = max(1, elements)
    return Spread(
        key,
        elements,
        n,
        total / one if elements else math.nan,
        low if elements else math.nan,
        high if elements else math.nan,
        math.sqrt(square / one) if square >= 0 else math.nan,
        largest,
        math.sqrt(away / (one * n)) if base is not None and away >= 0 else None,
    )


def _least(a: float, b: Any) -> float:
    return math.nan if math.isnan(a) or math.isnan(float(b)) else min(a, float(b))


def _most(a: float, b: Any) -> float:
    return math.nan if math.isnan(a) or math.isnan(float(b)) else max(a, float(b))


def _stretch(member: Checkpoint, key: str, start: int, stop: int) -> Tensor:
    """Elements ``[start, stop)`` in row-major order, as float64."""
    import torch

    info = member.state[key]
    if not info.contiguous:
        whole = member.tensor(key)
        return whole.contiguous().reshape(-1)[start:stop].to(torch.float64)
    shape = (stop - start,)
    part = replace(
        info,
        shape=shape,
        strides=row_major(shape),
        offset=info.offset + start * ITEMSIZE[info.dtype],
    )
    return load_tensors([(member.source, member.file, part)])[0].to(torch.float64)
