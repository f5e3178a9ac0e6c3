"""What callers log, as numbers, names and columns; whatever cannot be stored is refused here.

Everything is converted before `Log.log` returns, so what the caller does to a mapping, an array
or a tensor afterwards changes nothing, and nothing can fail later in the background.
"""

from __future__ import annotations

import json
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from castore import InvalidInputError
from castore_experiments.signals.schema import INT64

if TYPE_CHECKING:
    import pyarrow as pa

Floats = np.ndarray[Any, np.dtype[np.float32]]
MAX_NAME = 1000
_PLAIN = {float, int, bool, np.float32, np.float64, np.float16, np.int64, np.int32}


def number(value: Any, what: str) -> float:
    """``value`` as a float; NaN and infinities stay. Numpy and torch scalars count, text does not.

    Raises
    ------
    InvalidInputError
        Not one real number: says which value of which metric.
    """
    if type(value) is float:
        return value
    if not isinstance(value, Real) and hasattr(value, "item") and _size(value) == 1:
        value = value.item()
    try:
        if isinstance(value, Real):
            return float(value)
    except OverflowError:
        pass
    raise InvalidInputError(
        f"{what}: expected one real number (a 0-d array or tensor will do), found {_show(value)}"
    )


def optional(value: Any, what: str) -> float | None:
    """`number`, or None."""
    return None if value is None else number(value, what)


def integer(value: Any, what: str) -> int:
    """``value`` as an int of 64 bits; `InvalidInputError` for fractions and what is larger."""
    if type(value) is not int:
        if not hasattr(value, "__index__") and hasattr(value, "item") and _size(value) == 1:
            value = value.item()
        try:
            value = operator.index(value)
        except (TypeError, ValueError):
            raise InvalidInputError(f"{what}: expected an integer, found {_show(value)}") from None
    if not INT64[0] <= value <= INT64[1]:
        raise InvalidInputError(f"{what}: {value} does not fit 64 bits")
    return int(value)


def name(value: Any, what: str) -> str:
    """``value`` if it is text of 1 to 1000 bytes in UTF-8, else `InvalidInputError`."""
    try:
        if isinstance(value, str) and 0 < len(value.encode()) <= MAX_NAME:
            return str(value)
    except UnicodeEncodeError:
        pass
    raise InvalidInputError(f"{what}: expected text of 1 to {MAX_NAME} bytes, found {_show(value)}")


def text(value: Any, what: str) -> str:
    """``value`` if it is text that UTF-8 can hold, else `InvalidInputError`."""
    try:
        if isinstance(value, str):
            value.encode()
            return str(value)
    except UnicodeEncodeError:
        pass
    raise InvalidInputError(f"{what}: expected text, found {_show(value)}")


def json_text(value: Sequence[Any], what: str, empty: str) -> str:
    """``value`` as a JSON list, ``empty`` for none; `InvalidInputError` for what JSON lacks."""
    if len(value) == 0:
        return empty
    try:
        return text(json.dumps(list(value), ensure_ascii=False), what)
    except (TypeError, ValueError, RecursionError) as e:
        raise InvalidInputError(f"{what}: not a JSON list: {e}") from e


def floats(values: Any, what: str) -> Floats:
    """Values as a private float32 column; beyond its range a value is the infinity of its sign.

    A tensor, or tensors of one device, are copied from it once.
    """
    if hasattr(values, "detach"):
        values = values.detach().float().cpu().numpy()
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind not in "fiub":
            raise InvalidInputError(
                f"{what}: expected one dimension of real numbers, found {values.dtype} of shape"
                f" {values.shape}"
            )
        return _single(values)
    listed = list(values)
    kinds = set(map(type, listed))
    if kinds <= _PLAIN:
        try:
            return _single(np.fromiter(listed, np.float64, len(listed)))
        except OverflowError:
            pass
    stacked = _stacked(listed, kinds)
    if stacked is not None:
        return floats(stacked, what)
    return _single(np.array([number(v, what) for v in listed], np.float64))


def ids(values: Any, what: str) -> pa.Array:
    """Sample ids as a column of text: text as it is, integers in decimal."""
    import pyarrow as pa

    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu":
        return pa.array(values).cast(pa.string())
    listed = list(values)
    kinds = set(map(type, listed))
    try:
        if kinds <= {str}:
            return pa.array(listed, pa.string())
        if kinds <= {int}:
            return pa.array(list(map(str, listed)), pa.string())
        return pa.array([_id(v, what) for v in listed], pa.string())
    except (UnicodeEncodeError, pa.ArrowInvalid, OverflowError) as e:
        raise InvalidInputError(f"{what}: a sample id cannot be stored: {e}") from e


def integers(values: Iterable[Any], what: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Annotation ids as a private column."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind == "i":
        return np.array(values, np.int64)
    return np.array([integer(v, what) for v in values], np.int64)


def pairs(values: Any, parts: int, what: str) -> tuple[Any, ...]:
    """A mapping, or a tuple of ``parts`` columns, taken apart into columns of one length."""
    if isinstance(values, Mapping):
        keys, found = list(values), list(values.values())
        if parts == 2:
            return keys, found
        if not all(isinstance(k, tuple) and len(k) == parts - 1 for k in keys):
            raise InvalidInputError(f"{what}: expected keys (sample_id, annotation_id)")
        return (*([k[i] for k in keys] for i in range(parts - 1)), found)
    if isinstance(values, tuple) and len(values) == parts:
        if len({len(v) for v in values}) != 1:
            raise InvalidInputError(f"{what}: columns of lengths {[len(v) for v in values]}")
        return values
    raise InvalidInputError(
        f"{what}: expected a mapping or a tuple of {parts} columns, found {_show(values)}"
    )


def _single(values: np.ndarray[Any, Any]) -> Floats:
    with np.errstate(over="ignore"):
        return np.array(values, np.float32)


def _stacked(listed: list[Any], kinds: set[type]) -> Any:
    """Tensors of one kind and place as one; None for anything else."""
    torch = sys.modules.get("torch")
    if torch is None or not all(issubclass(k, torch.Tensor) for k in kinds):
        return None
    if any(t.numel() != 1 for t in listed) or len({(t.device, t.dtype) for t in listed}) != 1:
        return None
    return torch.stack([t.detach().reshape(()) for t in listed])


def _id(value: Any, what: str) -> str:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool | np.bool_ | bytes | float):
        raise InvalidInputError(f"{what}: a sample id is text or an integer, not {_show(value)}")
    return str(value if isinstance(value, int) else integer(value, what))


def _size(value: Any) -> int:
    """How many elements an array or tensor has; 1 for a scalar that says nothing."""
    shape = getattr(value, "shape", ())
    return int(np.prod(shape)) if shape is not None else 1


def _show(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:100]!r}"


def ends(values: Floats | None) -> tuple[float | None, float | None]:
    """The least and greatest value, NaN aside; None where there is none."""
    if values is None:
        return None, None
    found = values[~np.isnan(values)]
    return (float(found.min()), float(found.max())) if len(found) else (None, None)


def count(value: Any, default: int, what: str) -> int:
    """A count of at most 32 bits."""
    found = default if value is None else integer(value, what)
    if not 0 <= found < 1 << 31:
        raise InvalidInputError(f"{what}: {found} is no count of 32 bits")
    return found
