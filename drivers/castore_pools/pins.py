"""What a pool file pins: which base it was collected from, its dtype, and what is tied.

Stands in a pool file under ``pin`` and, by the same names, in the registry's record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from castore import LayoutError
from castore.tensors import ITEMSIZE

FIELD = "pin"


@dataclass(frozen=True, slots=True)
class Pin:
    """``frozen``: key to digest of the base's tensor; ``base``: digest of its whole state.

    ``dtype`` is None where nothing was recorded, ``ties`` the groups of keys that are one tensor.
    """

    base: str = ""
    frozen: Mapping[str, str] = field(default_factory=dict)
    dtype: str | None = None
    ties: tuple[tuple[str, ...], ...] = ()

    def document(self) -> dict[str, Any]:
        """As it stands in a pool file: texts, lists and dicts only."""
        return {
            "base": self.base,
            "frozen": dict(self.frozen),
            "dtype": self.dtype or "float32",
            "ties": [list(g) for g in self.ties],
        }


def read_pin(value: Any, where: str) -> Pin:
    """The pin in ``value``, an empty one where there is none; `LayoutError` for a malformed one."""
    if value is None:
        return Pin()
    try:
        base, frozen, dtype = value["base"], dict(value["frozen"]), value["dtype"]
        ties = tuple(tuple(g) for g in value["ties"])
    except (TypeError, KeyError, ValueError) as e:
        raise LayoutError(f"{where}: {FIELD!r} is malformed: {e!r}") from e
    texts = [dtype, base, *frozen, *frozen.values(), *(k for g in ties for k in g)]
    if not all(isinstance(t, str) for t in texts) or dtype not in ITEMSIZE:
        raise LayoutError(f"{where}: {FIELD!r} is malformed: texts and a dtype were expected")
    return Pin(base, frozen, dtype, ties)


def frozen_keys_of(fields: Mapping[str, Any], where: str) -> list[str]:
    """``frozen_keys`` of a pool file: texts, each once."""
    keys = fields.get("frozen_keys")
    if not isinstance(keys, list | tuple) or not all(isinstance(k, str) for k in keys):
        raise LayoutError(
            f"{where}: no list of 'frozen_keys' in it: not a pool file; for generated tensors give"
            " frozen_keys, or the registry's record"
        )
    if len(set(keys)) != len(keys):
        raise LayoutError(f"{where}: 'frozen_keys' names a key twice: {sorted(keys)}")
    return list(keys)
