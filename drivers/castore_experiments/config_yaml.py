"""HP files: YAML for people and other programs, and reading it without being hurt by it.

What is written holds no tags, is the same to a YAML 1.1 and a YAML 1.2 reader, and is the same
bytes for equal configurations. YAML has no tuples and no text of its own for bytes and the like, so
this is a view of the configuration; the exact one is `canonical.encode`'s.

What is read is what PyYAML's safe loader reads, with two differences: numbers such as ``1e-3`` are
numbers, and a key that stands twice in one mapping is an error. So ``on`` is true, ``1:30`` is 90
and ``017`` is 15, as for everybody who loads YAML in Python.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import date, datetime
from itertools import pairwise
from typing import Any

import yaml

from castore import FormatError, InvalidInputError
from castore_experiments.plain import MAX_DEPTH, MAX_VALUES, normal, number_of

MAX_BYTES = 16 << 20
MAX_NUMBER = 4300
"""Characters of a number: as many as Python takes in base ten."""
_BASE_60 = re.compile("[-+._0-9]+:[-+._:0-9]+")
_TAGS = ("bool", "binary", "float", "int", "map", "null", "seq", "set", "str", "timestamp")
_PREFIX = "tag:yaml.org,2002:"

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./+-]*(?: [A-Za-z0-9_./+-]+)*")
_WORDS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"])
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_LARGEST = 10**4000
_LONGEST_KEY = 1000
_TIMESTAMP = re.compile(r"[0-9- ]{11}[0-9:]{8}(?:\.[0-9]+)?(?:[-+][0-9]{2}:[0-9]{2})?")
_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_LABEL = re.compile(r"[0-9a-f]{8}")


def to_yaml(config: object, label: str) -> bytes:
    """The HP file of ``config``: ``{exp_hash: label, hyperparameters: config}``, UTF-8.

    Guaranteed: ``yaml.safe_load`` gives back numbers, booleans, null, dates, text, lists and
    mappings of the normal form as they are (of two zones one instant, an offset of seconds as
    text). Tuples become lists; sets become lists in the order of their elements' text; bytes become
    hexadecimal text; complex numbers, times, durations, and keys that YAML lacks, their
    Python text.
    Keys are sorted by their text.

    Raises
    ------
    InvalidInputError
        See `plain.normal`; or two keys have one text.
    """
    lines = [f"exp_hash: {_quoted(label)}"]
    lines += _entry("hyperparameters:", normal(config), "")
    return ("\n".join(lines) + "\n").encode()


def from_yaml(data: bytes, where: str = "configuration") -> dict[Any, Any]:
    """The mapping that a YAML file holds; an empty file is an empty mapping.

    Nothing but plain values is ever built. An HP file gives its whole document, see `hp_file`.

    Raises
    ------
    FormatError
        Not YAML, no mapping, a foreign tag, a key twice in one mapping, over 16 MiB, over 64
        levels, or over half a million values once aliases are followed; with the line where it can.
    """
    if len(data) > MAX_BYTES:
        raise FormatError(f"{where}: {len(data)} bytes; a configuration has at most {MAX_BYTES}")
    try:
        _check(data, where)
        # Not `yaml.load` with an unsafe loader: `_Loader` is the safe one and knows fewer tags.
        value = yaml.load(data, Loader=_Loader)
    except yaml.YAMLError as e:
        raise FormatError(f"{where}: {' '.join(str(e).split())}") from e
    except (ValueError, TypeError, OverflowError, RecursionError) as e:
        raise e if isinstance(e, FormatError) else FormatError(f"{where}: bad value: {e}") from e
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected a mapping of keys to values, found {_kind(value)}")
    return value


def hp_file(data: bytes, where: str = "HP file") -> tuple[dict[Any, Any], str | None]:
    """The configuration in an HP file and the label it names; a bare configuration names none.

    Raises
    ------
    FormatError
        See `from_yaml`; or the label is not text of 8 hexadecimal characters: one that lost its
        quotes is another number, and never guessed at.
    """
    document = from_yaml(data, where)
    if "hyperparameters" not in document:
        return document, None
    config, label = document["hyperparameters"], document.get("exp_hash")
    if not isinstance(config, dict):
        raise FormatError(f"{where}: hyperparameters: expected a mapping, found {_kind(config)}")
    if label is not None and not (isinstance(label, str) and _LABEL.fullmatch(label)):
        raise FormatError(
            f"{where}: exp_hash: expected 8 hexadecimal characters in quotes, found {label!r}: "
            "put the quotes back"
        )
    return config, label


def _entry(head: str, value: Any, indent: str) -> Iterator[str]:
    """Lines of ``head`` and its value; what does not fit the line stands below, further in."""
    below = indent + "  "
    if isinstance(value, dict) and value:
        yield indent + head
        for key, item in _by_text(value):
            # YAML finds a key on one line only up to 1024 characters.
            if len(key) > _LONGEST_KEY:
                yield f"{below}? {key}"
            yield from _entry(":" if len(key) > _LONGEST_KEY else f"{key}:", item, below)
    elif isinstance(value, list | tuple | set | frozenset) and value:
        yield indent + head
        for item in _in_order(value):
            yield from _entry("-", item, below)
    else:
        yield f"{indent}{head} {_scalar(value)}"


def _by_text(value: dict[Any, Any]) -> list[tuple[str, Any]]:
    pairs = sorted(((_key(k), v) for k, v in value.items()), key=lambda pair: pair[0])
    for (key, _), (following, _) in pairwise(pairs):
        if key == following:
            raise InvalidInputError(f"configuration: two keys are both {key} in YAML: rename one")
    return pairs


def _in_order(value: Any) -> list[Any]:
    if isinstance(value, set | frozenset):
        return sorted(value, key=lambda v: (_scalar(v), type(v).__name__))
    return list(value)


def _scalar(value: Any) -> str:
    """One line of YAML for a value that has no lines below it, or for a key."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value) if abs(value) < _LARGEST else hex(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, datetime):
        text = value.isoformat(" ")
        return text if _TIMESTAMP.fullmatch(text) else _quoted(text)
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, list | dict):
        return "[]" if isinstance(value, list) else "{}"
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
        return value if plain and len(value) <= _LONGEST_KEY else _quoted(value)
    if isinstance(value, bytes):
        return _quoted(value.hex())
    if isinstance(value, tuple | frozenset | set):
        return _key(value) if value else "[]"
    return _quoted(str(value))


def _key(value: Any) -> str:
    if isinstance(value, tuple | frozenset | set):
        text = ", ".join(map(_key, _in_order(value)))
        return _quoted(f"({text})" if isinstance(value, tuple) else f"{{{text}}}")
    if isinstance(value, bytes):
        return _quoted(repr(value))
    return _scalar(value)


def _float(value: float) -> str:
    if not math.isfinite(value):
        return {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}[repr(value)]
    mantissa, e, exponent = repr(value).partition("e")
    # Without a dot YAML 1.1 takes it for text.
    return f"{mantissa}{'' if '.' in mantissa else '.0'}{e}{exponent}"


def _quoted(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    code = ord(character)
    if character in _ESCAPES:
        return _ESCAPES[character]
    unseen = code < 0x20 or 0x7F <= code <= 0xA0 or code in (0x2028, 0x2029, 0xFEFF)
    return f"\\u{code:04X}" if unseen or 0xFFFE <= code <= 0xFFFF else character


class _Loader(_Safe):  # type: ignore[misc]  # either of PyYAML's two safe loaders
    """PyYAML's safe loader, for which a key stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        own = [key for key, _ in node.value if key.tag != _PREFIX + "merge"]
        for key in own:
            if isinstance(key, yaml.ScalarNode):
                key.style = key.style or "key"  # so `_construct_text` leaves it alone
        result: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        seen: set[Any] = set()
        for key in own:
            name = self.construct_object(key, deep=True)
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {name!r} stands twice", key.start_mark
                )
            seen.add(name)
        return result


def _construct_text(loader: Any, node: yaml.ScalarNode) -> Any:
    text = loader.construct_scalar(node)
    number = number_of(text) if node.style in (None, "") else None
    return text if number is None else number


_Loader.add_constructor(_PREFIX + "str", _construct_text)


def _check(data: bytes, where: str) -> None:
    """Refuse what would be foreign, too deep or too large, before anything is built from it."""
    count = documents = 0
    open_: list[tuple[str | None, int]] = []
    weights: dict[str, int] = {}
    for event in yaml.parse(data, Loader=_Safe):
        line = f"{where}: line {event.start_mark.line + 1 if event.start_mark else '?'}"
        documents += isinstance(event, yaml.DocumentStartEvent)
        if documents > 1:
            raise FormatError(f"{line}: expected a single document, found another")
        if isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in open_):
                raise FormatError(f"{line}: *{event.anchor} holds itself")
            count += weights.get(event.anchor or "", 0)
        elif isinstance(event, yaml.NodeEvent):
            count += 1
            _check_scalar(event, line)
            if isinstance(event, yaml.CollectionStartEvent):
                open_.append((event.anchor, count))
            elif event.anchor:
                weights[event.anchor] = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_.pop()
            if anchor:
                weights[anchor] = count - before + 1
        if len(open_) > MAX_DEPTH or count > MAX_VALUES:
            raise FormatError(
                f"{line}: more than {MAX_DEPTH} levels or {MAX_VALUES} values (aliases followed): "
                "no configuration has that many"
            )


def _check_scalar(event: Any, line: str) -> None:
    tag, text = event.tag, getattr(event, "value", "")
    # One in base 60 takes time that grows with the square of its length.
    if len(text) > MAX_NUMBER and (tag or event.implicit[0]) and _BASE_60.fullmatch(text):
        raise FormatError(f"{line}: a number of {len(text)} characters, at most {MAX_NUMBER}")
    if tag and tag != "!" and tag.removeprefix(_PREFIX) not in _TAGS:
        raise FormatError(f"{line}: tag {tag!r} is not plain YAML: write the value without it")


def _kind(value: object) -> str:
    return {list: "a list", str: "text", type(None): "nothing"}.get(type(value), "a single value")
