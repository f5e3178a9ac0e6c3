"""The data state: its digest, its file, and bringing a caller's samples back to it."""

from __future__ import annotations

import copy
import io
import json
import os
import pathlib
import subprocess
import sys
import uuid
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castore import FormatError, InvalidInputError
from castore_experiments import sample_ids
from castore_experiments.samples import DataState

HERE = pathlib.Path(__file__).parent


def frame(**columns: Any) -> pd.DataFrame:
    table = {"sample_id": ["a", "b", "c"], "discarded": [False, True, False]}
    return pd.DataFrame({**table, **{k.replace("tag_", "tag:"): v for k, v in columns.items()}})


def digest(data: object) -> str:
    return DataState.from_any(data).digest()


def model_of(state: DataState) -> Any:
    """The state in plain Python, the other way round from how it is kept."""
    marks = {name: dict(held) for name, held in state.tagged().items()}
    return dict(zip(state.ids_text(), state.discarded.tolist(), strict=True)), marks


# -- digest ----------------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.sampled_from(
    ["x", "w", "x,w", "x|w", ":d0:t", "a:d0:tx", "1", "tag:x"]
)
entries = st.fixed_dictionaries(
    {"discarded": st.booleans() | st.none()},
    optional={"tags": st.lists(names, max_size=3), "tag:kind": st.none() | names},
)
states = st.dictionaries(names, entries, max_size=5)


@given(states, states)
@settings(deadline=None)
def test_injective(a: dict[str, Any], b: dict[str, Any]) -> None:
    """ "escaping so that no two states collide": one digest if and only if one state."""
    if any("kind" in e.get("tags", ()) for s in (a, b) for e in s.values()):
        return  # "kind" as a mark and with a value at once is refused, see below
    x, y = DataState.from_any(a), DataState.from_any(b)
    assert (x.digest() == y.digest()) == (model_of(x) == model_of(y)) == (x == y)


@given(states, st.randoms())
@settings(deadline=None)
def test_the_order_of_rows_and_tags_does_not_count(state: dict[str, Any], random: Any) -> None:
    keys = list(state)
    random.shuffle(keys)
    shuffled = {k: dict(reversed(list(state[k].items()))) for k in keys}
    assert digest(shuffled) == digest(state)
    table = DataState.from_any(state).to_frame().reset_index()
    assert digest(table.sample(frac=1, random_state=random.randrange(2**32))) == digest(state)
    assert digest(table[table.columns[::-1]]) == digest(state)


@pytest.mark.parametrize(
    "other",
    [
        frame(),
        frame(discarded=[True, True, False]),
        frame(tag_x=[True, False, False]),
        frame(tag_x=[False, True, False]),
        frame(tag_w=[True, False, False]),
        frame(tag_x=["", None, None]),
        frame(tag_x=["1", None, None]),
        frame(tag_x=["1", "1", None]),
        frame(tag_x=["True", None, None]),
        frame(sample_id=["a", "b", "d"]),
        frame(sample_id=["a", "b", "c "]),
        {"a": {"tags": ["x", "y"]}, "b": {"discarded": True}, "c": {}},
        {"a": {"tags": ["x,y"]}, "b": {"discarded": True}, "c": {}},
        {"a": {}, "b": {"discarded": True}},
        {},
    ],
    ids=str,
)
def test_unlike_states(other: Any) -> None:
    assert digest(other) != digest(frame(tag_x=[True, True, False]))


def test_what_is_one_state() -> None:
    expected = digest(frame(tag_x=[True, False, False]))
    missing: list[Any] = [None, float("nan"), pd.NA, False, 0, 0.0, np.False_]
    for nothing in missing:
        values = [True, nothing, nothing]
        column = pd.Series(values, dtype=object)
        assert digest(frame(tag_x=column, discarded=[nothing, True, nothing])) == expected
    spellings: list[Any] = [[1, 0, 0], np.array([1.0, np.nan, 0]), pd.array([True, None, False])]
    for values in spellings:
        assert digest(frame(tag_x=values)) == expected
    # A tag that no sample has says nothing about any sample.
    assert digest(frame(tag_x=[True, False, False], tag_y=False)) == expected
    assert digest(frame(tag_x=[True, False, False], tag_y=pd.Categorical([None] * 3))) == expected
    assert digest(frame(tag_x=[True, False, False], loss=[0.1, 0.2, 0.3])) == expected
    indexed = frame(tag_x=[True, False, False])
    assert digest(indexed.set_index("sample_id")) == expected
    assert digest(lambda: indexed) == expected


def test_categories_count_by_their_text() -> None:
    plain = digest(frame(tag_k=["cat", None, "dog"]))
    used = pd.Categorical(["cat", None, "dog"], categories=["emu", "dog", "cat"], ordered=True)
    for spelled in (used, pd.Series(["cat", np.nan, "dog"], dtype=object), np.array(used)):
        assert digest(frame(tag_k=spelled)) == plain


def annotated() -> pd.DataFrame:
    """As the public tool keeps it: one row an annotation, the sample's own with number 0."""
    table = pd.DataFrame(
        {
            "sample_id": ["a", "a", "b", "c", "c"],
            "annotation_id": [0, 1, 0, 1, 0],
            "discarded": [False, True, True, True, False],
            "tag:x": [True, False, False, True, False],
            "loss": [1.0, 2.0, 3.0, 4.0, 5.0],
        }
    )
    return table.set_index(["sample_id", "annotation_id"])


def test_only_rows_of_annotation_0_count() -> None:
    expected = digest(frame(tag_x=[True, False, False]))
    assert digest(annotated()) == expected == digest(annotated().reset_index())
    assert digest(annotated().reset_index("annotation_id")) == expected
    only = annotated().query("annotation_id == 1")
    assert digest(only) == digest({})


def test_ids_are_text() -> None:
    """Integers and their text are one id, as they are in the Parquet file."""
    text = digest({"10": {}, "9": {}, "-3": {}})
    dtypes: list[Any] = [np.int64, np.int32, object]
    for dtype in dtypes:
        assert digest(pd.DataFrame({"sample_id": np.array([9, 10, -3], dtype=dtype)})) == text
    assert digest({9: {}, np.int64(10): {}, "-3": {}}) == text
    assert digest(pd.DataFrame({"sample_id": pd.Categorical(["9", "10", "-3"])})) == text
    one = uuid.UUID(int=1)
    assert digest({one: {}}) == digest({str(one): {}})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({7: {}, "7": {}}, r"rows 0 and 1 have one id, '7' \(given as 7 and '7'\)"),
        (frame(sample_id=["a", "b", "a"]), "rows 0 and 2 have one id, 'a'"),
        (pd.DataFrame({"sample_id": [3, 1, 3]}), "rows 0 and 2 have one id, '3'"),
        (frame(sample_id=["a", None, "c"]), "row 1"),
        (frame(sample_id=[1.0, 2.0, 3.0]), "row 0: an id is text or an integer, found float 1.0"),
        ({True: {}}, "found bool True"),
        ({None: {}}, "found NoneType"),
        ({("a", 1): {}}, "found tuple"),
        ({"\ud83d": {}}, "not text that can be stored"),
        (pd.DataFrame({"id": ["a"]}), r"no sample_id among columns \['id'\]"),
        (frame(discarded=["yes", "no", "no"]), "discarded: expected true or false, found 'yes'"),
        (frame(discarded=[2, 0, 0]), "discarded: expected true or false, found 2"),
        (frame(tag_x=[0.5, 0.0, 1.0]), "tag:x: expected true or false, found 0.5"),
        (frame(tag_x=pd.Series(["a", True, None], dtype=object)), "tag:x: texts and other values"),
        (frame(tag_x=[[1], [2], [3]]), "tag:x: expected true or false"),
        ({"a": {"tags": "x,y"}}, "sample 'a': tags: expected a list"),
        ({"a": {"tags": [1]}}, "sample 'a': tags: 1 is no name"),
        ({"a": {"tags": ["k"], "tag:k": "v"}, "b": {"tag:k": "w"}}, "tag:k"),
        ({"a": True}, "a mapping is one of"),
        ({"sample_id": ["a"], "discarded": []}, "unequal length"),
        (frame(annotation_id=["x", "0", "1"]), "annotation_id: expected whole numbers"),
        ([1, 2], "expected a DataFrame or a mapping, found list"),
        (None, "found NoneType"),
        (pd.DataFrame([["a", 1, 2]], columns=["sample_id", "tag:x", "tag:x"]), "stand twice"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_refused(data: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        DataState.from_any(data)


def test_all_shapes_of_one_state() -> None:
    columns = {"sample_id": [2, 1], "discarded": [True, False], "tag:x": [False, True]}
    shapes: list[Any] = [
        columns,
        {k: np.array(v) for k, v in columns.items()},
        {k: pd.Series(v, index=[5, 6]) for k, v in columns.items()},
        {**columns, "annotation_id": [0, 0], "other": None},
        {1: {"tags": ["x"]}, 2: {"discarded": True}},
        {1: {"tag:x": True, "loss": 3}, 2: {"discarded": 1, "tag": []}},
        {"discarded": {1: False, 2: True}, "tag": {1: ["x"]}},
        {"discarded": {"2": True}, "tag": {"1": {"x"}}},
        {"discarded": {1: None, 2: True}, "tag": {"tag:x": {1: True, 2: False}}},
        pd.DataFrame(columns),
    ]
    assert len({digest(shape) for shape in shapes}) == 1
    assert digest({}) == digest(pd.DataFrame({"sample_id": []})) == digest({"discarded": {}})


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=70), unique=True))
@settings(deadline=None)
def test_the_order_is_that_of_the_text(ids: list[str]) -> None:
    order = sample_ids.sorting(sample_ids.texts(ids))
    found = ids if order is None else [ids[i] for i in order]
    assert found == sorted(ids)


@given(st.lists(st.text("ab\0é", max_size=20), unique=True), st.integers(0, 3))
@settings(deadline=None)
def test_the_order_with_common_beginnings(ends: list[str], repeats: int) -> None:
    ids = ["sample_" * repeats + end for end in ends]
    assert DataState.from_any({i: {} for i in ids}).ids_text() == sorted(ids)


PROGRAM = """
from castore_experiments.samples import DataState
print(DataState.from_any({"a": {"tags": {"x", "w"}}, 7: {"discarded": True}}).digest())
"""


def test_pinned_vectors_equal_in_every_process() -> None:
    vectors = json.loads((HERE / "vectors.json").read_text())["data"]
    for vector in vectors:
        assert digest(vector["state"]) == vector["digest"]
    for seed in ("0", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == vectors[0]["digest"]


def test_many_samples() -> None:
    n = 200_000
    shuffled = np.random.default_rng(0).permutation(n)
    ids = [f"train/{i}.png" for i in shuffled]
    table = pd.DataFrame({"sample_id": ids, "discarded": shuffled % 7 == 0, "tag:x": shuffled < 5})
    state = DataState.from_any(table)
    assert len(state) == n and state.ids_text() == sorted(ids)
    assert state.tagged()["x"] == {f"train/{i}.png": True for i in range(5)}
    assert digest(table.sort_values("sample_id")) == state.digest()


# -- Parquet ---------------------------------------------------------------------------------------


@given(states)
@settings(deadline=None)
def test_parquet_goes_round(state: dict[str, Any]) -> None:
    if any("kind" in e.get("tags", ()) for e in state.values()):
        return
    held = DataState.from_any(state)
    data = held.to_parquet()
    assert DataState.from_parquet(data) == held
    assert DataState.from_any(dict(reversed(state.items()))).to_parquet() == data
    assert DataState.from_any(held.to_frame()) == held


def test_the_documented_columns() -> None:
    state = DataState.from_any(
        frame(tag_x=[True, False, False], tag_k=["u", None, "v"], tag_o=False)
    )
    table = pq.read_table(io.BytesIO(state.to_parquet()))
    assert [(f.name, str(f.type)) for f in table.schema] == [
        ("sample_id", "string"),
        ("annotation_id", "int64"),
        ("discarded", "bool"),
        ("tag:k", "string"),
        ("tag:o", "bool"),
        ("tag:x", "bool"),
    ]
    assert table.to_pylist()[1] == {
        "sample_id": "b",
        "annotation_id": 0,
        "discarded": True,
        "tag:k": None,
        "tag:o": False,
        "tag:x": False,
    }


def test_parquet_of_other_writers() -> None:
    target = io.BytesIO()
    annotated().astype({"tag:x": "category"}).to_parquet(target)
    with pytest.raises(FormatError, match="tag:x|here"):
        DataState.from_parquet(target.getvalue()[:-9], "here")
    assert DataState.from_parquet(target.getvalue()).digest() == digest(annotated())
    dictionary = pa.table({"sample_id": ["a"], "tag:k": pa.array(["u"]).dictionary_encode()})
    target = io.BytesIO()
    pq.write_table(dictionary, target)
    assert DataState.from_parquet(target.getvalue()) == DataState.from_any({"a": {"tag:k": "u"}})


def test_damaged_parquet() -> None:
    data = DataState.from_any(frame(tag_x=[True, False, False])).to_parquet()
    other = io.BytesIO()
    pq.write_table(pa.table({"id": ["a"]}), other)
    for bad in (b"", b"PAR1", data[:-20], data[:50], other.getvalue(), b"\0" * 200):
        with pytest.raises(FormatError, match="here"):
            DataState.from_parquet(bad, "here")


# -- apply_to --------------------------------------------------------------------------------------


def test_an_older_state_comes_back_exactly() -> None:
    """ "Loading an older state restores its tags exactly (later ones vanish)" in a frame."""
    table = frame(tag_x=[True, False, True], tag_k=pd.Categorical(["u", None, "v"]), tag_o=False)
    table["loss"] = [1.0, 2.0, 3.0]
    before, state = table.copy(deep=True), DataState.from_any(table)
    table.loc[0, "tag:x"], table.loc[1, "tag:x"] = False, True
    table.loc[:, "tag:o"] = True
    table.loc[1, "tag:k"] = "u"
    table["tag:late"] = [True, True, True]
    table["tag:later"] = ["p", None, "q"]
    table["discarded"] = [True, False, True]
    assert DataState.from_any(table) != state
    assert state.apply_to(table) == ()
    pd.testing.assert_frame_equal(table, before)


def test_what_other_samples_get() -> None:
    state = DataState.from_any(frame(tag_x=[True, True, False], tag_k=["u", "v", None]))
    table = pd.DataFrame({"sample_id": ["new", "c", "a"], "discarded": True, "tag:z": True})
    assert state.apply_to(table) == ("b",), "ids of the state that the data lacks"
    expected = {"a": {"tags": ["x"], "tag:k": "u"}, "c": {}, "new": {}}
    assert DataState.from_any(table) == DataState.from_any(expected)
    assert list(table.columns) == ["sample_id", "discarded", "tag:k", "tag:x"]


def test_rows_of_other_annotations_stay() -> None:
    table = annotated()
    state = DataState.from_any(table)
    before = table.copy(deep=True)
    table.loc[("a", 0), "tag:x"] = False
    table.loc[("b", 0), "discarded"] = False
    table["tag:late"] = True
    state.apply_to(lambda: table)
    pd.testing.assert_frame_equal(table, before)
    named = DataState.from_any({"a": {"tag:k": "u"}, "b": {}, "c": {}})
    named.apply_to(table)
    assert DataState.from_any(table) == named
    assert table["discarded"].tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("dtype", ["bool", "boolean", "object"])
def test_the_type_of_a_column_stays(dtype: str) -> None:
    table = frame(tag_x=pd.Series([True, False, False], dtype=dtype), tag_k=["u", None, "v"])
    before, state = table.dtypes.to_dict(), DataState.from_any(table)
    table.loc[:, "tag:x"] = True
    state.apply_to(table)
    after = table.dtypes.to_dict()
    assert before["tag:k"] == after["tag:k"] and DataState.from_any(table) == state
    assert str(after["tag:x"]) == ("bool" if dtype == "object" else dtype)


MUTABLE: list[dict[Any, Any]] = [
    {"sample_id": [2, 1], "discarded": [True, False], "tag:x": [False, True], "n": "kept"},
    {
        "sample_id": np.array([2, 1]),
        "discarded": np.array([True, False]),
        "tag:x": np.array([0, 1]),
    },
    {1: {"tags": ["x"], "loss": 1.5}, 2: {"discarded": True, "tags": []}},
    {1: {"tag:x": True}, 2: {"discarded": True}},
    {"discarded": {1: False, 2: True}, "tag": {1: ["x"]}},
    {"discarded": {1: False, 2: True}, "tag": {"tag:x": {1: True, 2: False}}},
]


@pytest.mark.parametrize("shape", MUTABLE, ids=str)
def test_mappings_come_back_in_place(shape: dict[Any, Any]) -> None:
    older = DataState.from_any(copy.deepcopy(shape))
    data = copy.deepcopy(shape)
    keys = list(data)
    later = DataState.from_any({1: {"discarded": True, "tags": ["late"]}, 2: {"tags": ["x"]}})
    assert later.apply_to(data) == ()
    assert DataState.from_any(data) == later
    assert older.apply_to(data) == ()
    assert DataState.from_any(data) == older
    assert [k for k in keys if k in data] == keys
    text = json.dumps(data, default=lambda v: v.tolist())
    assert "late" not in text
    assert data.get("n") == shape.get("n")


def test_lists_and_arrays_of_the_caller_stay_the_same_objects() -> None:
    marks, out = [False, True], np.array([True, False])
    data = {"sample_id": ["a", "b"], "tag:x": marks, "discarded": out}
    DataState.from_any({"a": {"tags": ["x"]}, "b": {"discarded": True}}).apply_to(data)
    assert marks == [True, False] and out.tolist() == [False, True]


def test_tags_with_values_in_mappings() -> None:
    state = DataState.from_any({"a": {"tag:k": "u", "tag:x": True}, "b": {}})
    lists: dict[str, Any] = {"discarded": {"a": True, "b": True}, "tag": {"a": ["z"]}}
    before = copy.deepcopy(lists)
    with pytest.raises(InvalidInputError, match="'k' has the value 'u', which a list of names"):
        state.apply_to(lists)
    assert lists == before, "refused before anything is changed"
    samples: dict[str, Any] = {"a": {"tags": ["z"]}, "b": {}}
    state.apply_to(samples)
    assert samples == {"a": {"tags": ["x"], "tag:k": "u"}, "b": {}}
    with pytest.raises(InvalidInputError, match="expected a DataFrame"):
        state.apply_to([1])


@given(states, states)
@settings(deadline=None)
def test_apply_then_read(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Any state onto any data: they agree on what both have; the rest is bare."""
    if any("kind" in e.get("tags", ()) for s in (a, b) for e in s.values()):
        return
    state = DataState.from_any(a)
    bare: dict[str, Any] = {i: a.get(i, {}) for i in b}
    for data in (DataState.from_any(b).to_frame(), copy.deepcopy(b)):
        assert set(state.apply_to(data)) == a.keys() - b.keys()
        assert DataState.from_any(data) == DataState.from_any(bare)
