"""What may be joined: every reason to refuse, with the keys it is about."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from castore import IntegrityError, LayoutError
from castore.tensors import TensorInfo
from castore_pools.pins import Pin
from castore_pools.values import dtype_name, is_floating, value_digest

if TYPE_CHECKING:
    from castore_pools.checkpoint import Checkpoint

DEFAULT_DTYPE = "float32"
_TIED_BY_NAME = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


class Form(NamedTuple):
    """What of a value is compared before any tensor is read."""

    dtype: str
    shape: tuple[int, ...]


def form_of(value: Any) -> Form:
    """Dtype and shape of a tensor or its description; of a plain value its type."""
    if isinstance(value, TensorInfo):
        return Form(value.dtype, value.shape)
    if hasattr(value, "numel"):
        return Form(dtype_name(value), tuple(value.shape))
    return Form(f"a plain {type(value).__name__}", ())


def check_keys(base: Collection[str], given: Collection[str], frozen: Sequence[str]) -> None:
    """`LayoutError` unless ``frozen`` and ``given`` part the base's keys between them."""
    at_hand, held = set(given), set(frozen)
    refusals = [
        ("frozen keys that the base lacks", [k for k in frozen if k not in base]),
        ("keys that are both frozen and present", [k for k in frozen if k in at_hand]),
        ("keys of the base missing from both", [k for k in base if k not in at_hand | held]),
        ("keys that the base lacks", [k for k in given if k not in base]),
    ]
    _refuse(refusals)


def check_forms(base: Mapping[str, Any], given: Mapping[str, Any], dtype: str | None) -> None:
    """`LayoutError` unless all given values have the base's shapes and the right dtypes.

    With a recorded ``dtype`` floating-point tensors have that; without, float32 and the base's.
    """
    shapes, kinds = [], []
    for key, value in given.items():
        ours, theirs = form_of(value), form_of(base[key])
        if ours.shape != theirs.shape:
            shapes.append(f"{key}: {ours.shape}, the base has {theirs.shape}")
        expected = theirs.dtype
        if is_floating(theirs.dtype):
            expected = dtype or DEFAULT_DTYPE
            if dtype is None and theirs.dtype != DEFAULT_DTYPE:
                kinds.append(f"{key}: the base has {theirs.dtype}, expected {DEFAULT_DTYPE}")
                continue
        if ours.dtype != expected:
            kinds.append(f"{key}: {ours.dtype}, expected {expected}")
    advice = "" if dtype else " (say dtype=... where it was collected in another)"
    _refuse(
        [("shapes that differ from the base's", shapes), (f"dtypes that differ{advice}", kinds)]
    )


def _refuse(refusals: Sequence[tuple[str, Sequence[str]]]) -> None:
    found = [f"{what}: {_some(keys)}" for what, keys in refusals if keys]
    if found:
        raise LayoutError(f"these do not make one model: {'; '.join(found)}")


def _some(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
    return ", ".join(keys[:8]) + more


def check_pin(base: Checkpoint, frozen: Mapping[str, Any], pin: Pin, where: str) -> None:
    """`IntegrityError` unless the base's frozen values are those that were pinned."""
    wrong = []
    for key, value in frozen.items():
        expected = pin.frozen.get(key)
        if expected is None:
            raise LayoutError(f"{where}: its pin lacks the frozen key {key!r}")
        actual = base.digest(key, value)
        if actual != expected:
            wrong.append(f"{key}: collected from {expected}, the base has {actual}")
    if wrong:
        raise IntegrityError(
            f"{where}: the base is not the one it was collected from: {_some(wrong)}; find the"
            " right one with find_base or by the registry's ckpt_path"
        )


def tie_groups(
    base: Checkpoint,
    keys: Collection[str],
    recorded: Sequence[Sequence[str]],
    *,
    by_name: bool = True,
) -> list[list[str]]:
    """Which of ``keys`` are one tensor: as recorded, as stored in the base, or by T5's names."""
    groups = [[k for k in g if k in keys] for g in (*recorded, *base.ties())]
    if by_name and not recorded:
        groups += _named_alike(keys)
    merged: list[list[str]] = []
    for group in groups:
        touching = [m for m in merged if set(m) & set(group)]
        merged = [m for m in merged if m not in touching]
        merged.append(list(dict.fromkeys([*(k for m in touching for k in m), *group])))
    order = {k: i for i, k in enumerate(base.state)}
    return [sorted(g, key=lambda k: order.get(k, 0)) for g in merged if len(g) > 1]


def _named_alike(keys: Collection[str]) -> list[list[str]]:
    """T5's three names below one prefix, for files that record no ties."""
    heads = [k.removesuffix(_TIED_BY_NAME[0]) for k in keys if k.endswith(_TIED_BY_NAME[0])]
    return [[h + n for n in _TIED_BY_NAME if h + n in keys] for h in heads]


def tie(values: dict[str, Any], groups: Sequence[Sequence[str]], where: str) -> None:
    """Make each group of ``values`` one tensor; `IntegrityError` where its copies differ."""
    for group in groups:
        first = values[group[0]]
        for key in group[1:]:
            other = values[key]
            if other is first:
                continue
            if not _same(first, other):
                raise IntegrityError(
                    f"{where}: {group[0]} and {key} are tied and differ: digests"
                    f" {value_digest(first)} and {value_digest(other)}"
                )
            values[key] = first


def _same(first: Any, other: Any) -> bool:
    """Whether two values are equal to the bit."""
    import torch

    if form_of(first) != form_of(other):
        return False
    if not hasattr(first, "untyped_storage"):
        return bool(first == other)
    return torch.equal(_bits(first), _bits(other))


def _bits(tensor: Any) -> Any:
    """The bytes, so that NaN equals itself."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)
