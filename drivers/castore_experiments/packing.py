"""Plain JSON for the few kinds of values that states of loaders and generators are made of.

Tensors, arrays and bytes become base64; tuples, sets of plain values and mappings with keys other
than text are marked. A mapping with one key that starts with ``$`` is such a mark.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from castore import FormatError, InvalidInputError

_DEEPEST = 50
_DTYPE = re.compile("[<>|=]?[biuf][0-9]{1,2}")


def pack(value: Any, path: str = "state") -> Any:
    """``value`` in plain JSON types; `unpack` gives an equal value back.

    Raises
    ------
    InvalidInputError
        A value of another kind; ``path`` and its place in ``value`` are named.
    """
    if path.count("/") > _DEEPEST:
        raise InvalidInputError(f"{path[:200]}...: over {_DEEPEST} levels")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) in (list, tuple):
        items = [pack(v, f"{path}/{i}") for i, v in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if isinstance(value, Mapping):
        return _pack_mapping(value, path)
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    return _pack_array(value, path)


def _pack_mapping(value: Mapping[Any, Any], path: str) -> Any:
    plain = all(type(k) is str and not k.startswith("$") for k in value)
    if plain:
        return {k: pack(v, f"{path}/{k}") for k, v in value.items()}
    return {"$map": [[pack(k, path), pack(v, f"{path}/{k!r}")] for k, v in value.items()]}


def _pack_array(value: Any, path: str) -> Any:
    import numpy as np
    import torch

    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return pack(value.item(), path)
    if isinstance(value, torch.Tensor) and value.dtype in _dtypes():
        flat = value.detach().cpu().contiguous().numpy()
        return {"$tensor": _pack_numpy(flat)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"$array": _pack_numpy(value)}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise InvalidInputError(
        f"{path}: a value of type {kind} cannot be kept; numbers, text, bytes, lists, mappings,"
        " arrays and tensors can"
    )


def _dtypes() -> set[Any]:
    import torch as t

    return {t.uint8, t.int8, t.int16, t.int32, t.int64, t.float32, t.float64, t.bool}


def _pack_numpy(array: Any) -> list[Any]:
    text = base64.b64encode(array.tobytes()).decode("ascii")
    return [array.dtype.newbyteorder("<").str, list(array.shape), text]


def unpack(value: Any) -> Any:
    """What `pack` was given. `FormatError` if a mark is not one of its own."""
    if isinstance(value, list):
        return [unpack(v) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (mark := next(iter(value))).startswith("$"):
        try:
            return _MARKS[mark](value[mark])
        except (KeyError, ValueError, TypeError, OverflowError) as e:
            raise FormatError(f"packed state: {mark} holds no value of that kind") from e
    return {k: unpack(v) for k, v in value.items()}


def _numpy(parts: Any) -> Any:
    import numpy as np

    kind, shape, text = parts
    if not _DTYPE.fullmatch(kind):  # NumPy would evaluate other texts
        raise ValueError(kind)
    return np.frombuffer(base64.b64decode(text), dtype=kind).reshape(shape).copy()


def _tensor(parts: Any) -> Any:
    import torch

    return torch.from_numpy(_numpy(parts))


_MARKS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": lambda v: tuple(unpack(v)),
    "$map": lambda v: {unpack(k): unpack(w) for k, w in v},
    "$bytes": base64.b64decode,
    "$array": _numpy,
    "$tensor": _tensor,
}
