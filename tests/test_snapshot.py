"""Snapshots: names that sort newest first, documents that hold nothing odd."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from castore import document
from castore.digest import digest_of
from castore.errors import FormatError, InvalidInputError
from castore.snapshot import (
    Snapshot,
    SnapshotName,
    check_key,
    check_namespace,
    name_of,
    parse_name,
)

GOOD = Snapshot(
    "d" * 64,
    1_700_000_000_123_456,
    "team.a",
    "folder",
    "k_1.x",
    {"run": "é"},
    {"loss": 0.5, "nested": {"x": [1, None]}},
    ("team.a@0123456789abcdef",),
    3,
    99,
)
NEWEST = 9_999_999_999_999_999


def test_a_snapshot_comes_back_byte_for_byte() -> None:
    assert Snapshot.decode(GOOD.encode()) == GOOD
    assert Snapshot.decode(GOOD.encode()).encode() == GOOD.encode()


def test_the_name() -> None:
    name = name_of(GOOD.encode(), GOOD.namespace, GOOD.key, GOOD.time)
    id = digest_of(GOOD.encode())[:16]
    assert name.name == f"8299999999876543-20231114T221320-k_1.x-{id}.json"
    assert (name.time, name.key, name.id) == (GOOD.time, "k_1.x", id)
    assert name.path == f"snapshots/team.a/{name.name}"
    assert name.pending == f"pending/team.a/{name.name}"
    assert name.forgotten == f"forgotten/team.a/{name.name}"
    assert str(name) == f"team.a@{id}"
    for path in (name.path, name.pending, name.forgotten):
        assert parse_name(path) == name


@given(some.lists(some.integers(0, 253_402_300_799_999_999 // 100), min_size=2, unique=True))
def test_names_sort_newest_first(times: list[int]) -> None:
    names = [name_of(str(t).encode(), "n", "k", t) for t in times]
    assert [n.time for n in sorted(names)] == sorted(times, reverse=True)
    assert sorted(n.path for n in names) == [n.path for n in sorted(names)]
    assert all(parse_name(n.path) == n for n in names)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "x",
        "snapshots",
        "snapshots/n",
        "snapshots/n/",
        "snapshots/n/x.json",
        "snapshots/n/8299999999876543-20231114T221320-k-0123456789abcde.json",
        "snapshots/n/8299999999876543-20231114T221320-k-0123456789ABCDEF.json",
        "snapshots/n/829999999987654-20231114T221320-k-0123456789abcdef.json",
        "snapshots/n/8299999999876543-20231114T221320--0123456789abcdef.json",
        "snapshots/n/8299999999876543-20231114T221320-K-0123456789abcdef.json",
        "snapshots/n/8299999999876543-20231114T221320-k-0123456789abcdef.json.tmp",
        "snapshots/n/8299999999876543-20231114T221320-k-0123456789abcdef.json\n",
        "snapshots/.n/8299999999876543-20231114T221320-k-0123456789abcdef.json",
        "snapshots/a/b/8299999999876543-20231114T221320-k-0123456789abcdef.json",
        "snapshots/../8299999999876543-20231114T221320-k-0123456789abcdef.json",
        "snapshots/n/٨299999999876543-20231114T221320-k-0123456789abcdef.json",
    ],
)
def test_junk_is_no_name(path: str) -> None:
    assert parse_name("snapshots/n/8299999999876543-20231114T221320-k-0123456789abcdef.json")
    assert parse_name(path) is None


@given(some.text())
def test_arbitrary_text_is_no_name_and_never_crashes(text: str) -> None:
    assert parse_name(text) is None
    assert parse_name("snapshots/n/" + text) is None


@pytest.mark.parametrize(
    "space", ["", ".", "..", ".x", "a/b", "a b", "a@b", "ü", "x" * 129, "a\n", "a:b"]
)
def test_se2_a_namespace_outside_the_allow_list_is_refused(space: str) -> None:
    with pytest.raises(InvalidInputError, match="namespace"):
        check_namespace(space)
    with pytest.raises(InvalidInputError):
        replace(GOOD, namespace=space).encode()


@pytest.mark.parametrize("key", ["", "A", "a-b", "a/b", "x" * 65, "ü", "a\n"])
def test_se2_a_key_outside_the_allow_list_is_refused(key: str) -> None:
    with pytest.raises(InvalidInputError, match="key"):
        check_key(key)
    with pytest.raises(InvalidInputError):
        replace(GOOD, key=key).encode()


def test_odd_but_legal_namespaces_and_keys() -> None:
    assert check_namespace("A.b_c=d+e-1") == "A.b_c=d+e-1"
    assert check_key("a.b_0") == "a.b_0"


@pytest.mark.parametrize(
    "facts", [{"x": float("nan")}, {"x": float("inf")}, {"x": object()}, {"x": {1, 2}}, {"x": b"y"}]
)
def test_rc2_facts_that_are_no_finite_json_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="finite JSON"):
        replace(GOOD, facts=facts).encode()


@pytest.mark.parametrize(
    "change",
    [
        {"tree": "d" * 63},
        {"tree": "../" + "d" * 61},
        {"tree": None},
        {"time": -1},
        {"time": 1.5},
        {"time": True},
        {"time": "1"},
        {"namespace": "../x"},
        {"namespace": None},
        {"driver": 3},
        {"key": "A"},
        {"key": ["k"]},
        {"labels": {"a": 1}},
        {"labels": ["a"]},
        {"labels": None},
        {"facts": []},
        {"facts": None},
        {"parents": "abc"},
        {"parents": [1]},
        {"parents": None},
        {"files": -1},
        {"size": None},
    ],
)
def test_a_field_of_a_wrong_type_or_value_is_refused(change: dict[str, Any]) -> None:
    body = json.loads(GOOD.encode())
    body.pop("kind"), body.pop("format")
    assert Snapshot.decode(document.encode("snapshot", body)) == GOOD
    with pytest.raises(FormatError, match="snapshot x"):
        Snapshot.decode(document.encode("snapshot", body | change), "snapshot x")


def test_unknown_and_missing_keys_are_refused() -> None:
    body = json.loads(GOOD.encode())
    body.pop("kind"), body.pop("format")
    with pytest.raises(FormatError, match="host"):
        Snapshot.decode(document.encode("snapshot", body | {"host": "x"}))
    del body["facts"]
    with pytest.raises(FormatError, match="facts"):
        Snapshot.decode(document.encode("snapshot", body))


def test_a_newer_snapshot_is_refused_by_name() -> None:
    data = GOOD.encode().replace(b'"format":1', b'"format":2')
    with pytest.raises(FormatError, match="snapshot s: format 2 of 'snapshot'.*upgrade castore"):
        Snapshot.decode(data, "snapshot s")


def test_names_compare_by_time_within_a_namespace() -> None:
    old, new = (name_of(b"x", "n", "k", t) for t in (5, 6))
    assert new < old
    assert isinstance(new, SnapshotName)
    assert name_of(b"x", "n", "k", 0).name.startswith(f"{NEWEST}-19700101T000000-")


def test_a_document_that_is_too_large_is_refused_before_anything_is_stored() -> None:
    with pytest.raises(InvalidInputError, match="put what is large into a file"):
        Snapshot("0" * 64, 0, "main", labels={"note": "x" * (5 << 20)}).encode()
