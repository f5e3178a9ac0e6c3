"""Ancestry: what counts of each run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castore import FormatError
from castore_experiments.signals.run import Run, Share, ancestry, newest, within_second


def runs(*found: tuple[str, str | None, int | None]) -> dict[str, Run]:
    return {id: Run(id, parent, step, i) for i, (id, parent, step) in enumerate(found)}


def test_each_ancestor_up_to_the_lowest_fork_on_the_way() -> None:
    known = runs(("a.0", None, None), ("b.0", "a.0", 200), ("c.0", "b.0", 220), ("d.0", "c.0", 100))
    assert ancestry("c.0", known) == {
        "c.0": Share(0, None),
        "b.0": Share(-1, 220),
        "a.0": Share(-2, 200),
    }
    assert ancestry("d.0", known)["a.0"] == Share(-3, 100)


def test_a_fork_without_a_step_takes_all_of_the_parent() -> None:
    known = runs(("a.0", None, None), ("b.0", "a.0", None))
    assert ancestry("b.0", known) == {"b.0": Share(0, None), "a.0": Share(-1, None)}


def test_an_unknown_parent_ends_it_and_a_circle_too() -> None:
    assert set(ancestry("b.0", runs(("b.0", "gone.0", 5)))) == {"b.0", "gone.0"}
    assert set(ancestry("a.0", runs(("a.0", "b.0", 1), ("b.0", "a.0", 1)))) == {"a.0", "b.0"}


def test_newest_by_start_then_by_number() -> None:
    same = [Run("w.9", None, None, 5), Run("w.10", None, None, 5), Run("x.0", None, None, 4)]
    found = newest(same)
    assert found is not None and found.id == "w.10"
    assert newest([]) is None


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(-5, 50)), max_size=30))
def test_limits_never_rise_towards_ancestors(links: list[tuple[int, int]]) -> None:
    known = {
        f"r.{i}": Run(f"r.{i}", f"r.{p}" if p < i else None, s, i) for i, (p, s) in enumerate(links)
    }
    for id in known:
        shares = sorted(ancestry(id, known).values(), key=lambda s: -s.rank)
        limits = [float("inf") if s.last is None else s.last for s in shares]
        assert limits == sorted(limits, reverse=True)


@pytest.mark.parametrize("body", [{}, [], None, {"id": 1}, {"id": "a", "parent": None}])
def test_what_is_no_run(body: object) -> None:
    with pytest.raises(FormatError, match="here"):
        Run.from_json(body, "here")


def test_a_clock_of_whole_seconds_is_read_finer_by_a_local_one_that_agrees() -> None:
    """Two roots on S3 whose runs begin in one second have an order."""
    assert within_second(100.0, 100.25) == 100.25
    assert within_second(100.0, 101.5) < 101  # the answer was under way
    assert within_second(100.0, 99.5) == 100.0
    for wrong in (97.0, 102.5, 0.0, 1e12):
        assert within_second(100.0, wrong) == 100.0
    assert within_second(100.125, 100.9) == 100.125  # a disk's own clock
