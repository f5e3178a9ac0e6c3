"""Bring what people put in configurations to plain Python values, or say where it cannot be done.

======================================================  =======================================
given                                                   normal form
======================================================  =======================================
None, bool, int, float, complex, str, bytes             itself; a subclass becomes the plain type
mapping, object with ``keys()``, Namespace, dataclass,  dict; the class's name does not count
attrs or pydantic object
tuple, named tuple, torch.Size                          tuple
set, frozenset                                          set; frozenset where it must be hashable
list, deque, range, any other sequence                  list
NumPy or torch scalar                                   the Python number, bool, text or bytes
NumPy or torch array                                    nested lists
bytearray, memoryview                                   bytes
path, os.PathLike, UUID, torch device, dtype, layout,   its text
memory format, NumPy dtype
Enum                                                    its value
date, datetime, time, timedelta                         itself; a zone becomes its offset
text that YAML 1.1 left unread, like ``1e-3``           float; see `number_of`
======================================================  =======================================

Everything else is refused with its key path: functions and classes (their text would hold an
address or a place in the code), decimals and fractions, modules, objects without a rule here. Keys
follow the same table, except that text stays text.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum
from types import SimpleNamespace
from typing import Any, NoReturn, TypeAlias
from uuid import UUID

from castore import InvalidInputError

MAX_DEPTH = 64
MAX_VALUES = 500_000

_NUMBER = re.compile(
    r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)[eE][-+]?[0-9]+|[-+]\.[0-9]+"
)
_SHORTEST_ID = 7
# (path of what it stands in, key or index); () for the whole configuration.
Path: TypeAlias = tuple[Any, ...]
_TORCH_NAMES = ("device", "dtype", "layout", "memory_format", "qscheme")
_NUMERIC = "biufcSU"
_LARGE, _LONG = 10**20, 200


def number_of(text: str) -> float | None:
    """The number that ``text`` is in YAML 1.2 and everywhere else, where YAML 1.1 leaves it text.

    These are numbers with an exponent but no dot or no sign in it (``1e-3``, ``1.0e10``, ``5E6``)
    and ``-.5``. None for all other text, also for what would be infinite or vanish (``1e999``) and
    for seven or more digits around one bare ``e`` (``1234e56``): that is an id, such as a short
    commit hash, much sooner than a number.
    """
    if not _NUMBER.fullmatch(text):
        return None
    if text.isalnum() and len(text) >= _SHORTEST_ID:
        return None
    value = float(text)
    mantissa = re.split("[eE]", text)[0]
    vanished = value == 0 and any(c in "123456789" for c in mantissa)
    return None if math.isinf(value) or vanished else value


def normal(config: object, leave_out: Iterable[str] = ()) -> dict[Any, Any]:
    """The normal form of a configuration; the caller's object is not changed or kept.

    Parameters
    ----------
    config : mapping, Namespace, dataclass, attrs or pydantic object
        See the table above for what it may hold: at most 64 levels and half a million values.
    leave_out : iterable of str
        Keys of the top level that are not even looked at.

    Raises
    ------
    InvalidInputError
        It is no mapping, or holds something that has no normal form, or itself, or two keys that
        become the same; the message names the key path.
    """
    fields = _fields(config)
    if fields is None:
        _refuse((), config, "a configuration is a mapping from keys to values")
    left_out = set(leave_out)
    kept = [(k, v) for k, v in _items(fields, ()) if not (isinstance(k, str) and k in left_out)]
    walk = _Walk()
    walk.inside.append(id(config))
    return walk.mapping(kept, config, ())


def _refuse(path: Path, value: object, hint: str) -> NoReturn:
    what = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise InvalidInputError(f"configuration: {_text(path)}: {what}: {hint}")


def _fields(value: object) -> Callable[[], Iterable[tuple[Any, Any]]] | None:
    """How to list the keys and values of ``value``; None if it is nothing like a mapping."""
    if isinstance(value, type):
        return None
    if isinstance(value, Mapping):
        return value.items
    if isinstance(value, argparse.Namespace | SimpleNamespace):
        return vars(value).items
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value)]
        return lambda: [(n, getattr(value, n)) for n in names if hasattr(value, n)]
    return _fields_of_libraries(value)


def _fields_of_libraries(value: Any) -> Callable[[], Iterable[tuple[Any, Any]]] | None:
    attributes = getattr(type(value), "__attrs_attrs__", None)
    if attributes is not None:
        return lambda: [(a.name, getattr(value, a.name)) for a in attributes]
    pydantic = sys.modules.get("pydantic")
    if pydantic is not None and isinstance(value, pydantic.BaseModel):
        return lambda: list(value)
    if callable(getattr(type(value), "keys", None)) and hasattr(type(value), "__getitem__"):
        return lambda: [(k, value[k]) for k in value.keys()]  # noqa: SIM118 - its protocol
    return None


def _items(fields: Callable[[], Iterable[tuple[Any, Any]]], path: Path) -> list[tuple[Any, Any]]:
    """The pairs, where reading them may run the caller's code (an unset value, a missing key)."""
    try:
        return list(fields())
    except Exception as e:
        message = f"configuration: {_text(path)}: its values cannot be read: {e}"
        raise InvalidInputError(message) from e


_ELEMENT = object()


def _text(path: Path) -> str:
    """``net.layers[1]['act fn']`` for a path; the parts are only put together for a message."""
    parts: list[Any] = []
    while path:
        path, key = path
        parts.append(key)
    return "".join(map(_step, reversed(parts))).removeprefix(".") or "top level"


def _step(key: object) -> str:
    if key is _ELEMENT:
        return "[an element]"
    if isinstance(key, str) and key.isidentifier():
        return f".{key}"
    short = isinstance(key, float) or (isinstance(key, int) and abs(key) < _LARGE)
    named = short or (isinstance(key, str) and len(key) < _LONG)
    return f"[{key!r}]" if named else f"[a {type(key).__name__}]"


def _scalar(value: Any, path: Path) -> tuple[bool, Any]:
    """Whether ``value`` is a scalar that has a plain form, and that form."""
    for base, convert in _SUBCLASSES:
        if isinstance(value, base):
            return True, convert(value)
    if isinstance(value, date | time | timedelta):
        return True, _moment(value, path)
    if isinstance(value, os.PathLike):
        return True, os.fspath(value)
    if isinstance(value, UUID) or _is_torch_name(value):
        return True, str(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.dtype):
        return True, value.name
    if numpy is not None and isinstance(value, numpy.generic):
        return True, _numpy_scalar(value, path)
    return False, None


# `__str__` and the like of the base class: a subclass may say anything in its own.
_SUBCLASSES: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (str, lambda v: "".join(str.__str__(v))),
    (bool, bool),
    (int, int.__int__),
    (float, float.__float__),
    (complex, complex.__complex__),
    (bytes | bytearray | memoryview, bytes),
)


def _is_torch_name(value: object) -> bool:
    return type(value).__module__ == "torch" and type(value).__name__ in _TORCH_NAMES


def _numpy_scalar(value: Any, path: Path) -> Any:
    plain = value.item()
    if value.dtype.kind in "mM" and isinstance(plain, date | timedelta):
        return _moment(plain, path)
    if type(plain) in (bool, int, float, complex, str, bytes) and value.dtype.kind in _NUMERIC:
        return plain
    _refuse(path, value, f"{value.dtype} has no equivalent in Python: convert it")


def _moment(value: Any, path: Path) -> date | time | timedelta:
    """A date, time or duration of the plain type, its zone (if any) as a fixed offset."""
    if value != value or getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):
        _refuse(path, value, "not a time of whole microseconds: convert it to text or a number")
    if isinstance(value, timedelta):
        return timedelta(value.days, value.seconds, value.microseconds)
    if isinstance(value, datetime):
        day = (value.year, value.month, value.day)
        clock = (value.hour, value.minute, value.second, value.microsecond)
        return datetime(*day, *clock, tzinfo=_offset(value))
    if isinstance(value, time):
        if value.tzinfo is not None and value.utcoffset() is None:
            _refuse(path, value, "its zone has no offset without a date")
        clock = (value.hour, value.minute, value.second, value.microsecond)
        return time(*clock, tzinfo=_offset(value))
    return date(value.year, value.month, value.day)


def _offset(value: datetime | time) -> timezone | None:
    offset = value.utcoffset()
    return None if offset is None else timezone(offset)


def _array(value: Any, path: Path) -> tuple[bool, Any]:
    """Whether ``value`` is an array, and the nested lists (or the scalar) that it holds."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.ndarray):
        size, readable = value.size, value.dtype.kind in _NUMERIC + "O"
    elif torch is not None and isinstance(value, torch.Tensor):
        size, readable = value.numel(), not value.is_meta
    else:
        return False, None
    if size > MAX_VALUES or not readable:
        _refuse(path, value, f"{size} values of {value.dtype}: a configuration cannot hold that")
    try:
        return True, value.tolist()
    except (RuntimeError, NotImplementedError) as e:
        message = f"configuration: {_text(path)}: this array cannot be read as numbers: {e}"
        raise InvalidInputError(message) from e


def _identity(value: Any) -> object:
    """Equal for hashable normal forms that are equal and of equal types, and for no others."""
    if isinstance(value, tuple):
        return tuple, tuple(map(_identity, value))
    if isinstance(value, frozenset):
        return frozenset, frozenset(map(_identity, value))
    return type(value), value if isinstance(value, int) else repr(value)


def _hint(value: object) -> str:
    if isinstance(value, type) or callable(value):
        return "code has no stable text: give its name as text"
    return "no stable encoding: convert it to numbers, text, lists or mappings"


class _Walk:
    """One walk over one configuration: counts values, and knows which containers it is inside."""

    def __init__(self) -> None:
        self.values = 0
        self.inside: list[int] = []

    def value(self, value: Any, path: Path, hashable: bool = False) -> Any:
        """Normal form of ``value``, which stands at ``path``."""
        self.values += 1
        if self.values > MAX_VALUES:
            _refuse(path, value, f"more than {MAX_VALUES} values: keep large data out of it")
        if isinstance(value, Enum):
            return self.value(value.value, path, hashable)
        kind = type(value)
        if kind is str:
            number = None if hashable else number_of(value)
            return value if number is None else number
        if value is None or kind in (bool, int, float, bytes):
            return value
        known, plain = _scalar(value, path)
        if known:
            return self.value(plain, path, hashable) if type(plain) is str else plain
        return self._container(value, path, hashable)

    def _container(self, value: Any, path: Path, hashable: bool) -> Any:
        if id(value) in self.inside:
            _refuse(path, value, "it holds itself")
        if len(self.inside) >= MAX_DEPTH:
            _refuse(path, value, f"more than {MAX_DEPTH} levels deep")
        self.inside.append(id(value))
        try:
            return self._inside(value, path, hashable)
        finally:
            self.inside.pop()

    def _inside(self, value: Any, path: Path, hashable: bool) -> Any:
        if isinstance(value, tuple):
            return tuple([self.value(v, (path, i), hashable) for i, v in enumerate(value)])
        if isinstance(value, Set):
            return self.set(value, path, hashable)
        if hashable:
            _refuse(path, value, "it cannot be a key or an element of a set")
        is_array, items = _array(value, path)
        if is_array:
            return self.value(items, path)
        fields = _fields(value)
        if fields is not None:
            return self.mapping(_items(fields, path), value, path)
        if isinstance(value, Sequence) or type(value).__name__ == "deque":
            return [self.value(v, (path, i)) for i, v in enumerate(value)]
        _refuse(path, value, _hint(value))

    def mapping(self, pairs: list[tuple[Any, Any]], owner: object, path: Path) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        keys: set[object] = set()
        for key, item in pairs:
            here = (path, key)
            plain = self.value(key, here, hashable=True)
            if plain in result or _identity(plain) in keys:
                _refuse(here, owner, "two keys of it become the same")
            keys.add(_identity(plain))
            result[plain] = self.value(item, here)
        return result

    def set(self, value: Set[Any], path: Path, hashable: bool) -> Set[Any]:
        seen: dict[object, Any] = {}
        for item in value:
            plain = self.value(item, (path, _ELEMENT), hashable=True)
            seen[_identity(plain)] = plain
        result = frozenset(seen.values())
        if len(result) != len(seen):
            _refuse(path, value, "two elements become equal but not the same, like 1 and True")
        return result if hashable else set(result)
