"""The programs that people reach ``castore://`` with, each the real one."""

from __future__ import annotations

import io
import json
import os
import struct
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import numpy as np
import pandas as pd
import pyarrow.dataset
import pyarrow.parquet
import pytest
import safetensors
import torch
import zarr
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from safetensors.torch import load as load_safetensors
from torch.utils.data import DataLoader, Dataset
from zarr.storage import FsspecStore

from castore.errors import CorruptObjectError, ObjectNotFoundError
from castore.filesystem import CastoreFileSystem
from castore.objects import object_name
from castore.repository import Repository
from castore.source import Draft, scan
from tests.faults import Counting
from tests.helpers import blobs, flip_object, weights, with_backend
from tests.helpers import safetensors as written
from tests.stores import Store, commit, new_store

TABLE = pd.DataFrame({"step": range(5000), "loss": np.linspace(3, 0.1, 5000), "tag": "ä"})


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return new_store(request, tmp_path, request.param)


@pytest.fixture
def tables(store: Store) -> Store:
    parquet = io.BytesIO()
    TABLE.to_parquet(parquet, row_group_size=1000)
    half = io.BytesIO()
    TABLE[:100].to_parquet(half)
    content = {
        "a/t 1.parquet": parquet.getvalue(),
        "a/t 2.parquet": half.getvalue(),
        "t.csv": TABLE.to_csv(index=False).encode(),
    }
    commit(store.repository, content)
    return store


def test_pandas_reads_parquet_and_csv(tables: Store) -> None:
    url, options = "castore://me/latest", tables.options
    pd.testing.assert_frame_equal(
        pd.read_parquet(f"{url}/a/t 1.parquet", storage_options=options), TABLE
    )
    some = pd.read_parquet(f"{url}/a/t 1.parquet", columns=["loss"], storage_options=options)
    pd.testing.assert_frame_equal(some, TABLE[["loss"]])
    pd.testing.assert_frame_equal(pd.read_csv(f"{url}/t.csv", storage_options=options), TABLE)
    with pytest.raises(OSError, match="castore:// is read-only"):
        TABLE.to_csv(f"{url}/new.csv", storage_options=options)


def test_pyarrow_reads_a_dataset(tables: Store) -> None:
    fs = tables.fs()
    read = pyarrow.parquet.read_table("me/latest/a/t 1.parquet", filesystem=fs, columns=["step"])
    assert read.num_rows == 5000
    data = pyarrow.dataset.dataset("me/latest/a", filesystem=fs, format="parquet")
    assert data.count_rows() == 5100
    assert data.to_table(filter=pyarrow.dataset.field("step") < 5).num_rows == 10


def test_duckdb_reads_through_a_registered_file_system(tables: Store) -> None:
    url = "castore://me/latest"
    with duckdb.connect() as connection:
        connection.register_filesystem(tables.fs())

        def ask(source: str) -> Any:
            found = connection.execute(f"SELECT count(*), sum(step) FROM {source}").fetchone()
            assert found is not None
            return found

        whole, part = (5000, sum(range(5000))), (100, sum(range(100)))
        assert ask(f"'{url}/a/t 1.parquet'") == whole
        assert ask(f"'{url}/a/*.parquet'") == (whole[0] + part[0], whole[1] + part[1])
        assert ask(f"read_csv('{url}/t.csv')") == whole
        assert ask(f"'{url}/a/t 1.parquet' WHERE step < 100") == part


def test_duckdb_reads_a_database_of_a_snapshot(store: Store, tmp_path: Path) -> None:
    with duckdb.connect(tmp_path / "x.duckdb") as made:
        made.execute("CREATE TABLE t AS SELECT range AS i FROM range(1000)")
    commit(store.repository, {"x.duckdb": (tmp_path / "x.duckdb").read_bytes()})
    with duckdb.connect() as connection:
        connection.register_filesystem(store.fs())
        connection.execute("ATTACH 'castore://me/latest/x.duckdb' AS x (READ_ONLY)")
        assert connection.execute("SELECT sum(i) FROM x.t").fetchone() == (499500,)


# -- weights


def test_torch_loads_weights_from_an_open_file(store: Store) -> None:
    state = {"w": torch.randn(300, 300), "b": torch.arange(5, dtype=torch.bfloat16)}
    data = io.BytesIO()
    torch.save(state, data)
    commit(store.repository, {"m.pt": data.getvalue()})
    with fsspec.open("castore://me/latest/m.pt", **store.options) as f:
        loaded = torch.load(f, weights_only=True)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[k], state[k]) for k in state)


def test_one_tensor_of_a_safetensors_file_by_its_header_and_a_range(store: Store) -> None:
    """The recipe of safetensors' own documentation: length, header, then the bytes of a tensor."""
    arrays = {f"layer.{i}": weights(seed=i) for i in range(5)}
    data = written(arrays)
    at = commit(store.repository, {"m.safetensors": data})
    names = [object_name(b) for b in blobs(store.repository, "me@latest", "m.safetensors")]
    backend = Counting(store.repository.backend)
    fs = CastoreFileSystem.of(with_backend(store.repository, backend))
    path = f"{at}/m.safetensors"
    fs.info(path)
    backend.read.clear()
    (length,) = struct.unpack("<Q", fs.cat_file(path, 0, 8))
    header = json.loads(fs.cat_file(path, 8, 8 + length))
    spans = [header[k]["data_offsets"] for k in ("layer.1", "layer.3")]
    got = fs.cat_ranges(
        [path] * 2, [8 + length + a for a, _ in spans], [8 + length + b for _, b in spans]
    )
    assert got == [arrays["layer.1"].tobytes(), arrays["layer.3"].tobytes()]
    assert sorted(backend.read) == sorted([names[0], names[2], names[4]])
    whole = load_safetensors(fs.cat_file(path))
    assert all(np.array_equal(whole[k].numpy(), arrays[k]) for k in arrays)


def test_safetensors_opens_a_copy(store: Store, tmp_path: Path) -> None:
    commit(store.repository, {"m.safetensors": written({"w": weights()})})
    store.fs().get("me/latest/m.safetensors", str(tmp_path / "m.safetensors"))
    with safetensors.safe_open(tmp_path / "m.safetensors", "numpy") as f:
        assert np.array_equal(f.get_tensor("w"), weights())


class Tensors(Dataset[torch.Tensor]):
    """Tensors of one file, each read by its range when it is asked for."""

    def __init__(self, fs: Any, path: str, count: int, size: int):
        self.fs, self.path, self.count = fs, path, count
        self.begin, self.size = fs.size(path) - count * size, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> torch.Tensor:
        first = self.begin + i * self.size
        data = bytearray(self.fs.cat_file(self.path, first, first + self.size))
        return torch.frombuffer(data, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_workers_of_a_data_loader_read(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    if kind == "s3":
        request.getfixturevalue("s3_env")
    url = str(tmp_path / "store") if kind == "local" else request.getfixturevalue("s3_url")
    arrays = {f"t{i}": weights(seed=i) for i in range(6)}
    at = commit(Repository.init(url), {"w": written(arrays)})
    fs = fsspec.filesystem("castore", repository=url)
    data = Tensors(fs, f"{at}/w", 6, arrays["t0"].nbytes)
    loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")
    got = torch.cat(list(loader)).numpy()
    assert np.array_equal(got, np.stack(list(arrays.values())))


# -- zarr


@pytest.fixture
def chunked(store: Store, tmp_path: Path) -> tuple[Store, np.ndarray[Any, Any]]:
    """A zarr group that was written to disk and committed as files."""
    values = np.random.default_rng(0).standard_normal((40, 10_000)).astype("f4")
    group = zarr.open_group(str(tmp_path / "z.zarr"), mode="w")
    group.create_array("x", shape=values.shape, chunks=(10, 10_000), dtype="f4")[:] = values
    group.create_array("holes", shape=(4,), chunks=(2,), dtype="i4", fill_value=7)[:2] = 1
    store.repository.commit(Draft(scan([tmp_path / "z.zarr"])), namespace="me")
    return store, values


def test_zarr_opens_a_committed_store(chunked: tuple[Store, np.ndarray[Any, Any]]) -> None:
    store, values = chunked
    opened = FsspecStore.from_url(
        "castore://me/latest", storage_options=store.options, read_only=True
    )
    group = zarr.open_group(opened, mode="r")
    assert sorted(group.array_keys()) == ["holes", "x"]
    assert np.array_equal(group["x"][:], values)
    assert np.array_equal(group["x"][3:17, 100:200], values[3:17, 100:200])
    assert list(group["holes"][:]) == [1, 1, 7, 7]
    by_url = zarr.open("castore://me/latest/x", mode="r", storage_options=store.options)
    assert by_url[39, 9_999] == values[39, 9_999]
    with pytest.raises((OSError, ValueError), match="read-only"):
        group.create_array("new", shape=(1,), dtype="i4")


def test_a_chunk_that_is_damaged_or_lost_is_an_error_and_no_fill_value(
    chunked: tuple[Store, np.ndarray[Any, Any]],
) -> None:
    store, values = chunked
    paths = [p for p in store.repository.tree("me@latest").entries if p.startswith("x/c/")]
    damaged, lost = (blobs(store.repository, "me@latest", p)[-1] for p in paths[:2])
    flip_object(store.repository, damaged)
    store.repository.backend.delete(object_name(lost))
    fs = CastoreFileSystem.of(store.repository)
    asynchronous = AsyncFileSystemWrapper(fs, asynchronous=True)
    opened = FsspecStore(asynchronous, read_only=True, path="me/latest/x")
    array = zarr.open_array(opened, mode="r")
    with pytest.raises(CorruptObjectError):
        array[:10]
    with pytest.raises(ObjectNotFoundError):
        array[10:20]
    assert np.array_equal(array[20:], values[20:])


def test_files_are_copied_by_fsspecs_own_tools(store: Store, tmp_path: Path) -> None:
    commit(store.repository, {"a/1": b"one", "2": b"two"})
    source = store.fs()
    source.get("me/latest", str(tmp_path / "copy"), recursive=True)
    assert (tmp_path / "copy/a/1").read_bytes() == b"one"
    cached = fsspec.filesystem(
        "filecache", fs=source, cache_storage=str(tmp_path / "cache"), check_files=True
    )
    assert cached.cat("me/latest/2") == b"two"
    commit(store.repository, {"2": b"new"})
    assert cached.cat("me/latest/2") == b"new"
    assert len(os.listdir(tmp_path / "cache")) >= 2
