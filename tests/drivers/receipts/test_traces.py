"""Trajectories: never an object array, never unpickled, never more memory than there are bytes."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castore import FormatError, InvalidInputError
from castore_receipts import traces
from castore_receipts.traces import read_npz, write_npz


def saved(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def zipped(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return buffer.getvalue()


def npy(header: str) -> bytes:
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def test_rc3_episodes_of_lengths_5_and_7_are_two_arrays() -> None:
    given_ = {"trace_1": np.ones((5, 3)), "trace_2": np.arange(21.0).reshape(7, 3)}
    data = write_npz(given_)
    found = read_npz(data, "x")
    assert {n: a.shape for n, a in found.items()} == {"trace_1": (5, 3), "trace_2": (7, 3)}
    with np.load(io.BytesIO(data), allow_pickle=False) as theirs:
        assert all(np.array_equal(theirs[n], a) for n, a in given_.items())
    assert write_npz(given_) == data, "the same arrays are the same bytes"


@pytest.mark.parametrize(
    "value",
    [
        np.array([np.zeros(5), np.zeros(7)], dtype=object),
        np.array([[1.0, None]], dtype=object),
        np.array([{"position": 1.0}]),
    ],
    ids=["ragged", "none", "dict"],
)
def test_rc3_object_arrays_are_refused_when_written(value: Any) -> None:
    with pytest.raises(InvalidInputError, match="trace_7.*Python objects"):
        write_npz({"trace_7": value})


class Evil:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_rc3_se1_a_pickle_in_a_member_is_refused_and_never_run(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.array([Evil(tmp_path / "ran")], dtype=object))
    with pytest.raises(FormatError, match="Python objects never are"):
        read_npz(zipped(trace_1=buffer.getvalue()), "validation.npz")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "sound"),
        (b"PK\x03\x04", "sound"),
        (saved(trace_1=np.ones(4))[:-30], "sound"),
        (zipped(trace_1=b"not an array"), "sound"),
        (
            zipped(trace_1=npy("{'descr':'<f8','fortran_order':False,'shape':(1000000,1000)}")),
            "byte",
        ),
        (zipped(trace_1=npy("{'descr':'<f8','fortran_order':False,'shape':(10**18,)}")), "sound"),
        (zipped(trace_1=npy("{'descr':'<f8','fortran_order':False,'shape':(4,)}")), "found 0"),
        (zipped(trace_1=npy("{'descr':'|O','fortran_order':False,'shape':(4,)}")), "never"),
        (zipped(trace_1=npy("{'descr':'<f8','fortran_order':False,'shape':(-1,)}")), "x"),
        (zipped(trace_1=npy("{'descr':[('a','<f8')],'fortran_order':False,'shape':()}")), "read"),
        (zipped(trace_1=npy("__import__('os').system('true')")), "sound"),
    ],
)
def test_a_damaged_file_is_refused(data: bytes, word: str) -> None:
    with pytest.raises(FormatError, match="x") as found:
        read_npz(data, "x")
    assert word in str(found.value)


def test_more_than_the_limit_is_refused_before_it_is_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traces, "MAX_TRACES", 1000)
    assert read_npz(saved(a=np.ones(100)), "x")["a"].shape == (100,)
    with pytest.raises(FormatError, match="at most 1000"):
        read_npz(saved(a=np.ones(100), b=np.ones(100)), "x")


def test_a_member_with_bytes_after_the_array_is_refused() -> None:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ones(3))
    with pytest.raises(FormatError, match="takes 24 bytes, found 25"):
        read_npz(zipped(trace_1=buffer.getvalue() + b"!"), "x")


def test_fortran_order_and_empty_arrays_come_back() -> None:
    array = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    found = read_npz(saved(a=array, e=np.zeros((0, 3))), "x")
    assert np.array_equal(found["a"], array)
    assert found["e"].shape == (0, 3)


@given(st.data())
def test_any_flip_is_refused_or_read(data: st.DataObject) -> None:
    whole = bytearray(saved(trace_1=np.arange(20.0)))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        read_npz(bytes(whole), "x")
    except FormatError:
        pass
