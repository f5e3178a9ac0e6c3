"""Safetensors files: one spelling out, nothing believed on the way in."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from castore import FormatError, InvalidInputError
from castore_receipts import arrays
from castore_receipts.arrays import (
    BITS,
    Tensor,
    arrays_digest,
    first_nonfinite,
    read_safetensors,
    tensor,
    write_safetensors,
)
from castore_receipts.tensors import from_torch, state_of, to_torch


def build(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


SAMPLE = {
    "b.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a": np.array([1, 2, 3], np.int64),
    "c.half": np.array([0.5], np.float16),
    "empty": np.zeros((0, 4), np.float32),
    "flag": np.array([True, False]),
}


def test_the_library_reads_what_is_written_and_the_other_way_round() -> None:
    ours = write_safetensors({n: tensor(a, n) for n, a in SAMPLE.items()})
    theirs = safetensors.numpy.load(ours)
    assert all(
        np.array_equal(theirs[n], a) and theirs[n].dtype == a.dtype for n, a in SAMPLE.items()
    )
    again = read_safetensors(safetensors.numpy.save(SAMPLE), "x").tensors
    assert all(np.array_equal(again[n].numpy(), a) for n, a in SAMPLE.items())


def test_the_bytes_are_those_of_the_library_without_metadata() -> None:
    state = {n: torch.from_numpy(a) for n, a in SAMPLE.items()}
    assert write_safetensors(state_of(state)) == safetensors.torch.save(state)


def test_hc8_equal_tensors_are_equal_bytes_in_every_process() -> None:
    code = (
        "import sys, hashlib, numpy as np; from castore_receipts.arrays import *;"
        "t={n: tensor(np.arange(9.0), n) for n in sys.argv[1:]};"
        "print(hashlib.sha256(write_safetensors(t, 'state')).hexdigest(), arrays_digest(t))"
    )
    names = [f"n{i}" for i in range(16)]
    shown = {
        subprocess.check_output([sys.executable, "-c", code, *order])
        for order in (names, names[::-1])
    }
    assert len(shown) == 1


def test_the_digest_sees_name_dtype_shape_and_bytes_and_nothing_else() -> None:
    base = {"a": tensor(np.arange(6, dtype=np.float32).reshape(2, 3), "a")}
    digest = arrays_digest(base)
    strided = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    big = np.arange(6, dtype=">f4").reshape(2, 3)
    assert arrays_digest({"a": tensor(strided, "a")}) == digest
    assert arrays_digest({"a": tensor(big, "a")}) == digest
    others = [
        {"b": base["a"]},
        {"a": Tensor("F32", (3, 2), base["a"].data)},
        {"a": Tensor("I32", (2, 3), base["a"].data)},
        {"a": tensor(np.arange(1, 7, dtype=np.float32).reshape(2, 3), "a")},
    ]
    assert len({digest, *map(arrays_digest, others)}) == 5


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "0 bytes"),
        (b"1234567", "7 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a", "fetch it again"),
        (b"<!DOCTYPE html><html></html>", "fetch it again"),
        (build({}, length=1 << 60), "header of 1152921504606846976 bytes"),
        (build({"a": entry(shape=[1000, 1000])}, b"1234"), "'a'"),
        (build({"a": entry(offsets=[4, 0])}, b"1234"), "'a'"),
        (build({"a": entry(offsets=[0, 8], shape=[2])}, b"1234"), "'a'"),
        (build({"a": entry(offsets=[4, 8])}, b"12345678"), "'a' begins"),
        (build({"a": entry(), "b": entry()}, b"1234"), "'b' begins"),
        (build({"a": entry()}, b"12345678"), "take 4"),
        (build({"a": entry(dtype="OBJ")}, b"1234"), "'a'"),
        (build({"a": entry(shape=[-1])}, b"1234"), "'a'"),
        (build({"a": entry(shape=[True])}, b"1234"), "'a'"),
        (build({"a": entry(shape=[1 << 61, 1 << 61, 0])}, b"1234"), "'a'"),
        (build({"a": {**entry(), "more": 1}}, b"1234"), "'a'"),
        (build(b'{"a":{},"a":{}}'), "twice"),
        (build(b"[]"), "object"),
        (build({"__metadata__": {"a": 1}}), "metadata"),
        (build(b"[" * 100_000), "JSON"),
    ],
)
def test_se6_cc7_a_damaged_file_is_refused_by_name_before_anything_is_made(
    data: bytes, word: str
) -> None:
    with pytest.raises(FormatError, match="policy.safetensors") as found:
        read_safetensors(data, "policy.safetensors")
    assert word in str(found.value)


def test_se6_the_legal_empty_tensor_is_accepted() -> None:
    data = build({"e": entry(shape=[0], offsets=[0, 0]), "a": entry()}, b"\0\0\0\0")
    assert read_safetensors(data, "x").tensors["e"].numpy().shape == (0,)


@pytest.mark.parametrize("keep", [0, 1, 7, 100, -1])
def test_cc7_a_truncated_file_is_refused(keep: int) -> None:
    data = write_safetensors({"a": tensor(np.arange(100.0), "a")})
    with pytest.raises(FormatError, match="runs/x: "):
        read_safetensors(data[:keep], "runs/x")


def test_cc5_a_header_that_no_reader_accepts_is_refused_before_writing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arrays, "MAX_HEADER", 1000)
    many = {f"tensor {i}": tensor(np.zeros(1), "x") for i in range(30)}
    with pytest.raises(InvalidInputError, match="30 tensors make a header"):
        write_safetensors(many)
    with pytest.raises(InvalidInputError, match="header"):
        write_safetensors({"a" * 2000: tensor(np.zeros(1), "x")})


# -- finiteness


FLOATS = [
    (torch.float64, 8),
    (torch.float32, 4),
    (torch.float16, 2),
    (torch.bfloat16, 2),
    (torch.float8_e4m3fn, 1),
    (torch.float8_e5m2, 1),
    (torch.float8_e4m3fnuz, 1),
    (torch.float8_e5m2fnuz, 1),
]


@pytest.mark.parametrize(("dtype", "size"), FLOATS, ids=lambda v: str(v))
def test_rc1_every_bit_pattern_is_judged_as_torch_judges_it(dtype: torch.dtype, size: int) -> None:
    patterns = np.arange(256 if size == 1 else 65536, dtype=np.uint8 if size == 1 else np.uint16)
    if size > 2:  # the upper bits decide
        patterns = (patterns.astype(f"u{size}")) << (8 * (size - 2))
    values = torch.from_numpy(patterns.view(np.uint8).copy()).view(dtype)
    expected = (~torch.isfinite(values.to(torch.float64))).numpy()
    found = arrays._nonfinite(from_torch(values, "x"))
    assert np.array_equal(found, expected)
    assert expected.any()


@pytest.mark.parametrize(("dtype", "size"), FLOATS, ids=lambda v: str(v))
def test_rc1_the_first_bad_tensor_index_and_value_are_named(dtype: torch.dtype, size: int) -> None:
    value = torch.zeros(2, 3).to(dtype)
    value[1, 1] = float("nan")
    good = torch.ones(4).to(dtype)
    bad = first_nonfinite(state_of({"b": value, "a": good, "c": value}))
    assert bad is not None
    assert (bad.name, bad.count, bad.index) == ("b", 1, (1, 1))
    assert "nan" in bad.value.lower() or "0x" in bad.value


def test_rc1_integers_bool_complex_and_empty_are_finite() -> None:
    state = {
        "i": torch.tensor([2**62]),
        "u": torch.tensor([255], dtype=torch.uint8),
        "b": torch.tensor([True]),
        "e": torch.empty(0, 3),
        "z": torch.tensor([1 + 2j], dtype=torch.complex64),
        "s": torch.tensor(3.0),
    }
    held = state_of(state)
    assert first_nonfinite(held) is None
    assert all(torch.equal(to_torch(held[n]), t) for n, t in state.items())
    bad = first_nonfinite(state_of({"z": torch.tensor([complex(0, float("inf"))])}))
    assert bad is not None
    scalar = first_nonfinite(state_of({"s": torch.tensor(float("inf"))}))
    assert scalar is not None
    assert scalar.index == ()


@pytest.mark.parametrize(
    "value",
    [
        torch.empty(2, device="meta"),
        torch.eye(3).to_sparse(),
        torch.tensor([1j], dtype=torch.complex128),
        "text",
        7,
    ],
    ids=["meta", "sparse", "complex128", "str", "int"],
)
def test_rc1_cc3_what_cannot_be_stored_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidInputError, match="head.extra"):
        state_of({"head.extra": value})


def test_cc2_a_view_takes_its_own_elements_and_has_its_clones_digest() -> None:
    big = torch.arange(1_000_000, dtype=torch.float32)
    views = {"w": big[:1000], "n": big.narrow(0, 5, 10), "c": torch.chunk(big, 100)[3]}
    clones = {n: v.clone() for n, v in views.items()}
    ours, theirs = (write_safetensors(state_of(s)) for s in (views, clones))
    assert ours == theirs
    assert len(ours) < 4 * (1000 + 10 + 10_000) + 1000


def test_cc3_strides_do_not_matter() -> None:
    image = torch.arange(48.0).reshape(1, 3, 4, 4)
    state = {
        "last": image.to(memory_format=torch.channels_last),
        "t": torch.arange(6.0).reshape(2, 3).t(),
        "wide": torch.tensor([1.0]).expand(5),
        "neg": torch.imag(torch.tensor([1 + 2j]).conj()),
    }
    plain = {n: t.clone().contiguous() for n, t in state.items()}
    assert arrays_digest(state_of(state)) == arrays_digest(state_of(plain))
    assert all(torch.equal(to_torch(t), state[n]) for n, t in state_of(state).items())


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_read(data: bytes) -> None:
    try:
        read_safetensors(data, "x")
    except FormatError:
        pass


def test_every_flip_of_a_header_byte_is_refused_or_gives_tensors_of_the_same_size() -> None:
    data = bytearray(write_safetensors({"a": tensor(np.arange(4.0), "a")}, "state"))
    total = 32
    for i in range(len(data) - total):
        for mask in (1, 0x20, 0x80):
            data[i] ^= mask
            try:
                found = read_safetensors(bytes(data), "x").tensors
                assert sum(t.nbytes for t in found.values()) == total
            except FormatError:
                pass
            data[i] ^= mask


def test_every_dtype_of_the_format_has_its_bits() -> None:
    assert BITS["F4"] == 4
    assert {"BF16", "F8_E4M3", "C64", "BOOL"} <= BITS.keys()


def test_a_packed_small_float_is_read_and_counts_its_bits(tmp_path: Path) -> None:
    data = build({"q": entry("F4", [4], [0, 2])}, b"\x12\x34")
    held = read_safetensors(data, "x").tensors["q"]
    assert held.count == 4
    assert first_nonfinite({"q": held}) is None
    with pytest.raises(InvalidInputError, match="F4"):
        held.numpy()
