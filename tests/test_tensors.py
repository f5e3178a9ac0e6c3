"""Descriptions of tensors: real files of each format, and hostile ones."""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import pickletools
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from castore.errors import FormatError, UntrustedPickleError
from castore.tensors import ITEMSIZE, TensorFile, TensorInfo, describe

DTYPES = [getattr(torch, name) for name in ITEMSIZE]


def of(data: bytes) -> TensorFile:
    """Describe bytes; a read outside of them is a defect."""

    def read(start: int, stop: int) -> bytes:
        assert 0 <= start <= stop <= len(data)
        return data[start:stop]

    return describe(read, len(data))


def saved(value: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


def value(file: TensorFile, info: TensorInfo, data: bytes) -> torch.Tensor:
    """The tensor that a description promises, taken from the file's bytes."""
    dtype = getattr(torch, info.dtype)
    start, stop = file.range(info)
    flat = torch.frombuffer(bytearray(data[start:stop]), dtype=dtype) if stop > start else None
    if flat is None:
        return torch.empty(info.shape, dtype=dtype)
    return flat.as_strided(info.shape, info.strides)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = [t.contiguous().flatten().view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    width = ITEMSIZE[str(dtype).removeprefix("torch.")]
    n = int(np.prod(shape)) * width
    raw = torch.randint(0, 2 if dtype == torch.bool else 255, (n,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


# -- files as their own programs write them


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_torch_files(dtype: torch.dtype) -> None:
    tensor = random(dtype, 3, 5)
    data = saved({"w": tensor})
    file = of(data)
    assert file.format == "torch"
    assert same(value(file, file.tensors["w"], data), tensor)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.complex128], ids=str)
def test_every_dtype_of_safetensors(dtype: torch.dtype) -> None:
    tensor = random(dtype, 3, 5)
    data = safetensors.torch.save({"w": tensor})
    file = of(data)
    assert same(value(file, file.tensors["w"], data), tensor)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_documents_of_torch_files(protocol: int) -> None:
    """Everything but the tensors comes back as it was saved, in every pickle protocol."""
    plain = {
        "config": {"lr": 1e-5, "steps": -3, "big": 1 << 50, "ok": True, "none": None},
        "list": [1, "two", b"three", (4, 5)],
        "set": {1, 2},
        "stoi": {f"word{i}": i for i in range(3000)},
    }
    document = of(saved(plain, pickle_protocol=protocol)).document
    assert document == plain


def test_a_state_dict_keeps_its_order_and_metadata() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    data = saved({"model_state_dict": model.state_dict()})
    found = of(data).document["model_state_dict"]
    state = model.state_dict()
    assert isinstance(found, collections.OrderedDict)
    assert list(found) == list(state)
    assert found._metadata == state._metadata  # type: ignore[attr-defined]


def test_ties_views_and_strides_of_torch_files() -> None:
    """PT1, CC2, CC3: ties are one storage; views, transposed and expanded tensors are described."""
    flat = torch.arange(24.0)
    tensors = {
        "a": flat,
        "b": flat,
        "first": flat[:12],
        "second": flat[12:],
        "t": flat.reshape(4, 6).t(),
        "expanded": torch.ones(1).expand(7),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.0),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    data = saved(tensors)
    file = of(data)
    assert file.ties() == [("a", "b")]
    for name, tensor in tensors.items():
        info = file.tensors[name]
        assert same(value(file, info, data), tensor.detach()), name
        assert info.contiguous == tensor.is_contiguous()
    assert file.tensors["first"].storage == file.tensors["second"].storage


def test_a_tensor_that_torch_changes_as_it_reads_is_not_described() -> None:
    """The bytes of a lazy conjugate or negation are not its values, so none are promised."""
    z = torch.tensor([1 + 2j])
    lazy = {"conj": z.conj(), "copy": z.conj().resolve_conj(), "z": z}
    lazy["neg"] = torch.tensor([3 + 4j]).conj().imag
    file = of(saved({**lazy, "within": [torch.nn.Parameter(z.conj())]}))
    assert set(file.tensors) == {"copy", "z"}
    assert set(file.opaque) == {"conj", "neg", "within/0"}
    assert file.opaque["conj"].endswith("conj") and file.opaque["neg"].endswith("neg")
    assert file.document["neg"] is None and file.document["within"] == [None]


def test_parameters_with_attributes() -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    parameter.note = "kept out"  # type: ignore[attr-defined]
    data = saved({"p": parameter})
    file = of(data)
    assert same(value(file, file.tensors["p"], data), parameter.detach())


def test_optimizers_are_described() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    file = of(saved({"optimizer": optimizer.state_dict()}))
    assert file.tensors["optimizer/state/0/exp_avg"].shape == (4, 4)
    assert file.document["optimizer"]["param_groups"][0]["lr"] == 1e-3


def test_npz() -> None:
    arrays = {
        "c": np.arange(6.0).reshape(2, 3),
        "f": np.asfortranarray(np.arange(6, dtype="i2").reshape(2, 3)),
        "bool": np.array([True, False]),
        "empty": np.zeros((0, 3), "f4"),
        "big": np.arange(3, dtype=">f4"),
        "text": np.array(["a"]),
    }
    out = io.BytesIO()
    np.savez(out, **arrays)
    file = of(out.getvalue())
    assert file.opaque.keys() == {"big", "text"}
    for name, info in file.tensors.items():
        assert np.array_equal(value(file, info, out.getvalue()).numpy(), arrays[name])
    np.savez_compressed(out := io.BytesIO(), **arrays)
    assert set(of(out.getvalue()).opaque.values()) == {"compressed"}


def test_safetensors_names_and_metadata() -> None:
    names = ['quo"te', "back\\slash", "ünï", "new\nline", "a/b"]
    tensors = {n: torch.full((2,), float(i)) for i, n in enumerate(names)}
    data = safetensors.torch.save(tensors, {"format": "pt", "k": 'v"{}'})
    file = of(data)
    assert file.metadata == {"format": "pt", "k": 'v"{}'}
    assert file.tensors.keys() == tensors.keys()
    for n, t in tensors.items():
        assert same(value(file, file.tensors[n], data), t)


def test_safetensors_metadata_is_not_what_a_name_says() -> None:
    """A tensor whose name holds the word is a tensor; texts may stand before and after tensors."""
    named = {'x"__metadata__": {"a": "b"}': torch.ones(1), "__metadata": torch.ones(1)}
    assert of(safetensors.torch.save(named)).metadata == {}
    assert of(safetensors.torch.save(named, {"k": "v"})).metadata == {"k": "v"}
    last = json.dumps({"w": entry([1], [0, 4]), "__metadata__": {"k": "v\n"}})
    assert of(header(last, bytes(4))).metadata == {"k": "v\n"}


def test_only_headers_are_read() -> None:
    data = saved({"model_state_dict": {f"w{i}": torch.randn(100_000) for i in range(5)}})
    total = 0

    def read(start: int, stop: int) -> bytes:
        nonlocal total
        total += stop - start
        return data[start:stop]

    file = describe(read, len(data))
    assert total < 8_000
    before = total
    file.range(file.tensors["model_state_dict/w3"])
    assert total - before < 200


# -- hostile pickles


def torch_zip(pickled: bytes, storages: dict[str, bytes] | None = None) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        z.writestr("archive/data.pkl", pickled)
        for key, content in (storages or {}).items():
            z.writestr(f"archive/data/{key}", content)
    return out.getvalue()


class Runs:
    """Its pickle would write a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_is_run(tmp_path: Path, protocol: int) -> None:
    """SE1: the name is told, and nothing happened."""
    mark = tmp_path / "ran"
    with pytest.raises(UntrustedPickleError, match=r"(posix|os)\.system"):
        of(torch_zip(pickle.dumps({"model_state_dict": Runs(mark)}, protocol)))
    assert not mark.exists()


@pytest.mark.parametrize(
    "name",
    [
        "builtins eval",
        "builtins getattr",
        "os system",
        "torch load",
        "torch._utils _rebuild_tensor_v2.__globals__",
        "torch hub.load",
        "numpy._core.multiarray scalar",
        "collections OrderedDict.fromkeys",
        "torch XStorage",
        "torch float99",
    ],
)
def test_names_off_the_list(name: str) -> None:
    module, _, attribute = name.partition(" ")
    pickled = b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + b")R."
    with pytest.raises(UntrustedPickleError, match=attribute.rpartition(".")[2]):
        of(torch_zip(pickled))
    stacked = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode()
    stacked += b"\x8c" + bytes([len(attribute)]) + attribute.encode() + b"\x93)R."
    with pytest.raises(UntrustedPickleError):
        of(torch_zip(stacked))


def test_numpy_values_are_named() -> None:
    """CC1: a NumPy scalar is refused by name, as a weights-only reader would."""
    with pytest.raises(UntrustedPickleError, match="numpy"):
        of(saved({"lr": np.float64(1e-3)}))


STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tQ"


def tensor(shape: bytes, strides: bytes, offset: bytes = b"K\0", storage: bytes = STORAGE) -> bytes:
    """A pickle of one tensor ``w`` over 4 floats, its numbers as given."""
    made = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + shape + strides
    return b"\x80\x02}X\x01\0\0\0w" + made + b"\x89}tRs."


def one(n: int) -> bytes:
    return b"\x8a\x08" + n.to_bytes(8, "little", signed=True) + b"\x85"


@pytest.mark.parametrize(
    "pickled",
    [
        tensor(one(1000), one(1)),
        tensor(one(4), one(2)),
        tensor(one(2**62), one(1)),
        tensor(one(2**62), one(0)),  # expanded: no byte of it is missing, and nobody could hold it
        tensor(one(-1), one(1)),
        tensor(one(1), one(-1)),
        tensor(one(4), one(1), b"K\x01"),
        tensor(one(4), b")"),
        tensor(one(4), one(1), storage=b"N"),
        tensor(one(4), one(1), storage=STORAGE.replace(b"K\x04tQ", b"K\x05tQ")),
        tensor(one(4), one(1), storage=STORAGE.replace(b"\x000", b"\x001")),
        tensor(one(4), one(1), b"X\x01\0\0\x000"),
    ],
)
def test_shapes_that_do_not_fit(pickled: bytes) -> None:
    """SE6: refused before anything is allocated."""
    tracemalloc.start()
    with pytest.raises(FormatError):
        of(torch_zip(pickled, {"0": bytes(16)}))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_the_same_tensor_within_its_bytes_is_read() -> None:
    """SE6: the refusals above are of the numbers, not of the form; empty tensors are legal."""
    for shape, strides in ((one(4), one(1)), (one(0), one(1)), (one(4), one(0)), (b")", b")")):
        assert of(torch_zip(tensor(shape, strides), {"0": bytes(16)})).tensors["w"].dtype


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b".",
        b"\x80\x02",
        b"\x80\x02N",
        b"\x80\x02NN.",
        b"\x80\x02(N.",
        b"\x80\x02h\x00.",
        b"\x80\x02\x85.",
        b"\x80\x02}K\x01s.",
        b"\x80\x02}(K\x01u.",
        b"\x80\x02N(K\x01e.",
        b"\x80\x02NN\x86R.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"\x80\x02\x8b\xff\xff\xff\xff.",
        b"\x80\x02X\xff\xff\xff\xff.",
        b"\x80\x02X\x01\0\0\0\xff.",
        b"\x80\x02\x8a\x41" + bytes(65) + b".",
        b"\x80\x02i\n\n.",
        b"\x80\x02Iabc\n.",
        b"\x80\x02ccollections\n" + b"x" * 2000 + b"\n.",
        b"\x80\x02}NNs.",
        b"\x80\x02})K\x01s.",
        b"\x80\x02ccollections\nOrderedDict\n)RNb.",
        b"\x80\x02}}b.",
        b"\x80\x02NQ.",
    ],
)
def test_damaged_pickles(pickled: bytes) -> None:
    with pytest.raises(FormatError):
        of(torch_zip(pickled))


def test_nesting_and_repetition_are_bounded() -> None:
    deep = b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b"."
    with pytest.raises(FormatError, match="nested"):
        of(torch_zip(deep))
    laughs: Any = "ha"
    for _ in range(40):
        laughs = [laughs, laughs]
    with pytest.raises(FormatError, match="nested|too many"):
        of(torch_zip(pickle.dumps(laughs, 2)))
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(FormatError, match="nested"):
        of(torch_zip(pickle.dumps(loop, 2)))
    keys: Any = ()
    for _ in range(100_000):
        keys = (keys,)
    hashed = b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"K\x01s."
    with pytest.raises(FormatError, match="key"):
        of(torch_zip(hashed))


_GOOD = saved(
    {
        "model_state_dict": torch.nn.Linear(3, 2).state_dict(),
        "f": ["a", 1, 2.5],
        "h": torch.ones(2).half(),
    }
)


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, len(_GOOD) - 1), mask=st.integers(1, 255))
def test_a_flipped_byte_is_an_error_or_harmless(at: int, mask: int) -> None:
    data = bytearray(_GOOD)
    data[at] ^= mask
    try:
        file = of(bytes(data))
        ranges = [file.range(i) for i in file.tensors.values()]
    except (FormatError, UntrustedPickleError):
        return
    assert all(0 <= a <= b <= len(data) for a, b in ranges)


@settings(max_examples=200, deadline=None)
@given(ops=st.lists(st.binary(min_size=1, max_size=6), max_size=30))
def test_random_operations_do_not_crash(ops: list[bytes]) -> None:
    known = [o.code.encode("latin1") for o in pickletools.opcodes]
    body = b"".join(known[o[0] % len(known)] + o[1:] for o in ops)
    try:
        of(torch_zip(b"\x80\x02" + body + b"."))
    except (FormatError, UntrustedPickleError):
        pass


# -- hostile archives and headers


def test_two_members_of_one_name_and_compressed_ones() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        z.writestr("a/data.pkl", b"\x80\x02}.")
        with pytest.warns(UserWarning, match="Duplicate"):
            z.writestr("a/data.pkl", b"\x80\x02}.")
    with pytest.raises(FormatError, match="twice"):
        of(out.getvalue())
    with zipfile.ZipFile(out := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("a/data.pkl", b"\x80\x02}." * 50)
    with pytest.raises(FormatError):
        of(out.getvalue())


def test_big_endian_files_are_refused() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        z.writestr("a/data.pkl", b"\x80\x02}.")
        z.writestr("a/byteorder", "big")
    with pytest.raises(FormatError, match="little"):
        of(out.getvalue())


def header(text: str | bytes, body: bytes = bytes(16)) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw + body


def entry(shape: Any, at: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": at}


@pytest.mark.parametrize(
    "tensors",
    [
        {"w": entry([1000, 1000], [0, 4])},
        {"w": entry([4], [16, 0])},
        {"w": entry([8], [0, 32])},
        {"w": entry([4], [0, 16]), "v": entry([2], [8, 16])},
        {"w": entry([-4], [0, 16])},
    ],
)
def test_safetensors_ranges_that_disagree(tensors: Any) -> None:
    """SE6."""
    with pytest.raises(FormatError):
        of(header(json.dumps(tensors)))


def test_safetensors_legal_oddities() -> None:
    """SE6: an empty tensor is legal; an unknown dtype is said, not guessed."""
    file = of(header(json.dumps({"e": entry([0], [0, 0]), "x": entry([4], [0, 16], "F4X9")})))
    assert file.tensors["e"].shape == (0,)
    assert file.opaque == {"x": "dtype F4X9"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        header('{"w":', b""),
        header(
            '{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],'
            '"data_offsets":[4,8]}}'
        ),
        header(
            r'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"\u0077":{"dtype":"F32",'
            r'"shape":[1],"data_offsets":[4,8]}}'
        ),
        struct.pack("<Q", 1 << 60) + b"{}",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        b"<!DOCTYPE html><html>not found</html>",
        b"PK\x03\x04",
    ],
    ids=range(9),
)
def test_what_is_no_file_of_tensors(data: bytes) -> None:
    """CC7: cut files, pointers and error pages; a name twice, also where one is escaped."""
    with pytest.raises(FormatError):
        of(data)


@pytest.mark.parametrize(
    "make", [lambda t: saved({"w": t}), lambda t: safetensors.torch.save({"w": t})]
)
def test_files_cut_short(make: Callable[[torch.Tensor], bytes]) -> None:
    """CC7: by a byte, by half."""
    data = make(torch.randn(1000))
    for stop in (len(data) - 1, len(data) // 2):
        with pytest.raises(FormatError):
            of(data[:stop])
