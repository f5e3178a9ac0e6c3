"""The YAML that a manifest may use: read event by event within bounds, written as JSON values.

Read: mappings, sequences and scalars of YAML 1.1, with times left as text. Tags other than those of
plain scalars, anchors, aliases, a key twice, and more than `MAX_DEPTH` levels are refused, so that
nothing is built, nothing multiplies and no stack overflows. Pure; no I/O.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from castore import FormatError, InvalidInputError

MAX_BYTES = 64 << 20
MAX_DEPTH = 24
MAX_KEY = 1000
"""Characters of a key as written: YAML itself stops looking for the colon after 1024."""

MAX_NUMBER = 4300
"""Characters of a number: as many as Python takes in base ten."""

_CONSTANTS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **{w: True for base in ("yes", "true", "on") for w in (base, base.title(), base.upper())},
    **{w: False for base in ("no", "false", "off") for w in (base, base.title(), base.upper())},
}
_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{2,}")
_ODD = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_LONE = re.compile("[\ud800-\udfff]")
_PLAIN_TAGS = {"tag:yaml.org,2002:" + t for t in ("str", "int", "float", "bool", "null")}


# -- reading


def load(data: bytes, where: str) -> Any:
    """The one document in ``data``, of dict, list, str, int, float, bool and None.

    Raises
    ------
    FormatError
        Not YAML, or beyond the subset; the message names the line.
    """
    import yaml

    if len(data) > MAX_BYTES:
        raise FormatError(f"{where}: {len(data)} bytes, at most {MAX_BYTES} are read")
    reader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _Composer(yaml.parse(data, reader), where).document()
    except yaml.YAMLError as e:
        raise FormatError(f"{where}: not YAML: {' '.join(str(e).split())}") from e


class _Composer:
    """Builds plain values from a parser's events, one level of nesting a call."""

    def __init__(self, events: Iterator[Any], where: str):
        self._events, self._where = events, where

    def document(self) -> Any:
        """The value of the first document, which must be the only one."""
        import yaml

        next(self._events)  # the stream begins
        if isinstance(next(self._events), yaml.StreamEndEvent):
            raise FormatError(f"{self._where}: empty")
        value = self._value(next(self._events), MAX_DEPTH)
        next(self._events)  # the document ends
        if not isinstance(next(self._events), yaml.StreamEndEvent):
            raise FormatError(f"{self._where}: more than one YAML document")
        return value

    def _value(self, event: Any, depth: int) -> Any:
        import yaml

        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise self._refused(event, "anchors and aliases are not read")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if event.tag is not None:
            raise self._refused(event, f"the tag {event.tag!r} is not read")
        if depth == 0:
            raise self._refused(event, f"more than {MAX_DEPTH} levels")
        if isinstance(event, yaml.SequenceStartEvent):
            return list(self._items(yaml.SequenceEndEvent, depth - 1))
        return self._mapping(depth - 1)

    def _items(self, end: type, depth: int) -> Iterator[Any]:
        while not isinstance(event := next(self._events), end):
            yield self._value(event, depth)

    def _mapping(self, depth: int) -> dict[Any, Any]:
        import yaml

        result: dict[Any, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._value(event, depth)
            if isinstance(key, dict | list):
                raise self._refused(event, "a key must be a scalar")
            if key in result:
                raise self._refused(event, f"the key {key!r} stands twice")
            result[key] = self._value(next(self._events), depth)
        return result

    def _scalar(self, event: Any) -> Any:
        tag, text = event.tag, event.value
        if tag not in (None, "!") and tag not in _PLAIN_TAGS:
            raise self._refused(event, f"the tag {tag!r} is not read")
        if tag == "!" or (tag or "").endswith(":str") or (tag is None and not event.implicit[0]):
            return text
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if text[0] not in "-+.0123456789":
            return text
        return _number(text)

    def _refused(self, event: Any, why: str) -> FormatError:
        return FormatError(f"{self._where}, line {event.start_mark.line + 1}: {why}")


def _number(text: str) -> Any:
    """YAML 1.1's own reading of what may be a number; a time, and what is none, stay text.

    So do over `MAX_NUMBER` characters: in base 60 the time grows with the square of their number.
    """
    import yaml

    if len(text) > MAX_NUMBER:
        return text
    try:
        value = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, OverflowError):
        return text
    return value if isinstance(value, int | float) else text


# -- writing


def write_key(key: Any) -> str:
    """A key as it stands before the colon: bare where that is safe, else as JSON text."""
    bare = isinstance(key, str) and _BARE.fullmatch(key) and key not in _CONSTANTS
    text = key if bare else write(key)
    if isinstance(key, Mapping | list | tuple) or len(text) > MAX_KEY:
        raise InvalidInputError(f"{text[:40]}...: not a key that YAML can hold")
    return str(text)


def write(value: Any) -> str:
    """``value`` on one line, as JSON that is YAML 1.1 and 1.2 too.

    Numbers that are not finite are spelled ``.nan`` and ``.inf``, which is YAML alone.
    `InvalidInputError` for other types than those `load` gives.
    """
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_flow_key(k)}: {write(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return "[" + ", ".join(write(v) for v in value) + "]"
    raise InvalidInputError(f"a {type(value).__name__} has no place in a manifest")


def _flow_key(key: Any) -> str:
    text = write_key(key)
    return f'"{text}"' if isinstance(key, str) and text[0] != '"' else text


def _text(value: str) -> str:
    if value.isascii():
        text = json.dumps(value)
        return text.replace("\x7f", "\\u007f")
    if _LONE.search(value):
        raise InvalidInputError(f"{value[:40]!r}: half a surrogate pair is no text")
    return _ODD.sub(lambda m: f"\\u{ord(m[0]):04x}", json.dumps(value, ensure_ascii=False))


def _float(value: float) -> str:
    if math.isfinite(value):
        mantissa, e, exponent = float.__repr__(value).partition("e")
        return f"{mantissa}{'' if '.' in mantissa else '.0'}{e}{exponent}"
    return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
