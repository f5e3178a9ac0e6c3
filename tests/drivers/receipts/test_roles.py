"""Seeds keep their roles; gates that failed stay failed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from castore import InvalidInputError
from castore_receipts import gates, seeds
from castore_receipts.gates import Gate
from castore_receipts.seeds import SeedRoles, chain_defects, roles


def test_roles_do_not_overlap() -> None:
    """'Validation seeds and final evaluation seeds have distinct roles.'"""
    with pytest.raises(InvalidInputError, match="3 both for validation and for the final"):
        roles([1, 2, 3], [3, 4])
    assert roles([np.int64(1), 2], [3]).validation == (1, 2)


@pytest.mark.parametrize(
    ("validation", "final"),
    [([], [1]), ([1, 1], []), ([1], [2, 2]), ([-1], []), ([1 << 63], []), ([1.5], []), (["a"], [])],
)
def test_seeds_that_are_none_are_refused(validation: Any, final: Any) -> None:
    with pytest.raises(InvalidInputError, match="seed"):
        roles(validation, final)


def test_each_validation_is_counted() -> None:
    """'Repeated checkpoint validation consumes feedback'"""
    used = roles([1, 2], [9]).used().used()
    assert used.record() == {"validation": [1, 2], "final": [9], "consumed": {"1": 2, "2": 2}}
    assert seeds.read(used.record()) == used


@pytest.mark.parametrize(
    ("own", "word"),
    [
        (SeedRoles((9,), (), {1: 1, 2: 1, 9: 1}), "9 had the other role"),
        (SeedRoles((3,), (1,), {1: 1, 2: 1, 3: 1}), "1 had the other role"),
        (SeedRoles((1, 2), (9,), {1: 1, 2: 2}), "1 consumed 1 times, at least 2"),
        (SeedRoles((3,), (9,), {3: 1}), "1 consumed 0 times, at least 1"),
    ],
)
def test_a_chain_shows_a_role_that_changed_or_a_count_that_went_back(
    own: SeedRoles, word: str
) -> None:
    before = SeedRoles((1, 2), (9,), {1: 1, 2: 1})
    assert word in "; ".join(chain_defects(own, before))
    assert not chain_defects(before.used(), before)


def test_a_final_seed_that_was_laid_aside_never_validates() -> None:
    """Dropped in one resumption and given another role in the next, it would be one by the back."""
    first = SeedRoles((1,), (9,), {1: 1})
    second = roles([1], [8]).following(first)
    assert second.record()["retired"] == [9]
    assert not chain_defects(second, first)
    assert chain_defects(SeedRoles((1,), (8,), {1: 2}), first), "it must be told"
    assert seeds.read(second.record()) == second
    with pytest.raises(InvalidInputError, match="9 both for validation and for the final"):
        roles([1, 9], [8]).following(second)
    back = roles([1], [8, 9]).following(second)
    assert back.retired == ()
    assert not chain_defects(back, second)


GATE = Gate("walks", "mean_return", 10.0)


def test_a_gate_is_decided_by_its_number() -> None:
    assert GATE.decide({"mean_return": 10.0})["passed"] is True
    assert GATE.decide({"mean_return": 9.999})["passed"] is False
    for wrong in ({}, {"mean_return": "x"}, {"mean_return": True}):
        with pytest.raises(InvalidInputError, match="walks"):
            GATE.decide(wrong)


def held(**change: Any) -> dict[str, Any]:
    receipt: dict[str, Any] = {"mean_return": 5.0}
    receipt["gates"] = [{**GATE.decide(receipt), **change}]
    return receipt


@pytest.mark.parametrize(
    "change", [{"passed": True}, {"value": 11.0}, {"value": 11.0, "passed": True}, {"passed": 1}]
)
def test_a_gate_that_does_not_say_what_its_number_says_is_a_defect(change: dict[str, Any]) -> None:
    assert gates.defects(held(**change), None)
    assert not gates.defects(held(), None)


@pytest.mark.parametrize("now", [[], [{"minimum": 1.0}], [{"name": "runs"}], [{}, {"name": "x"}]])
def test_the_gates_of_a_run_are_the_same_from_receipt_to_receipt(now: Any) -> None:
    """A lower minimum would let a policy pass that failed; another run may have other gates."""
    whole = held()["gates"][0]
    changed = [{**whole, **c} for c in now]
    for one in changed:
        one["passed"] = one["value"] >= one["minimum"]
    child = {"mean_return": 5.0, "gates": changed, "parent": {"relation": "previous"}}
    assert gates.defects(child, held())
    assert not gates.defects({**child, "parent": {"relation": "resumed"}}, held())
    assert not gates.defects({**child, "gates": [whole]}, held())


def test_a_failed_gate_of_the_parent_cannot_be_passed_or_dropped() -> None:
    """'The simulation study's failed acceptance gates remain failures'"""
    child = {**held(inherited=True), "parent": {"relation": "expanded"}}
    assert not gates.defects(child, held())
    better = {"mean_return": 20.0, "parent": {"relation": "expanded"}}
    for now in ([], [GATE.decide(better)]):
        assert gates.defects({**better, "gates": now}, held()) == [
            "'walks' failed in the parent, not here"
        ]
