"""The one spelling of a configuration: typed, injective, the same on every machine.

`normal` brings a configuration to plain Python values, `encode` writes them as ASCII JSON that
`decode` reads back exactly, and `hp_digest` is the BLAKE3 digest of that text without the keys that
say where things are kept. Two normal forms have one encoding only if they are equal *and* of equal
types: ``1``, ``1.0`` and ``True`` differ, so do a list and a tuple, ``0.0`` and ``-0.0``, and two
Unicode spellings of one word.

What JSON has (null, booleans, finite numbers, text, lists, objects with text keys) stands for
itself. Everything else is an object with one key that begins with ``$``; a mapping that has such a
key itself, or a key that is not text, is written as ``$dict``::

    {"$tuple": [..]}  {"$set": [..]}   sets are sorted by the text of their elements
    {"$dict": [[key, value], ..]}      pairs sorted by the text of the key
    {"$float": "nan" | "inf" | "-inf"}   {"$int": "0x.."}   integers of more than 64 bits
    {"$complex": [re, im]}  {"$bytes": "hex"}  {"$text": "hex"}   text with lone surrogates
    {"$date": iso}  {"$datetime": iso}  {"$time": iso}  {"$timedelta": [days, seconds, us]}
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from typing import Any, TypeAlias

from blake3 import blake3

from castore import FormatError
from castore_experiments.config_yaml import from_yaml, hp_file, to_yaml
from castore_experiments.plain import normal

__all__ = [
    "KEPT_OUT",
    "decode",
    "encode",
    "from_yaml",
    "hp_digest",
    "hp_file",
    "hyperparameters",
    "normal",
    "spell",
    "to_yaml",
]

Json: TypeAlias = Any

KEPT_OUT = ("root_log_dir", "checkpoint_manager", "experiment_name", "is_training", "pause_at_step")
"""Top-level keys that do not count for HP: docs/decisions/0012."""

_INT64 = 1 << 64


def encode(config: object) -> bytes:
    """Canonical text of ``config``: ASCII, no line end.

    Raises
    ------
    InvalidInputError
        Something in it has no encoding; the message names its key path. See `normal`.
    """
    return spell(normal(config))


def spell(document: object) -> bytes:
    """Canonical text of values that are plain already: nothing is converted.

    For documents whose text must stay text; a configuration goes through `encode`.

    Raises
    ------
    TypeError
        It holds something that is no normal form.
    """
    return _text(_typed(document)).encode()


def decode(data: bytes, where: str = "configuration") -> dict[Any, Any]:
    """The mapping that ``data`` spells: ``decode(encode(x))`` equals ``normal(x)``.

    Raises
    ------
    FormatError
        ``data`` is not what `spell` writes for it, down to the byte, or is no mapping.
    """
    try:
        value = _plain(json.loads(data), frozen=False)
        again = spell(value)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as e:
        raise FormatError(f"{where}: not an encoded configuration: {e}") from e
    if again != data or not isinstance(value, dict):
        raise FormatError(
            f"{where}: not in canonical form: another program wrote it, or it was edited"
        )
    return value


def hyperparameters(config: object) -> dict[Any, Any]:
    """The normal form of what counts for HP: ``config`` without the top-level keys `KEPT_OUT`."""
    return normal(config, leave_out=KEPT_OUT)


def hp_digest(config: object) -> str:
    """Full digest of the HP segment: BLAKE3-256 of the canonical text, 64 hex characters.

    The order of keys does not count, nor do the top-level keys `KEPT_OUT`.

    Raises
    ------
    InvalidInputError
        Something that counts has no encoding; the message names its key path.
    """
    return blake3(spell(hyperparameters(config))).hexdigest()


def _text(value: Json) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _typed(value: Any) -> Json:
    """JSON that says the type of everything in the normal form ``value``."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    writer = _WRITERS.get(kind)
    if writer is None:
        raise TypeError(f"{kind.__name__} has no canonical form")
    return writer(value)


def _write_int(value: int) -> Json:
    return value if -_INT64 < value < _INT64 else {"$int": hex(value)}


def _write_float(value: float) -> Json:
    return value if math.isfinite(value) else {"$float": repr(value)}


def _write_str(value: str) -> Json:
    if value.isascii() or not _has_surrogate(value):
        return value
    return {"$text": value.encode("utf-8", "surrogatepass").hex()}


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= c <= "\udfff" for c in text)


def _write_dict(value: dict[Any, Any]) -> Json:
    if all(type(k) is str and k[:1] != "$" and not _has_surrogate(k) for k in value):
        return {k: _typed(v) for k, v in value.items()}
    pairs = [[_typed(k), _typed(v)] for k, v in value.items()]
    return {"$dict": sorted(pairs, key=lambda pair: _text(pair[0]))}


def _write_set(value: set[Any] | frozenset[Any]) -> Json:
    return {"$set": sorted((_typed(v) for v in value), key=_text)}


_WRITERS: dict[type, Callable[[Any], Json]] = {
    int: _write_int,
    float: _write_float,
    str: _write_str,
    dict: _write_dict,
    set: _write_set,
    frozenset: _write_set,
    list: lambda v: [_typed(item) for item in v],
    tuple: lambda v: {"$tuple": [_typed(item) for item in v]},
    bytes: lambda v: {"$bytes": v.hex()},
    complex: lambda v: {"$complex": [_write_float(v.real), _write_float(v.imag)]},
    datetime: lambda v: {"$datetime": v.isoformat()},
    date: lambda v: {"$date": v.isoformat()},
    time: lambda v: {"$time": v.isoformat()},
    timedelta: lambda v: {"$timedelta": [v.days, v.seconds, v.microseconds]},
}


def _plain(value: Json, frozen: bool) -> Any:
    """What `_typed` was given; ``frozen`` where only a hashable value can stand (keys, sets)."""
    if isinstance(value, list):
        return [_plain(v, frozen) for v in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if tag[:1] != "$":
        return {k: _plain(v, frozen) for k, v in value.items()}
    if len(value) != 1:
        raise ValueError(f"{tag} stands beside other keys")
    return _READERS[tag](value[tag], frozen)


def _read_set(value: Json, frozen: bool) -> set[Any] | frozenset[Any]:
    items = [_plain(v, True) for v in value]
    return frozenset(items) if frozen else set(items)


def _read_complex(value: Json, frozen: bool) -> complex:
    real, imag = value
    return complex(_plain(real, frozen), _plain(imag, frozen))


_READERS: Mapping[str, Callable[[Json, bool], Any]] = {
    "$tuple": lambda v, frozen: tuple([_plain(item, frozen) for item in v]),
    "$set": _read_set,
    "$dict": lambda v, frozen: {_plain(k, True): _plain(item, frozen) for k, item in v},
    "$float": lambda v, _: float(v),
    "$int": lambda v, _: int(v, 16),
    "$complex": _read_complex,
    "$bytes": lambda v, _: bytes.fromhex(v),
    "$text": lambda v, _: bytes.fromhex(v).decode("utf-8", "surrogatepass"),
    "$date": lambda v, _: date.fromisoformat(v),
    "$datetime": lambda v, _: datetime.fromisoformat(v),
    "$time": lambda v, _: time.fromisoformat(v),
    "$timedelta": lambda v, _: timedelta(*v),
}
