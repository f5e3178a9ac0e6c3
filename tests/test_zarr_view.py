"""The tensors of committed files as zarr arrays: every format, slices that read little, damage."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from safetensors.torch import save as save_safetensors
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from castore import (
    BackendError,
    CorruptObjectError,
    Draft,
    FormatError,
    MemoryFile,
    NotFoundError,
    ObjectNotFoundError,
    Repository,
    UntrustedPickleError,
)
from castore.objects import object_name
from castore.tree import File
from castore.zarr_view import SnapshotStore, tensors_group
from castore.zarr_view.layout import TARGET, View, node_paths
from castore.zarr_view.views import read_contents
from tests.faults import Counting
from tests.helpers import blobs, flip_object, new_repository, safetensors, weights, with_backend

DTYPES = {
    **{f"int{n}": getattr(torch, f"int{n}") for n in (8, 16, 32, 64)},
    **{f"uint{n}": getattr(torch, f"uint{n}") for n in (8, 16, 32, 64)},
    **{f"float{n}": getattr(torch, f"float{n}") for n in (16, 32, 64)},
    **{f"complex{n}": getattr(torch, f"complex{n}") for n in (64, 128)},
    "bool": torch.bool,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
}
"""Names of NumPy's and `ml_dtypes`' types, and torch's."""


@pytest.fixture(params=["local", "s3"])
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> Repository:
    if request.param == "local":
        return Repository.init(tmp_path / "repository")
    options = request.getfixturevalue("s3_options")
    return Repository.init(request.getfixturevalue("s3_url"), storage_options=options)


@pytest.fixture
def local(tmp_path: Path) -> Repository:
    return new_repository("local", tmp_path)


def opened(repository: Repository, path: str, data: bytes) -> zarr.Group:
    name = repository.commit(Draft({path: MemoryFile(data)})).name
    return tensors_group(repository, name, path)


def torch_file(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def npz(save: Any = np.savez, **arrays: Any) -> bytes:
    buffer = io.BytesIO()
    save(buffer, **arrays)
    return buffer.getvalue()


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(array: Any, tensor: torch.Tensor) -> None:
    assert array.shape == tuple(tensor.shape)
    assert np.ascontiguousarray(array[...]).tobytes() == raw(tensor)


# -- formats


def every_dtype() -> dict[str, torch.Tensor]:
    bits = torch.randint(1, 100, (6, 16), dtype=torch.uint8)
    return {n: (bits.bool() if n == "bool" else bits.clone().view(d)) for n, d in DTYPES.items()}


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_every_dtype_to_the_bit(local: Repository, form: str) -> None:
    tensors = every_dtype()
    if form == "safetensors":
        tensors.pop("complex128")  # the format has none
        group = opened(local, "model.safetensors", save_safetensors(tensors))
    else:
        group = opened(local, "model.pt", torch_file(tensors))
    assert set(group.array_keys()) == set(tensors)
    for name, tensor in tensors.items():
        array = group[name]
        assert isinstance(array, zarr.Array)
        expected = np.dtype(getattr(ml_dtypes, name, name))
        assert array.dtype == expected, name
        same(array, tensor)
        assert array[1:3].dtype == expected


def test_both_formats_on_both_stores(repository: Repository) -> None:
    values = {"encoder.weight": torch.randn(50, 40), "head.bias": torch.randn(40)}
    for group in (
        opened(repository, "m.pth", torch_file({"model": values, "step": 3}))["model"],
        opened(repository, "m.safetensors", save_safetensors(values)),
        opened(repository, "m.npz", npz(**{n: t.numpy() for n, t in values.items()})),
    ):
        assert isinstance(group, zarr.Group)
        assert set(group.array_keys()) == set(values)
        for name, tensor in values.items():
            same(group[name], tensor)


def test_views_ties_and_odd_shapes_of_torch(local: Repository) -> None:
    """Transposed, strided, expanded, overlapping, tied, single, empty."""
    base = torch.arange(24 * 30, dtype=torch.float32).reshape(24, 30)
    tensors = {
        "plain": base,
        "tied": base,
        "transposed": base.t(),
        "steps": base[3::4, 5:25:3],
        "permuted": base.reshape(4, 6, 30).permute(2, 0, 1),
        "expanded": torch.arange(5.0).expand(7, 5),
        "single": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "overlapping": torch.as_strided(base, (5, 4), (1, 1)),
    }
    group = opened(local, "views.ckpt", torch_file(tensors))
    assert set(group.array_keys()) == set(tensors)
    for name, tensor in tensors.items():
        same(group[name], tensor)
    with pytest.raises(KeyError):
        group["not there"]


def test_what_torch_changes_as_it_reads_is_not_shown(local: Repository) -> None:
    z = torch.tensor([1 + 2j])
    neg = torch.tensor([3 + 4j]).conj().imag
    group = opened(local, "lazy.pt", torch_file({"z": z, "conj": z.conj(), "neg": neg}))
    assert set(group.array_keys()) == {"z"}
    assert set(group.attrs["not_shown"]) == {"conj", "neg"}
    with pytest.raises(FormatError, match="'conj'.*as it reads them: conj"):
        group["conj"]


def test_npz_of_every_kind(local: Repository) -> None:
    """Column-major, big-endian, single, empty, compressed; the rest is refused by name."""
    values = {
        "plain": np.arange(12.0).reshape(3, 4),
        "fortran": np.asfortranarray(np.arange(24, dtype="i4").reshape(2, 3, 4)),
        "big": np.arange(5, dtype=">i4"),
        "big_fortran": np.asfortranarray(np.arange(6, dtype=">c16").reshape(2, 3)),
        "bool": np.array([True, False]),
        "single": np.array(7, "u2"),
        "empty": np.zeros((0, 2), "f2"),
    }
    odd = {
        "objects": np.array([None]),
        "text": np.array(["a"]),
        "time": np.array(0, "M8[s]"),
        "record": np.zeros(2, "i4,f4"),
    }
    for save in (np.savez, np.savez_compressed):
        group = opened(local, "a.npz", npz(save, **values, **odd))
        assert set(group.array_keys()) == set(values)
        for name, value in values.items():
            found = group[name]
            assert found.dtype == value.dtype.newbyteorder("<")
            np.testing.assert_array_equal(found[...], value)
        assert set(group.attrs["not_shown"]) == set(odd)
        for name in odd:
            with pytest.raises(FormatError, match=f"'{name}' of .*a.npz cannot be shown"):
                group[name]


def test_what_is_unpacked_is_bounded_and_checked(
    local: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = npz(np.savez_compressed, zeros=np.zeros(1 << 20, "u1"), small=np.ones(3))
    monkeypatch.setattr("castore.zarr_view.views.UNPACKED", 1 << 19)
    group = opened(local, "bomb.npz", big)
    assert "1048576 bytes unpacked" in group.attrs["not_shown"]["zeros"]
    np.testing.assert_array_equal(group["small"][:], 1)
    monkeypatch.undo()
    with zipfile.ZipFile(io.BytesIO(big)) as archive:
        at = archive.getinfo("small.npy").header_offset
        length = archive.getinfo("small.npy").compress_size
    data = bytearray(big)
    data[at + 60 + length // 2] ^= 0xFF
    try:
        array = opened(local, "damaged.npz", bytes(data))["small"]
    except FormatError:
        return  # the damage met the header
    with pytest.raises(FormatError, match="small.npy"):
        array[:]


@pytest.mark.parametrize("data", [b"", b"not a file of tensors", torch_file({"a": 1})[:50]])
def test_other_files_are_refused(local: Repository, data: bytes) -> None:
    with pytest.raises(FormatError):
        opened(local, "a.pt", data)
    with pytest.raises(NotFoundError, match=r"no file 'b\.pt'"):
        tensors_group(local, "latest", "b.pt")


class Evil:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_no_pickle_is_run(local: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    """Names and shapes come without torch, which is not even imported."""
    with pytest.raises(UntrustedPickleError):
        opened(local, "evil.pt", torch_file({"w": torch.ones(2), "evil": Evil()}))
    assert capsys.readouterr().out == ""
    name = local.commit(Draft({"m.pt": MemoryFile(torch_file({"w": torch.ones(2, 3)}))})).name
    code = (
        "import sys; from castore import Repository; from castore.zarr_view import tensors_group;"
        f"g = tensors_group(Repository.open({local.url!r}), {str(name)!r}, 'm.pt');"
        "print(g['w'].shape, g['w'][1].sum(), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split("\n")[0] == "(2, 3) 3.0 False"


# -- names


NAMES = st.lists(
    st.lists(
        st.one_of(
            st.sampled_from(["", ".", "..", "__a", "zarr.json", "ZARR.json", "c", "0", "a", "%2F"]),
            st.text(max_size=4),
        ),
        min_size=1,
        max_size=4,
    ).map("/".join),
    unique=True,
    max_size=12,
)


@given(NAMES)
@settings(deadline=None, max_examples=150)
def test_every_name_has_one_legal_path_of_its_own(names: list[str]) -> None:
    paths = node_paths(names)
    assert list(paths) == names
    assert len(set(paths.values())) == len(names)
    parts = [tuple(p.split("/")) for p in paths.values()]
    for one in parts:
        for element in one:
            assert element.strip("."), "not empty, not of periods only"
            assert not element.startswith("__")
            assert element.casefold() != "zarr.json"
            assert "\\" not in element
        assert not any(other != one and other[: len(one)] == one for other in parts)


@given(NAMES)
@settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_zarr_finds_every_name(local: Repository, names: list[str]) -> None:
    storable = [n for n in names if n != "__metadata__" and n.isprintable()]
    values = {n: np.full(3, i, "f4") for i, n in enumerate(storable)}
    group = opened(local, "a.safetensors", safetensors(values))
    for name, path in node_paths(storable).items():
        found = group[path]
        assert isinstance(found, zarr.Array)
        assert found.attrs["name"] == name
        np.testing.assert_array_equal(found[:], values[name])
    members = [m for _, m in group.members(max_depth=None) if isinstance(m, zarr.Array)]
    assert sorted(m.attrs["name"] for m in members) == sorted(storable)


def test_names_of_the_documentation(local: Repository) -> None:
    group = opened(
        local,
        "m.pt",
        torch_file({"net": {"encoder.weight": torch.ones(2)}, "opt": [torch.ones(1)]}),
    )
    assert sorted(group.group_keys()) == ["net", "opt"]
    assert list(group["net"].array_keys()) == ["encoder.weight"]
    assert list(group["opt"].array_keys()) == ["0"]
    alone = opened(local, "t.pt", torch_file(torch.arange(3)))
    assert list(alone.array_keys()) == ["%"]
    assert node_paths(["a", "a/b", "a/b/c"]) == {"a": "a", "a/b": "a%2Fb", "a/b/c": "a%2Fb%2Fc"}


# -- what is read


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_chunks_give_back_any_strided_array(data: Any) -> None:
    """Chunk by chunk, for shapes and strides of all kinds, with chunks of 4 KiB."""
    shape = tuple(data.draw(st.lists(st.integers(0, 20), max_size=4)))
    strides = tuple(data.draw(st.integers(0, 60)) for _ in shape)
    dtype = np.dtype(data.draw(st.sampled_from(["<f4", ">f4", "u1", "<c16"])))
    extent = 1 + sum(max(0, n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = np.arange(extent).astype(dtype)
    reads: list[int] = []

    def read(start: int, stop: int) -> bytes:
        assert 0 <= start < stop <= memory.nbytes
        reads.append(stop - start)
        return memory.tobytes()[start:stop]

    view = View("x", dtype.newbyteorder("<"), dtype, shape, strides, read)
    bytes_strides = [s * dtype.itemsize for s in strides]
    expected = np.lib.stride_tricks.as_strided(memory, shape, bytes_strides)
    found = np.zeros(shape, view.dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("castore.zarr_view.layout.TARGET", 4096)
        for index in np.ndindex(*view.grid):
            chunk = np.frombuffer(view.chunk(index), view.dtype).reshape(view.chunks)
            place = tuple(
                slice(i * c, min(i * c + c, n))
                for i, c, n in zip(index, view.chunks, shape, strict=True)
            )
            found[place] = chunk[tuple(slice(0, s.stop - s.start) for s in place)]
            assert chunk.nbytes <= 4096
        assert len(list(view.chunk_keys())) == len(reads)
    np.testing.assert_array_equal(found, expected)
    assert max(reads, default=0) <= 4096


def big_file(rows: int, columns: int) -> tuple[np.ndarray[Any, Any], bytes]:
    array = np.random.default_rng(0).integers(0, 2**15, (rows, columns), "u2")
    header = (
        f'{{"w":{{"dtype":"U16","shape":[{rows},{columns}],"data_offsets":[0,{array.nbytes}]}}}}'
    )
    return array, len(header).to_bytes(8, "little") + header.encode() + array.tobytes()


def test_a_slice_reads_only_its_blobs(local: Repository) -> None:
    """A tensor of 40 MiB in three blobs: a row costs one object, however many there are."""
    array, data = big_file(20, 1 << 20)
    name = local.commit(Draft({"w.safetensors": MemoryFile(data)})).name
    assert len(blobs(local, name, "w.safetensors")) == 4, "a header and three pieces of 16 MiB"
    counting = Counting(local.backend)
    seen = with_backend(local, counting)
    for rows, expected in (
        (slice(0, 1), 1),
        (slice(5, 8), 1),
        (slice(7, 9), 2),
        (slice(19, 20), 1),
    ):
        w = tensors_group(seen, name, "w.safetensors")["w"]
        assert w.chunks == (2, 1 << 20)
        counting.read.clear()
        np.testing.assert_array_equal(w[rows, :100], array[rows, :100])
        assert len(counting.read) == expected, rows
    counting.read.clear()
    w[18:20, 5]
    assert counting.read == [], "kept"


def test_column_slices_of_column_major_arrays_read_little(local: Repository) -> None:
    """The chunks follow what lies together: columns here, so that one column is one blob."""
    array = np.asfortranarray(np.random.default_rng(0).integers(0, 256, (1 << 20, 40), "u1"))
    name = local.commit(Draft({"a.npz": MemoryFile(npz(a=array))})).name
    assert len(blobs(local, name, "a.npz")) == 4
    counting = Counting(local.backend)
    a = tensors_group(with_backend(local, counting), name, "a.npz")["a"]
    assert a.chunks == (1 << 20, 4)
    counting.read.clear()
    np.testing.assert_array_equal(a[:, 20], array[:, 20])
    assert len(counting.read) == 1


# -- damage, pickles, writing


def test_a_lost_or_damaged_blob_is_an_error(repository: Repository) -> None:
    tensors = {"a": weights(seed=1), "b": weights(seed=2), "c": weights(seed=3)}
    name = repository.commit(Draft({"m.safetensors": MemoryFile(safetensors(tensors))})).name
    entry = repository.tree(name).entries["m.safetensors"]
    assert isinstance(entry, File)
    first, second, _ = [s.blob for s in entry.slices if s.length == weights().nbytes]
    repository.backend.delete(object_name(first))
    flip_object(repository, second)
    group = tensors_group(repository, name, "m.safetensors")
    with pytest.raises(ObjectNotFoundError, match=first):
        group["a"][:10]
    with pytest.raises(CorruptObjectError, match=second):
        group["b"][:10]
    np.testing.assert_array_equal(group["c"][:], tensors["c"])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_outage_is_never_a_malformed_file(save: Any) -> None:
    """Whenever it begins: while the file is described, or before a member is unpacked."""
    arrays = {"a": np.arange(50_000), "b": np.arange(9, dtype=">i8"), "c": weights()}
    data = npz(save, **arrays)
    for answers in range(1000):
        left = iter(range(answers))

        def read(start: int, stop: int, left: Any = left) -> bytes:
            if next(left, None) is None:
                raise BackendError("the store does not answer")
            return data[start:stop]

        try:
            found = read_contents(read, len(data), "a.npz")
            assert found.refused == {}
            for name, array in arrays.items():
                view = found.views[name]
                assert view.chunk((0,)) == array.astype(view.dtype).tobytes()
        except BackendError:
            continue
        break
    assert 5 < answers < 999


def test_it_is_read_only_and_pickles(local: Repository) -> None:
    group = opened(local, "m.pt", torch_file({"w": torch.ones(4, 2)}))
    with pytest.raises(ValueError, match="read.only"):
        group.create_array("x", shape=(1,), dtype="i4")
    with pytest.raises(ValueError, match="read.only"):
        group["w"][0] = 3
    again = pickle.loads(pickle.dumps(group))
    np.testing.assert_array_equal(again["w"][:], 1)
    assert again.store == group.store
    assert again.store != opened(local, "n.pt", torch_file({"w": torch.ones(4, 2)})).store


def test_the_store_lists_what_it_holds(local: Repository) -> None:
    array, data = big_file(5, 1 << 20)
    store = opened(local, "m.safetensors", data).store

    async def everything() -> list[str]:
        return [k async for k in store.list()]

    keys = sync(everything())
    assert keys == ["zarr.json", "w/zarr.json", "w/c/0/0", "w/c/1/0", "w/c/2/0"]
    for key in keys:
        value = sync(store.get(key, default_buffer_prototype()))
        assert value is not None and len(value) == sync(store.getsize(key))
        assert sync(store.exists(key))
    for key in ("w/c/3/0", "w/c/0", "w/c/00/0", "w/c/0/0/0", "x/zarr.json", "w/c", "w/.zarray", ""):
        assert sync(store.get(key, default_buffer_prototype())) is None, key
        assert not sync(store.exists(key))

    async def below(prefix: str) -> list[str]:
        return [k async for k in store.list_dir(prefix)]

    assert sync(below("")) == ["w", "zarr.json"]
    assert sync(below("w")) == ["c", "zarr.json"]
    assert sync(below("w/c")) == ["0", "1", "2"]
    assert TARGET == 4 << 20


def test_a_group_can_be_copied_into_a_store(local: Repository) -> None:
    """bfloat16 and float8 written, committed and read again in a process that has not seen them."""
    tensors = {"half": torch.randn(6, 4).bfloat16(), "eighth": torch.randn(9).to(torch.float8_e5m2)}
    source = opened(local, "m.safetensors", save_safetensors(tensors))
    store = SnapshotStore(local, "arrays")
    target = zarr.open_group(store, mode="w")
    for name in tensors:
        target.create_array(name, data=source[name][...], fill_value=1.5)
    name = store.commit()
    code = (
        "from castore import Repository; from castore.zarr_view import SnapshotStore; import zarr;"
        f"r = Repository.open({local.url!r}); s = SnapshotStore(r, snapshot={str(name)!r});"
        "g = zarr.open_group(s, mode='r'); print(*(g[n][...].tobytes().hex() for n in ('half',"
        "'eighth')), float(g['half'].fill_value))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == [*(raw(t).hex() for t in tensors.values()), "1.5"]
