"""Canonical JSON: one spelling, and everything else is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from castore import document
from castore.errors import FormatError

TEXT = some.text(some.characters(exclude_categories=["Cs"]), max_size=10)
VALUES = some.recursive(
    some.none()
    | some.booleans()
    | some.integers()
    | some.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)


def decode(data: bytes) -> dict[str, Any]:
    return document.decode(data, "thing", ["a", "b"], "here")


@given(VALUES, VALUES)
def test_values_come_back(a: Any, b: Any) -> None:
    data = document.encode("thing", {"a": a, "b": b})
    assert decode(data) == {"a": a, "b": b}
    assert document.encode("thing", {"b": b, "a": a}) == data


def test_the_spelling() -> None:
    data = document.encode("thing", {"b": [1, {"z": 1.5, "ä": None}], "a": "é\n"})
    assert data == '{"a":"é\\n","b":[1,{"z":1.5,"ä":null}],"format":1,"kind":"thing"}\n'.encode()


GOOD = b'{"a":1,"b":2,"format":1,"kind":"thing"}\n'


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (GOOD[:-1], "canonical"),
        (GOOD + b"\n", "canonical"),
        (GOOD.replace(b",", b", "), "canonical"),
        (b'{"b":2,"a":1,"format":1,"kind":"thing"}\n', "canonical"),
        (GOOD.replace(b"1,", b'"\\u00e9",', 1), "canonical"),
        (GOOD.replace(b"1,", b"1.50,", 1), "canonical"),
        (GOOD.replace(b"1,", b"01,", 1), "not a JSON document"),
        (GOOD.replace(b'"b"', b'"a"'), "stands twice"),
        (GOOD.replace(b"1,", b'{"x":1,"x":1},', 1), "stands twice"),
        (GOOD.replace(b"1,", b"NaN,", 1), "not a finite number"),
        (GOOD.replace(b"1,", b"-Infinity,", 1), "not a finite number"),
        (GOOD.replace(b"1,", b"1e999,", 1), "here"),
        (GOOD.replace(b'"a"', b'"c"'), "unknown keys in 'thing': a, c"),
        (GOOD.replace(b'"a":1,', b""), "keys in 'thing': a"),
        (GOOD.replace(b'"format"', b'"extra":0,"format"'), "extra"),
        (GOOD.replace(b'"format":1', b'"format":2'), "format 2 of 'thing', .*upgrade"),
        (GOOD.replace(b'"format":1', b'"format":true'), "format True"),
        (GOOD.replace(b'"format":1', b'"format":1.0'), "format 1.0"),
        (GOOD.replace(b'"format":1,', b""), "format None"),
        (GOOD.replace(b"thing", b"other"), "expected a document of kind 'thing'"),
        (b"", "not a JSON document"),
        (b"<html>gone</html>", "not a JSON document"),
        (b"[1]\n", "expected a document of kind"),
        (b"null\n", "expected a document of kind"),
        (b"\xff\xfe{}", "not a JSON document"),
        (GOOD.decode().encode("utf-16"), "here"),
        (b"\xef\xbb\xbf" + GOOD, "here"),
        (b"[" * 200_000, "not a JSON document"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "not a JSON document"),
        (GOOD.replace(b"1,", b'"\\ud800",', 1), "here"),
        (GOOD.replace(b"1,", b"9" * 10_000 + b",", 1), "here"),
    ],
)
def test_anything_else_is_refused_and_says_where(data: bytes, why: str) -> None:
    assert decode(GOOD) == {"a": 1, "b": 2}
    with pytest.raises(FormatError, match=why) as caught:
        decode(data)
    assert str(caught.value).startswith("here: ")


def test_a_number_that_is_not_finite_cannot_be_written() -> None:
    for value in (float("nan"), float("inf"), {"x": [float("-inf")]}):
        with pytest.raises(ValueError):
            document.encode("thing", {"a": value})


@given(some.binary(max_size=80))
def test_arbitrary_bytes_never_crash(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode(data)


@given(VALUES)
def test_arbitrary_json_never_crashes(value: Any) -> None:
    with pytest.raises(FormatError):
        decode(json.dumps(value).encode())


def test_parsed_turns_slips_into_format_errors() -> None:
    for slip in (lambda: {}["x"], lambda: [][0], lambda: int("x"), lambda: len(3), lambda: None.x):  # type: ignore[attr-defined, arg-type, call-overload]
        with pytest.raises(FormatError, match="here: malformed"):
            document.parsed(slip, "here")
