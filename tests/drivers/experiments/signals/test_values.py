"""What may be logged, and what is refused at once."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from castore import InvalidInputError
from castore_experiments.signals import values as v


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.1, 0.1),
        (-0.0, -0.0),
        (math.inf, math.inf),
        (np.float32(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.array(2.5), 2.5),
        (np.array([2.5]), 2.5),
        (torch.tensor(1.5), 1.5),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (torch.tensor(2.0, requires_grad=True), 2.0),
        (torch.tensor(7), 7.0),
    ],
)
def test_one_number(given: Any, found: float) -> None:
    number = v.number(given, "loss")
    assert type(number) is float and number == found
    assert math.copysign(1, number) == math.copysign(1, found)


def test_nan_stays() -> None:
    assert math.isnan(v.number(float("nan"), "loss"))
    assert math.isnan(v.number(torch.tensor(float("nan")), "loss"))


@pytest.mark.parametrize(
    "given",
    ["1.5", None, 1j, torch.zeros(2), np.zeros(2), [1.0], 10**400, Decimal(1), np.array("x")],
)
def test_no_number_is_refused_by_name(given: Any) -> None:
    with pytest.raises(InvalidInputError, match="train/loss: expected one real number"):
        v.number(given, "train/loss")


@pytest.mark.parametrize(("given", "found"), [(5, 5), (np.int32(5), 5), (torch.tensor(5), 5)])
def test_a_step(given: Any, found: int) -> None:
    assert v.integer(given, "step") == found


@pytest.mark.parametrize("given", [1.5, "3", None, 1 << 63, -(1 << 63) - 1, torch.tensor(1.5)])
def test_no_step(given: Any) -> None:
    with pytest.raises(InvalidInputError, match="step"):
        v.integer(given, "step")


@pytest.mark.parametrize(
    "given",
    [
        [0.5, math.nan, math.inf],
        np.array([0.5, math.nan, math.inf]),
        torch.tensor([0.5, math.nan, math.inf]),
        torch.tensor([0.5, math.nan, math.inf], dtype=torch.bfloat16),
        [torch.tensor(0.5), torch.tensor(math.nan), torch.tensor(math.inf)],
        [torch.tensor(0.5), math.nan, np.float64(math.inf)],
    ],
)
def test_a_column_of_values(given: Any) -> None:
    found = v.floats(given, "loss")
    assert found.dtype == np.float32
    assert found[0] == 0.5 and math.isnan(found[1]) and math.isinf(found[2])


def test_beyond_float32_is_infinity_of_its_sign() -> None:
    assert v.floats([1e300, -1e300], "loss").tolist() == [math.inf, -math.inf]


def test_a_column_is_a_copy() -> None:
    array, tensor = np.zeros(3, np.float32), torch.zeros(3)
    columns = v.floats(array, "a"), v.floats(tensor, "a")
    array[:] = 1
    tensor[:] = 1
    assert all(c.tolist() == [0, 0, 0] for c in columns)


@pytest.mark.parametrize("given", [["0.5"], [None], np.zeros((2, 2)), [10**400], torch.zeros(2, 2)])
def test_no_column_of_values(given: Any) -> None:
    with pytest.raises(InvalidInputError, match="loss"):
        v.floats(given, "loss")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["a", "b|:,"], ["a", "b|:,"]),
        ([1, -2], ["1", "-2"]),
        ([np.int64(7), "x"], ["7", "x"]),
        (np.array([3, 4]), ["3", "4"]),
        (torch.tensor([3, 4]), ["3", "4"]),
        (np.array(["p", "q"]), ["p", "q"]),
        ([1 << 70], [str(1 << 70)]),
    ],
)
def test_sample_ids(given: Any, found: list[str]) -> None:
    assert v.ids(given, "loss").to_pylist() == found


@pytest.mark.parametrize("given", [[1.5], [True], [b"x"], [None], ["\ud800"], [object()]])
def test_no_sample_ids(given: Any) -> None:
    with pytest.raises(InvalidInputError, match="loss"):
        v.ids(given, "loss")


@pytest.mark.parametrize("given", ["", "x" * 1001, "\ud800", None, 5])
def test_no_name(given: Any) -> None:
    with pytest.raises(InvalidInputError, match="metric"):
        v.name(given, "metric")


def test_lists_that_json_lacks_are_refused() -> None:
    assert v.json_text([], "outliers", "") == ""
    assert v.json_text([["s1", 0.5]], "outliers", "") == '[["s1", 0.5]]'
    with pytest.raises(InvalidInputError, match="outliers"):
        v.json_text([object()], "outliers", "")


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"lengths \[1, 2\]"):
        v.pairs((["a"], [1.0, 2.0]), 2, "loss: per_sample")
    with pytest.raises(InvalidInputError, match="sample_id, annotation_id"):
        v.pairs({"a": 1.0}, 3, "loss: per_instance")
    with pytest.raises(InvalidInputError, match="a mapping"):
        v.pairs(5, 2, "loss: per_sample")
