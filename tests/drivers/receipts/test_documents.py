"""Strict JSON in, one spelling out, and a digest that catches every edit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castore import FormatError, InvalidInputError
from castore_receipts import documents


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"mean_return": float("nan")}, "receipt.mean_return"),
        ({"seconds": float("inf")}, "receipt.seconds"),
        ({"resources": {"a": [1.0, np.float32("-inf")]}}, "receipt.resources.a[1]"),
        ({"step": 1 << 70}, "receipt.step"),
        ({"step": 10**5000}, "receipt.step is an integer of 16610 bits"),
        ({"x": object()}, "receipt.x"),
        ({"x": {1: 2}}, "receipt.x"),
        ({"x": np.zeros(3)}, "receipt.x"),
        ({"x": "\ud800"}, "receipt.x"),
    ],
)
def test_rc2_what_json_cannot_say_is_refused_by_field(value: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError, match=field.replace("[", r"\[").replace("]", r"\]")):
        documents.seal(value)


def test_rc2_numpy_scalars_and_non_ascii_names_become_plain_json() -> None:
    receipt = documents.seal(
        {"a": np.float32(0.5), "b": np.int64(7), "c": (np.bool_(True), None), "id": "Läufer-v1"}
    )
    data = documents.encode(receipt)
    assert json.loads(data)["a"] == 0.5
    assert b"L\xc3\xa4ufer-v1" in data
    assert documents.parse(data, "x") == receipt


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b'{"mean_return": NaN}', "mean_return"),
        (b'{"seconds": -Infinity}', "seconds"),
        (b'{"seconds": 1e999}', "seconds"),
        (b'{"a": [NaN]}', "finite"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": 1', "strict JSON"),
        (b"\xff{}", "strict JSON"),
        (b"[1]", "object"),
        (b'{"a": "\\ud800"}', "Unicode"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "deep"),
        (b'{"a":' * 100_000, "strict JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "strict JSON"),
        (b" " * (documents.MAX_RECEIPT + 1), "at most"),
    ],
)
def test_rc2_a_strict_parser_says_what_is_wrong(data: bytes, word: str) -> None:
    with pytest.raises(FormatError, match=word):
        documents.parse(data, "receipt.json")


def test_a_sealed_receipt_hashes_to_what_it_says() -> None:
    receipt = documents.seal({"step": 5})
    assert receipt["receipt_sha256"] == documents.digest_of(receipt)
    assert documents.digest_of({**receipt, "step": 6}) != receipt["receipt_sha256"]
    assert documents.is_ours(receipt)
    assert not documents.is_ours({"step": 5, "policy_digest": "x"})


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.floats() | st.text(), max_size=5))
def test_any_mapping_is_refused_or_comes_back(body: dict[str, Any]) -> None:
    try:
        receipt = documents.seal(body)
    except InvalidInputError:
        return
    data = documents.encode(receipt)
    assert documents.parse(data, "x") == receipt
    assert documents.canonical(documents.parse(data, "x")) == data


@given(st.binary(max_size=200))
def test_any_bytes_parse_or_are_refused(data: bytes) -> None:
    try:
        documents.parse(data, "x")
    except FormatError:
        pass
