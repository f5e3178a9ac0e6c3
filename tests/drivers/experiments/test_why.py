"""``castore experiments why``: what changed, in words."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from castore_experiments import canonical
from castore_experiments.architecture import describe
from castore_experiments.samples import DataState
from castore_experiments.why import explain


def test_configurations() -> None:
    """ "keys of the config"."""
    a = {"opt": {"lr": 0.1, "betas": [0.9, 0.99]}, "gone": None, 1: "x", "t": [1, 2], "s": {1}}
    b = {
        "opt": {"lr": 0.01, "betas": [0.9, 0.999]},
        "new key": {"q": 1},
        1: "y",
        "t": (1, 2),
        "s": {2},
    }
    assert explain(canonical.normal(a), canonical.normal(b)) == [
        "gone: removed (was None)",
        "new key: added, {'q': 1}",
        "opt.betas[1]: 0.99 -> 0.999",
        "opt.lr: 0.1 -> 0.01",
        "s: {1} -> {2}",
        "t: [1, 2] -> (1, 2) (list -> tuple)",
        "[1]: 'x' -> 'y'",
    ]
    assert explain({"a": 1}, {"a": 1.0}) == ["a: 1 -> 1.0 (int -> float)"]
    assert explain({"a": 0.0}, {"a": -0.0}) == ["a: 0.0 -> -0.0"]
    assert explain({"a": [1]}, {"a": [1, 2]}) == ["a: [1] -> [1, 2]"]
    assert explain({1: "a"}, {True: "a"}) == ["[1]: removed (was 'a')", "[True]: added, 'a'"]
    assert explain({"a": math.nan}, {"a": math.nan}) == []
    assert len(explain({"a": "x" * 500}, {"a": 10**400})[0]) < 250


values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.floats() | st.text(max_size=2),
    lambda s: st.lists(s, max_size=3) | st.dictionaries(st.text(max_size=2), s, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=2), values), st.dictionaries(st.text(max_size=2), values))
@settings(deadline=None)
def test_silent_exactly_when_the_digests_agree(a: Any, b: Any) -> None:
    assert (explain(a, b) == []) == (canonical.encode(a) == canonical.encode(b))


def test_architectures() -> None:
    """ "modules and shapes"."""
    a = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 4))
    b = nn.Sequential(
        nn.Linear(4, 9), nn.Dropout(0.2), nn.Tanh(), nn.Linear(9, 4).half(), nn.ReLU()
    )
    assert explain(describe(a), describe(b, 6)) == [
        "initialised at step 0 -> 6",
        "module added: 4 (ReLU)",
        "module 0 (Linear): out_features: 8 -> 9",
        "module 1 (Dropout): p: 0.1 -> 0.2",
        "module 2: ReLU -> Tanh",
        "module 3 (Linear): in_features: 8 -> 9",
        "0.weight: shape [8, 4] -> [9, 4]",
        "0.bias: shape [8] -> [9]",
        "3.weight: shape [4, 8] -> [4, 9]",
        "3.weight: float32 -> float16",
        "3.bias: float32 -> float16",
    ]
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    apart = describe(tied)
    tied[1].weight = tied[0].weight
    assert explain(apart, describe(tied)) == ["now one tensor: 0.weight, 1.weight"]
    assert explain(describe(tied), apart) == ["no longer one tensor: 0.weight, 1.weight"]


def test_architectures_of_other_order_and_buffers() -> None:
    def net(*names: str, persistent: bool = True) -> nn.Module:
        module = nn.Module()
        for name in names:
            module.add_module(name, nn.Sequential(nn.Linear(2, 2)))
        module.register_buffer("mask", torch.zeros(2), persistent=persistent)
        return module

    assert explain(describe(net("a", "b")), describe(net("b", "a"))) == [
        "modules registered in another order: a, a.0, b, b.0",
        "tensors registered in another order: a.0.bias, a.0.weight, b.0.bias, b.0.weight",
    ]
    assert explain(describe(net("a")), describe(net("a", persistent=False))) == [
        "mask: buffer -> temporary buffer"
    ]
    found = explain(describe(net("a")), describe(net("b", "c")))
    assert found[:2] == [
        "module removed: a (Sequential)",
        "modules added: b (Sequential), c (Sequential)",
    ]
    assert explain(describe(net("a")), describe(net("a"))) == []


def test_data_states() -> None:
    """ "samples and tags"."""
    a: dict[str, Any] = {str(i): {"tags": ["hard"] if i < 3 else []} for i in range(10)}
    b: dict[str, Any] = {
        str(i): {"tags": ["easy"] if i == 4 else [], "discarded": i in (7, 8)} for i in range(1, 12)
    }
    b["2"] = {"tags": ["hard"], "tag:kind": "cat"}
    a["2"]["tag:kind"] = "dog"
    b["11"]["discarded"] = True
    assert explain(DataState.from_any(a), DataState.from_any(b)) == [
        "1 sample removed: 0",
        "2 samples added: 10, 11",
        "2 samples discarded: 7, 8",
        "some of the added samples are discarded, such as 11",
        "tag 'easy': 1 sample got it: 4",
        "tag 'hard': 2 samples lost it: 0, 1",
        "tag 'kind': 1 values changed: 2 'dog' -> 'cat'",
    ]
    more = {str(i): {"discarded": True} for i in range(10)}
    assert explain(DataState.from_any(more), DataState.from_any(a))[:2] == [
        "10 samples no longer discarded: 0, 1, 2, 3, 4 and 5 more",
        "tag 'hard': 3 samples got it: 0, 1, 2",
    ]
    assert "tag 'hard': no sample has it any more (3 had it)" in explain(
        DataState.from_any(a), DataState.from_any(more)
    )
    assert explain(DataState.from_any(a), DataState.from_any(dict(reversed(a.items())))) == []


def test_two_kinds_cannot_be_compared() -> None:
    for a, b in (({}, []), (describe(nn.ReLU()), {}), (DataState.from_any({}), {}), (1, 1)):
        with pytest.raises(TypeError, match="cannot compare"):
            explain(a, b)
