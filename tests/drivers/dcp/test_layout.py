"""Names and the document ``dcp.json``: pure data, read without torch's pickles."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from castore import FormatError, InvalidInputError, document
from castore_dcp.layout import BytesEntry, Chunk, Item, Layout, TensorEntry, coded, plain
from castore_dcp.metadata import to_layout, to_metadata
from castore_dcp.names import Checkpoint, at_step, is_id, parse_id, parts_of

ENTRY = TensorEntry("float32", (4, 3), (Chunk((0, 0), (2, 3)), Chunk((2, 0), (2, 3))))
LAYOUT = Layout(
    {"w": ENTRY, "n": BytesEntry()},
    (
        Item("w", (0, 0), 0, "a", 0, 24),
        Item("w", (2, 0), None, "b", 8, 32),
        Item("n", None, None, "a", 24, 30),
    ),
    {"w": ("model", 0)},
    "1.0",
)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("100", Checkpoint(step=100)),
        ("step-100", Checkpoint(step=100)),
        ("step_0100", Checkpoint(step=100)),
        ("a/b/step=7/", Checkpoint(step=7)),
        (Path("/runs/ckpt.12"), Checkpoint(step=12)),
        ("best", Checkpoint(name="best")),
        ("run7/best", Checkpoint(name="run7/best")),
        ("1.5", Checkpoint(name="1.5")),
        ("step--1", Checkpoint(name="step--1")),
        ("ünï", Checkpoint(name="ünï")),
    ],
)
def test_an_id_is_a_step_or_a_name(given: Any, meant: Checkpoint) -> None:
    assert parse_id(given) == meant
    assert is_id(given)


@pytest.mark.parametrize("given", ["", "a\nb", "x" * 1025, "\ud800", None, 3.5])
def test_what_cannot_be_an_id_is_none(given: Any) -> None:
    assert not is_id(given)
    if isinstance(given, str):
        with pytest.raises(InvalidInputError, match="checkpoint id"):
            parse_id(given)


@pytest.mark.parametrize("step", [-1, True, 2.0, 10**18])
def test_a_step_is_a_whole_number(step: Any) -> None:
    with pytest.raises(InvalidInputError, match="step"):
        at_step(step)


def test_names_of_different_ids_have_different_keys() -> None:
    keys = {parse_id(i).key for i in ["best", "last", "b/best", "1", "2", "step-3"]}
    assert len(keys) == 6


def test_a_namespace_without_room_for_its_parts_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="namespace"):
        parts_of("n" * 125)


def test_a_layout_reads_back_as_it_was_and_in_its_order() -> None:
    again = Layout.decode(LAYOUT.encode())
    assert again == replace(LAYOUT, items=again.items)
    assert list(again.entries) == ["w", "n"]
    assert set(again.items) == set(LAYOUT.items)
    assert again.encode() == LAYOUT.encode()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.text(), st.integers()), inner)
    ),
    max_leaves=8,
)


@given(values)
def test_plain_values_of_planners_keep_their_kinds(value: Any) -> None:
    again = plain(json.loads(json.dumps(coded(value), allow_nan=False)))
    assert repr(again) == repr(value)


@pytest.mark.parametrize("value", [{1, 2}, b"x", object(), [lambda: 0]])
def test_other_values_of_planners_are_refused(value: Any) -> None:
    with pytest.raises(InvalidInputError, match="only plain values"):
        replace(LAYOUT, planner=value).encode()


def change(**fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(LAYOUT.encode())
    return {**body, **fields}


ITEMS = json.loads(LAYOUT.encode())["items"]
TENSOR = json.loads(LAYOUT.encode())["entries"][0][1]


@pytest.mark.parametrize(
    "fields",
    [
        {"items": ITEMS[:2]},
        {"items": [*ITEMS, ITEMS[0]]},
        {"items": [["v", None, None, 0, 0, 1], *ITEMS]},
        {"items": [["w", [0, 0], 0, 0, 0, 20], *ITEMS[1:]]},
        {"items": [["w", [0, 0], 0, 9, 0, 24], *ITEMS[1:]]},
        {"items": [["w", [0, 0], 0, 0, -8, 16], *ITEMS[1:]]},
        {"items": [*ITEMS[:2], ["n", None, None, 0, 9, 5]]},
        {"items": 3},
        {"entries": [["w", {**TENSOR, "size": [5, 3]}], ["n", {"type": "bytes"}]]},
        {"files": ["b", "a"]},
        {"files": ["a"]},
        {"entries": [["w", TENSOR]] * 2},
        {"entries": [["w", {**TENSOR, "dtype": "object"}], ["n", {"type": "bytes"}]]},
        {"entries": [["w", {**TENSOR, "size": [3, 3]}], ["n", {"type": "bytes"}]]},
        {"entries": [["w", {**TENSOR, "more": 1}], ["n", {"type": "bytes"}]]},
        {"entries": [["w", TENSOR], ["n", {"type": "bytes", "more": 1}]]},
        {"entries": [["w", {**TENSOR, "pin_memory": 1}], ["n", {"type": "bytes"}]]},
        {"entries": [["w", {**TENSOR, "memory_format": "os"}], ["n", {"type": "bytes"}]]},
        {"planner": {"call": ["os.system"]}},
        {"planner": 1.5},
        {"version": 3},
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(fields: dict[str, Any]) -> None:
    body = change(**fields)
    data = document.encode(body.pop("kind"), {k: v for k, v in body.items() if k != "format"})
    with pytest.raises(FormatError, match=r"dcp\.json"):
        Layout.decode(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError):
        Layout.decode(data)


@pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last, torch.preserve_format]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_every_class_of_torchs_metadata_comes_back(
    dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    properties = TensorProperties(dtype, torch.strided, True, memory_format, True)
    head = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    chunk = ChunkStorageMetadata(torch.Size([2]), torch.Size([3]))
    size = 3 * dtype.itemsize
    metadata = Metadata(
        {
            "t": TensorStorageMetadata(properties, torch.Size([5]), [head, chunk]),
            "b": BytesStorageMetadata(),
            "none": TensorStorageMetadata(properties, torch.Size([0]), []),
        },
        planner_data={"t": ("model", "list", 3), "b": ("b",)},
        storage_data={
            MetadataIndex("t", (2,), 0): Item("t", (2,), 0, "f", 8, 8 + size),
            MetadataIndex("t", (0,), 1): Item("t", (0,), 1, "e", 0, 2 * dtype.itemsize),
            MetadataIndex("b"): Item("b", None, None, "f", 0, 8),
        },
        version="1.0.0",
    )
    again = to_metadata(Layout.decode(to_layout(metadata).encode()))
    assert again == metadata
    kept = again.state_dict_metadata["t"]
    assert isinstance(kept, TensorStorageMetadata)
    assert type(kept.size) is torch.Size
    assert [i.index for i in again.storage_data if i.fqn == "t"] == [0, 1]
