"""Which batches count: no row twice, none missing."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castore import FormatError, SnapshotName
from castore_experiments.signals.batch import Batch, BatchName, Facts, counting, parse_key

W = "0123456789abcdef"


def snapshot(name: BatchName, time: int) -> SnapshotName:
    stamp = 9_999_999_999_999_999 - time
    return SnapshotName("e.signals", f"{stamp:016d}-20260101T000000-{name.key}-{'0' * 16}.json")


def numbers(batch: Batch) -> range:
    return range(max(batch.after + 1, batch.name.first), batch.name.last + 1)


def test_a_key_tells_writer_and_numbers() -> None:
    name = BatchName(W, 1, 250)
    assert name.key == f"w{W}.1.250" and parse_key(name.key) == name
    assert parse_key(BatchName(W, 5, 5, imported=True).key) == BatchName(W, 5, 5, True)
    for odd in ("snapshot", f"w{W}.2.1", f"x{W}.1.2", f"w{W[:-1]}.1.2", f"w{W}.1.2.3"):
        assert parse_key(odd) is None


def test_a_merged_batch_replaces_what_it_holds() -> None:
    parts = [BatchName(W, 1, 10), BatchName(W, 11, 20), BatchName(W, 1, 20), BatchName(W, 21, 30)]
    found = counting(snapshot(n, i) for i, n in enumerate(parts))
    assert sorted((b.name.first, b.name.last) for b in found) == [(1, 20), (21, 30)]


def test_keys_of_other_kinds_are_passed_over() -> None:
    odd = SnapshotName("e.signals", f"{1:016d}-20260101T000000-snapshot-{'0' * 16}.json")
    assert counting([odd]) == []


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12)), min_size=1, max_size=12))
def test_every_number_counts_exactly_once(ranges: list[tuple[int, int]]) -> None:
    parts = [BatchName(W, a, a + n) for a, n in ranges]
    found = counting(snapshot(n, i) for i, n in enumerate(parts))
    seen = Counter(k for b in found for k in numbers(b))
    assert set(seen) == {k for n in parts for k in range(n.first, n.last + 1)}
    assert set(seen.values()) == {1}


def test_facts_of_a_newer_format_and_of_another_batch_are_refused() -> None:
    name, facts = BatchName(W, 1, 2), Facts((), (), {}, {})
    body = facts.to_json(name)
    assert Facts.from_json(body, name, "here") == facts
    with pytest.raises(FormatError, match="format 2.*upgrade"):
        Facts.from_json(body | {"signals": 2}, name, "here")
    with pytest.raises(FormatError, match="another batch"):
        Facts.from_json(body, BatchName(W, 1, 3), "here")
    with pytest.raises(FormatError, match="malformed"):
        Facts.from_json({k: v for k, v in body.items() if k != "files"}, name, "here")
