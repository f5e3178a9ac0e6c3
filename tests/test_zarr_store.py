"""A zarr store whose commit is a snapshot: zarr's own suites, history, damage, two writers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import itertools
import multiprocessing
import os
import pickle
import secrets
import shutil
import threading
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from hypothesis.stateful import rule, run_state_machine_as_test
from zarr.core.buffer import Buffer, cpu
from zarr.core.sync import sync
from zarr.testing.stateful import ZarrHierarchyStateMachine, ZarrStoreStateMachine
from zarr.testing.store import StoreTests

from castore import (
    AlreadyExistsError,
    CorruptObjectError,
    Draft,
    InvalidInputError,
    MemoryFile,
    NotFoundError,
    ObjectNotFoundError,
    Repository,
)
from castore.objects import object_name
from castore.zarr_view import SnapshotStore
from tests.faults import Counting, Wrapped
from tests.helpers import blobs, contents, flip_object, new_repository, noise, with_backend


@pytest.fixture(params=["local", "s3"])
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> Repository:
    if request.param == "local":
        return Repository.init(tmp_path / "repository")
    options = request.getfixturevalue("s3_options")
    return Repository.init(request.getfixturevalue("s3_url"), storage_options=options)


def put(store: SnapshotStore, key: str, data: bytes) -> None:
    store.set_sync(key, cpu.Buffer.from_bytes(data))


def got(store: SnapshotStore, key: str) -> bytes | None:
    found = store.get_sync(key)
    return None if found is None else found.to_bytes()


def in_a_loop(cls: type[Any]) -> type[Any]:
    """Lets pytest run the suite's coroutines, each in a loop of its own."""
    for name in dir(cls):
        test = getattr(cls, name)
        if name.startswith("test_") and inspect.iscoroutinefunction(test):
            setattr(cls, name, _run(test))
    return cls


def _run(test: Any) -> Any:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class EachCommitted(SnapshotStore):
    """Every value is committed at once, so that all reading is from the repository."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._one_at_a_time = threading.Lock()

    def set_sync(self, key: str, value: Buffer) -> None:
        data = self._given(value)
        with self._one_at_a_time:
            self._working.write(key, data)
            self._working.commit({})
            assert self._working.staging.staged() == []


@in_a_loop
class TestSuite(StoreTests[SnapshotStore, cpu.Buffer]):
    """zarr's own suite; what its tests put in beside the store's methods is staged."""

    store_cls: type[SnapshotStore] = SnapshotStore
    buffer_cls = cpu.Buffer

    async def set(self, store: SnapshotStore, key: str, value: Buffer) -> None:
        store._working.write(key, value.to_bytes())

    async def get(self, store: SnapshotStore, key: str) -> Buffer:
        found = store._working.read(key, lambda size: (0, size))
        assert found is not None
        return self.buffer_cls.from_bytes(found)

    @pytest.fixture
    def store_kwargs(self, tmp_path: Path) -> dict[str, Any]:
        repository = new_repository("local", tmp_path)
        return {"repository": repository, "staging": tmp_path / "staging"}

    @pytest.fixture
    def store(self, store_kwargs: dict[str, Any]) -> SnapshotStore:
        return asyncio.run(self.store_cls.open(**store_kwargs))

    @pytest.fixture
    def store_not_open(self, store_kwargs: dict[str, Any]) -> SnapshotStore:
        return self.store_cls(**store_kwargs)

    def test_store_repr(self, store: SnapshotStore) -> None:
        assert repr(store).startswith("SnapshotStore('castore-zarr://")
        assert str(store).endswith("#main")

    def test_store_supports_writes(self, store: SnapshotStore) -> None:
        assert store.supports_writes

    def test_store_supports_listing(self, store: SnapshotStore) -> None:
        assert store.supports_listing


@in_a_loop
class TestSuiteCommitted(TestSuite):
    """The same on S3, where each value is committed before anything is read."""

    store_cls = EachCommitted

    async def set(self, store: SnapshotStore, key: str, value: Buffer) -> None:
        store.set_sync(key, value)

    @pytest.fixture
    def store_kwargs(  # type: ignore[override]
        self, tmp_path: Path, s3_url: str, s3_options: dict[str, Any]
    ) -> dict[str, Any]:
        repository = Repository.init(s3_url, storage_options=s3_options)
        return {"repository": repository, "staging": tmp_path / "staging"}


# -- zarr's state machines, with commits in between


class Values(ZarrStoreStateMachine):
    """Against a dict; a commit that a file system's rules for names forbid changes nothing."""

    @rule()
    def commit(self) -> None:
        commit(self.store.store)


class Hierarchies(ZarrHierarchyStateMachine):
    """Against a store in memory."""

    @rule()
    def commit(self) -> None:
        commit(self.store)


def commit(store: Any) -> None:
    with contextlib.suppress(InvalidInputError):
        store.commit()


@pytest.mark.filterwarnings("ignore:The data type:zarr.errors.UnstableSpecificationWarning")
@pytest.mark.parametrize(("machine", "kind"), [(Values, "local"), (Hierarchies, "memory")])
def test_zarrs_state_machines(machine: Any, kind: str, tmp_path: Path) -> None:
    """The same on S3 takes minutes and shows nothing that `TestSuite` does not."""
    count = itertools.count()

    def fresh() -> Any:
        return machine(SnapshotStore(new_repository(kind, tmp_path, f"r{next(count)}")))

    how = hypothesis.settings(
        max_examples=10,
        stateful_step_count=20,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(fresh, settings=how)


# -- history


def array(store: SnapshotStore, values: Any, chunks: tuple[int, ...]) -> zarr.Array[Any]:
    group = zarr.open_group(store, mode="a")
    return group.create_array("w", data=values, chunks=chunks, compressors=None, overwrite=True)


def test_each_commit_stays_readable(repository: Repository) -> None:
    """History: two snapshots of one array, the second with one chunk changed."""
    values = np.arange(8.0).reshape(4, 2)
    store = SnapshotStore(repository, "data")
    assert store.snapshot is None
    w = array(store, values, (2, 2))
    first = store.commit({"epoch": "1"})
    w[0, 0] = 100
    second = store.commit({"epoch": "2"})
    assert store.snapshot == second
    assert repository.snapshot(second).parents == (str(first),)
    assert repository.snapshot(second).labels == {"epoch": "2"}
    for name, expected in ((first, 0), (second, 100)):
        old = zarr.open_group(SnapshotStore(repository, snapshot=name, read_only=True), mode="r")
        assert old["w"][0, 0] == expected
        np.testing.assert_array_equal(old["w"][2:], values[2:])
    assert sorted(contents(repository, first)) == ["w/c/0/0", "w/c/1/0", "w/zarr.json", "zarr.json"]


def test_what_did_not_change_is_not_stored_again(tmp_path: Path) -> None:
    repository = new_repository("local", tmp_path)
    counting = Counting(repository.backend)
    store = SnapshotStore(with_backend(repository, counting), "data")
    w = array(store, np.frombuffer(noise(64 * 1024), "u1").reshape(16, 4096), (1, 4096))
    store.commit()
    counting.created.clear()
    w[3] = 7
    store.commit()
    objects = [n for n in counting.created if n.startswith("objects/")]
    assert len(objects) == 2, "one chunk, one tree"


def test_deleting_an_array_leaves_the_earlier_snapshot(repository: Repository) -> None:
    store = SnapshotStore(repository)
    array(store, np.ones((4, 2)), (2, 2))
    first = store.commit()
    del zarr.open_group(store, mode="a")["w"]
    assert not sync(store.exists("w/zarr.json"))
    second = store.commit()
    assert sorted(contents(repository, second)) == ["zarr.json"]
    put(store, "w/zarr.json", b"again")
    assert got(store, "w/zarr.json") == b"again"
    assert "w/c/0/0" in contents(repository, first)


def test_a_store_may_be_a_folder_of_a_snapshot(repository: Repository) -> None:
    other = Draft({"model.pt": MemoryFile(b"x"), "logs/a.zarr/zarr.json": MemoryFile(b"old")})
    before = repository.commit(other, namespace="run").name
    store = SnapshotStore(repository, "run", path="logs/a.zarr")
    assert got(store, "zarr.json") == b"old"
    put(store, "c/0", b"chunk")
    after = store.commit()
    assert contents(repository, after) == {
        **contents(repository, before),
        "logs/a.zarr/c/0": b"chunk",
    }
    with pytest.raises(NotFoundError, match=r"logs/b\.zarr"):
        SnapshotStore(repository, "run", path="logs/b.zarr", read_only=True)


# -- damage


def test_za1_a_lost_or_damaged_chunk_is_an_error_and_never_the_fill_value(
    repository: Repository,
) -> None:
    store = SnapshotStore(repository)
    group = zarr.open_group(store, mode="w")
    w = group.create_array(
        "w", shape=(6,), chunks=(2,), dtype="i4", fill_value=-1, compressors=None
    )
    w[:2], w[2:4] = 5, 6
    name = store.commit()
    lost, damaged = (blobs(repository, name, f"w/c/{i}")[0] for i in (0, 1))
    repository.backend.delete(object_name(lost))
    flip_object(repository, damaged)
    again = zarr.open_group(SnapshotStore(repository, snapshot=name, read_only=True), mode="r")["w"]
    np.testing.assert_array_equal(again[4:], [-1, -1])
    with pytest.raises(ObjectNotFoundError, match=lost):
        again[:2]
    with pytest.raises(CorruptObjectError, match=damaged):
        again[3]
    with pytest.raises((ObjectNotFoundError, CorruptObjectError)):
        again[:]


def test_lost_metadata_is_an_error_and_no_empty_store(tmp_path: Path) -> None:
    repository = new_repository("local", tmp_path)
    store = SnapshotStore(repository)
    array(store, np.ones(4), (2,))
    name = store.commit()
    repository.backend.delete(object_name(blobs(repository, name, "w/zarr.json")[0]))
    reading = SnapshotStore(repository, snapshot=name)
    with pytest.raises(ObjectNotFoundError):
        zarr.open_group(reading, mode="r")["w"]
    with pytest.raises(ObjectNotFoundError):
        zarr.open_array(reading, path="w", mode="a", shape=(2,), dtype="i4")
    assert reading._working.staging.staged() == []


# -- several writers


def test_a_commit_upon_what_is_no_longer_the_newest_is_refused(repository: Repository) -> None:
    start = SnapshotStore(repository, "data")
    put(start, "a", b"0")
    base = start.commit()
    mine, theirs = SnapshotStore(repository, "data"), SnapshotStore(repository, "data")
    put(mine, "b", b"mine")
    put(theirs, "c", b"theirs")
    second = theirs.commit()
    with pytest.raises(AlreadyExistsError, match=f"{base}.*{second}"):
        mine.commit()
    assert got(mine, "b") == b"mine"
    assert list(repository.snapshots("data")) == [second, base]
    branch = SnapshotStore(repository, "branch", snapshot=base)
    put(branch, "b", b"mine")
    assert contents(repository, branch.commit()) == {"a": b"0", "b": b"mine"}


class Overtaken(Wrapped):
    """Somebody else commits just before a snapshot is created."""

    def __init__(self, inner: Any, overtake: Any):
        super().__init__(inner)
        self.overtake = overtake

    def create(self, name: str, data: Any) -> Any:
        if name.startswith("snapshots/") and self.overtake is not None:
            overtake, self.overtake = self.overtake, None
            overtake()
        return self.inner.create(name, data)


def test_of_two_commits_at_one_moment_only_one_stays(repository: Repository) -> None:
    other = SnapshotStore(repository, "data")
    put(other, "a", b"other")
    racing = Overtaken(repository.backend, other.commit)
    mine = SnapshotStore(with_backend(repository, racing), "data")
    put(mine, "b", b"mine")
    with pytest.raises(AlreadyExistsError, match=r"data@"):
        mine.commit()
    assert racing.overtake is None
    assert list(repository.snapshots("data")) == [other.snapshot]
    assert got(mine, "b") == b"mine"


def write_row(store: SnapshotStore, row: int) -> None:
    zarr.open_group(store, mode="a")["w"][row] = row


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_that_share_a_folder_write_one_commit(tmp_path: Path, method: str) -> None:
    repository = new_repository("local", tmp_path)
    store = SnapshotStore(repository, staging=tmp_path / "staging")
    w = array(store, np.zeros((2, 3)), (1, 3))
    context = multiprocessing.get_context(method)
    workers = [context.Process(target=write_row, args=(store, i)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    expected = np.arange(2.0)[:, None] * np.ones(3)
    np.testing.assert_array_equal(w[:], expected)
    name = store.commit()
    reading = SnapshotStore(repository, snapshot=name, read_only=True)
    np.testing.assert_array_equal(zarr.open_group(reading, mode="r")["w"][:], expected)


def write_rows_of_a_shard(store: SnapshotStore, rows: list[int]) -> None:
    target = zarr.open_group(store, mode="a")["w"]
    for row in rows:
        while True:
            try:
                target[row] = row + 1
                break
            except AlreadyExistsError:
                continue


def sharded(store: SnapshotStore, rows: int) -> Any:
    group = zarr.open_group(store, mode="a")
    return group.create_array("w", shape=(rows, 4), chunks=(1, 4), shards=(rows, 4), dtype="f4")


def test_za3_writers_of_one_shard_lose_nothing(tmp_path: Path) -> None:
    """Threads and processes write parts of one shard, each of which reads and writes it all."""
    store = SnapshotStore(new_repository("local", tmp_path), staging=tmp_path / "staging")
    w = sharded(store, 24)
    context = multiprocessing.get_context("fork")
    workers: list[Any] = [
        context.Process(target=write_rows_of_a_shard, args=(store, list(range(i, 12, 2))))
        for i in range(2)
    ]
    workers += [
        threading.Thread(target=write_rows_of_a_shard, args=(store, list(range(12 + i, 24, 3))))
        for i in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    np.testing.assert_array_equal(w[:], (np.arange(24.0)[:, None] + 1) * np.ones(4))


def test_za3_a_value_that_changed_since_it_was_read_is_not_written_over(tmp_path: Path) -> None:
    store = SnapshotStore(new_repository("local", tmp_path))
    put(store, "a", b"0")

    async def change(data: bytes, between: str | None) -> None:
        await store.get("a")
        if between is not None:
            await asyncio.to_thread(put, store, "a", between.encode())
        await store.set("a", cpu.Buffer.from_bytes(data))
        await store.set("a", cpu.Buffer.from_bytes(data + b"!"))  # no longer upon what was read

    sync(change(b"1", None))
    assert got(store, "a") == b"1!"
    with pytest.raises(AlreadyExistsError, match="'a' was written by somebody else"):
        sync(change(b"2", "other"))
    assert got(store, "a") == b"other"

    async def remove() -> None:
        await store.get("a")
        await asyncio.to_thread(put, store, "a", b"again")
        await store.delete("a")

    with pytest.raises(AlreadyExistsError):
        sync(remove())
    assert got(store, "a") == b"again"


def test_writes_that_nobody_could_commit_are_refused(tmp_path: Path) -> None:
    """A copy of a store in another process, and a store that was committed by another one."""
    repository = new_repository("local", tmp_path)
    store = SnapshotStore(repository)
    with pytest.raises(InvalidInputError, match="staging=FOLDER"):
        pickle.dumps(store)
    _inherited[:] = [store]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert "staging=FOLDER" in pool.apply(_write_in_child, ())
    put(store, "a", b"1")
    with pytest.raises(InvalidInputError, match="staging=FOLDER"):
        pickle.dumps(store.with_read_only(True))
    folder = tmp_path / "staging"
    one = SnapshotStore(repository, "shared", staging=folder)
    two = SnapshotStore(repository, "shared", staging=folder)
    put(one, "a", b"1")
    assert got(two, "a") == b"1"
    two.commit()
    for use in (lambda: put(one, "b", b"2"), lambda: got(one, "a"), one.commit):
        with pytest.raises(InvalidInputError, match="committed meanwhile"):
            use()
    with pytest.raises(InvalidInputError, match="holds changes to"):
        SnapshotStore(repository, "elsewhere", staging=folder)


_inherited: list[SnapshotStore] = []


def _write_in_child() -> str:
    try:
        put(_inherited[0], "a", b"1")
    except InvalidInputError as e:
        return str(e)
    return "written"


def test_za2_a_killed_program_goes_on_where_it_was(tmp_path: Path) -> None:
    repository = new_repository("local", tmp_path)
    first = SnapshotStore(repository)
    put(first, "old", b"0")
    put(first, "gone", b"0")
    base = first.commit()
    child = multiprocessing.get_context("spawn").Process(
        target=_stage_and_die, args=(repository, tmp_path / "staging")
    )
    child.start()
    child.join(120)
    assert child.exitcode == -9
    assert list(repository.snapshots()) == [base]
    store = SnapshotStore(repository, staging=tmp_path / "staging")
    assert sync(_all(store)) == ["new", "old"]
    assert contents(repository, store.commit()) == {"new": b"1", "old": b"0"}


def _stage_and_die(repository: Repository, folder: Path) -> None:
    store = SnapshotStore(repository, staging=folder)
    put(store, "new", b"1")
    store.delete_sync("gone")
    os.kill(os.getpid(), 9)


async def _all(store: SnapshotStore) -> list[str]:
    return [k async for k in store.list()]


def test_of_many_that_set_a_new_key_one_does(tmp_path: Path) -> None:
    store = SnapshotStore(new_repository("local", tmp_path))

    async def race() -> None:
        values = [cpu.Buffer.from_bytes(b"%d" % i) for i in range(32)]
        await asyncio.gather(*(store.set_if_not_exists("k", v) for v in values))

    asyncio.run(race())
    winner = got(store, "k")
    asyncio.run(race())
    assert got(store, "k") == winner
    store.commit()
    asyncio.run(race())
    assert got(store, "k") == winner
    assert store._working.staging.staged() == []


def test_threads_that_write_first_at_once_lose_nothing(tmp_path: Path) -> None:
    """Each array that zarr makes begins so: its metadata and its group's, at one moment."""
    repository = new_repository("local", tmp_path)
    for _ in range(40):
        store, start = SnapshotStore(repository), threading.Barrier(8)

        def write(key: str, store: SnapshotStore = store, start: Any = start) -> None:
            start.wait()
            put(store, key, key.encode())

        threads = [threading.Thread(target=write, args=(f"k{i}",)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store._working.keys() == [f"k{i}" for i in range(8)]


def test_what_changes_while_a_commit_runs_stays_staged(tmp_path: Path) -> None:
    """Values and deletions by others of the store: none is lost, none is refused."""
    inner = new_repository("local", tmp_path)
    backend = Overtaken(inner.backend, None)
    repository = with_backend(inner, backend)
    store = SnapshotStore(repository)
    for key in ("kept", "old", "gone"):
        put(store, key, b"1")
    store.commit()
    for key in ("new", "short"):
        put(store, key, b"1")

    def change() -> None:
        put(store, "old", b"2")
        put(store, "new", b"2")
        put(store, "late", b"2")
        for key in ("gone", "short"):
            store.delete_sync(key)

    backend.overtake = change
    made = store.commit()
    assert set(contents(repository, made)) == {"kept", "old", "gone", "new", "short"}
    assert store._working.keys() == ["kept", "late", "new", "old"]
    after = {"kept": b"1", "late": b"2", "new": b"2", "old": b"2"}
    assert contents(repository, store.commit()) == after
    assert store._working.staging.staged() == []


def test_of_two_threads_that_commit_one_store_one_is_refused(tmp_path: Path) -> None:
    """The later one would undo what the other took up since."""
    inner = new_repository("local", tmp_path)
    backend = Overtaken(inner.backend, None)
    store = SnapshotStore(with_backend(inner, backend))
    put(store, "k", b"1")
    store.commit()
    put(store, "k", b"2")

    def other() -> None:
        put(store, "k", b"3")
        store.commit()

    backend.overtake = other
    with pytest.raises(AlreadyExistsError, match="nothing was committed"):
        store.commit()
    assert [contents(inner, n)["k"] for n in inner.snapshots()] == [b"3", b"1"]
    assert got(store, "k") == b"3"


def test_threads_go_on_writing_while_one_commits(tmp_path: Path) -> None:
    store = SnapshotStore(new_repository("local", tmp_path), staging=tmp_path / "staging")
    failed: list[BaseException] = []

    def write() -> None:
        try:
            for i in range(60):
                put(store, f"k{i % 7}", b"%d" % i)
                assert got(store, f"k{i % 7}") == b"%d" % i
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=write)
    thread.start()
    while thread.is_alive():
        with contextlib.suppress(InvalidInputError):  # "... changed while it was read"
            store.commit()
    thread.join()
    assert failed == []
    last = {f"k{i % 7}": b"%d" % i for i in range(60)}
    assert contents(store.repository, store.commit()) == last


# -- names, leftovers, secrets


@pytest.mark.parametrize("key", ["a\\b", "a//b", "../a", "x" * 255, "a\nb", "\ud800", ""])
def test_a_key_that_no_snapshot_holds_is_refused_at_once(tmp_path: Path, key: str) -> None:
    store = SnapshotStore(new_repository("local", tmp_path))
    with pytest.raises(InvalidInputError):
        put(store, key, b"1")
    assert got(store, key) is None
    assert not sync(store.exists(key))
    store.delete_sync(key)


def test_names_that_collide_are_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    """A key may begin another while staged (zarr's suites do so), not in a snapshot."""
    repository = new_repository("local", tmp_path)
    store = SnapshotStore(repository)
    for other in ("A", "a/b"):
        put(store, "a", b"1")
        put(store, other, b"2")
        with pytest.raises(InvalidInputError, match="'a'|'A'"):
            store.commit()
        assert (got(store, "a"), got(store, other)) == (b"1", b"2")
        store.delete_sync(other)
    assert contents(repository, store.commit()) == {"a": b"1"}


def test_an_uncommitted_store_leaves_no_trace(tmp_path: Path) -> None:
    repository = new_repository("local", tmp_path)
    store = SnapshotStore(repository)
    put(store, "a", b"1")
    folder = store._working.staging.folder
    assert folder is not None and folder.is_dir()
    store.close()
    assert got(store, "a") == b"1"
    store.discard()
    assert got(store, "a") is None
    put(store, "a", b"1")
    del store
    gc.collect()
    assert not folder.exists()
    assert list(repository.snapshots()) == []


def test_marks_of_a_deletion_do_not_outlive_their_base(tmp_path: Path) -> None:
    """A crash between a commit and the tidying of its staging folder: a key that was deleted and
    written again is there."""
    repository = new_repository("local", tmp_path)
    store = SnapshotStore(repository, staging=tmp_path / "staging")
    put(store, "k", b"1")
    store.commit()
    store.delete_sync("k")
    put(store, "k", b"2")
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "staging" / "gone", kept)
    store.commit()
    shutil.copytree(kept, tmp_path / "staging" / "gone")
    again = SnapshotStore(repository, staging=tmp_path / "staging")
    assert got(again, "k") == b"2"
    assert contents(repository, again.commit()) == {"k": b"2"}


def test_it_pickles_without_secrets(s3server: Any, tmp_path: Path) -> None:
    url = f"s3://{s3server.bucket}/{secrets.token_hex(8)}"
    options = s3server.fsspec_options()
    repository = Repository.init(url, storage_options=options)
    store = SnapshotStore(repository, staging=tmp_path / "staging")
    put(store, "a", b"1")
    data = pickle.dumps(store)
    for secret in (options["key"], options["secret"]):
        assert secret.encode() not in data
        assert secret not in repr(store) + str(store)


# -- xarray


def dataset(days: int, start: str) -> xr.Dataset:
    values = np.arange(days * 3.0).reshape(days, 3)
    time = pd.date_range(start, periods=days)
    data = {"t": (("time", "x"), values), "mask": ("x", np.array([True, False, True]))}
    return xr.Dataset(data, {"time": time, "x": [1, 2, 3]}, {"title": "weather"})


@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
@pytest.mark.parametrize("consolidated", [True, False])
def test_xarray_writes_appends_and_opens(repository: Repository, consolidated: bool) -> None:
    whole = dataset(6, "2026-01-01")
    first, more = whole.isel(time=slice(4)), whole.isel(time=slice(4, 6))
    store = SnapshotStore(repository, "weather")
    first.to_zarr(store, consolidated=consolidated, mode="w")
    xr.testing.assert_identical(xr.open_zarr(store, consolidated=consolidated).load(), first)
    before = store.commit()
    more.drop_vars(["mask", "x"]).to_zarr(store, append_dim="time", consolidated=consolidated)
    after = store.commit()
    for name, expected in ((before, first), (after, whole)):
        reading = SnapshotStore(repository, snapshot=name, read_only=True)
        found = xr.open_zarr(reading, consolidated=consolidated)
        xr.testing.assert_identical(found.load(), expected)
    with pytest.raises(ValueError, match="read.only"):
        first.to_zarr(reading, mode="a", consolidated=consolidated)


def test_xarray_meets_damage_as_an_error(tmp_path: Path) -> None:
    repository = new_repository("local", tmp_path)
    store = SnapshotStore(repository)
    dataset(4, "2026-01-01").to_zarr(store, consolidated=False)
    name = store.commit()
    flip_object(repository, blobs(repository, name, "t/c/0/0")[0])
    reading = SnapshotStore(repository, snapshot=name, read_only=True)
    with pytest.raises(CorruptObjectError):
        xr.open_zarr(reading, consolidated=False)["t"].load()
