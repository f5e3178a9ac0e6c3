"""``castore://``: finding, reading, damage, caches, processes; on a local disk and on S3."""

from __future__ import annotations

import errno
import io
import itertools
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests
from hypothesis import given, settings
from hypothesis import strategies as st

from castore.cache import Cache
from castore.digest import digest_of
from castore.errors import (
    BackendError,
    CorruptObjectError,
    InvalidInputError,
    ObjectNotFoundError,
    RepositoryNotFoundError,
)
from castore.filesystem import CastoreFileSystem
from castore.objects import object_name
from castore.repository import Repository
from castore.snapshot import Snapshot, name_of
from castore.source import MemoryFile, SourceEntry
from castore.testing.faulty import Call, FaultyBackend
from castore.tree import Folder, Link
from tests.faults import Counting, Outage
from tests.helpers import (
    blobs,
    draft,
    flip_object,
    folder,
    memory_url,
    noise,
    overwrite,
    safetensors,
    weights,
    with_backend,
)
from tests.stores import Store, commit, new_store

ODD = ["sp ace", "x#y", "a?b", "lr[1e-3]", "50%", "ünï", "st*r", "a::b"]


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return new_store(request, tmp_path, request.param)


@pytest.fixture
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return new_store(request, tmp_path, "local")


def counted(repository: Repository, **more: Any) -> tuple[CastoreFileSystem, Counting]:
    backend = Counting(repository.backend)
    return CastoreFileSystem.of(with_backend(repository, backend), **more), backend


def tensors(n: int = 6) -> bytes:
    """A safetensors file whose header and ``n`` tensors of 80 kB are blobs of their own."""
    return safetensors({f"t{i}": weights(seed=i) for i in range(n)})


# -- fsspec's own suite


SCENARIOS = [
    "_bulk_operations_scenario_0",
    "_glob_edge_cases_files",
    "_dir_and_file_with_same_name_prefix",
    "_10_files_with_hashed_names",
]


@pytest.fixture(scope="module", params=["local", "s3"])
def scenarios(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, dict[str, str]]:
    """A file system, and where in it lies each folder that fsspec's suite asks for, by name."""
    folder, made = tmp_path_factory.mktemp("scenarios"), LocalFileSystem(auto_mkdir=True)
    options: dict[str, Any] = {"repository": str(folder / "store")}
    if request.param == "s3":
        server = request.getfixturevalue("s3server")
        options["repository"] = f"s3://{server.bucket}/{os.urandom(8).hex()}"
        options["repository_options"] = server.fsspec_options()
    repository = Repository.init(
        options["repository"], storage_options=options.get("repository_options")
    )
    suite, found = AbstractFixtures(), {}
    for name in SCENARIOS:
        getattr(suite, name)(made, os.path.join, str(folder / name))
        snapshot = repository.commit([folder / name], namespace="get").name
        found[name] = f"get/{snapshot.id}/source"
    return fsspec.filesystem("castore", **options), found


class TestGet(AbstractFixtures, AbstractGetTests):  # type: ignore[misc]
    """What fsspec asks of every file system that can be read from.

    Its other suites (copy, put, pipe, open, mv) begin by writing to the file system under test.
    """

    @pytest.fixture
    def fs(self, scenarios: tuple[Any, dict[str, str]]) -> Any:
        return scenarios[0]

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def fs_bulk_operations_scenario_0(self, scenarios: tuple[Any, dict[str, str]]) -> str:
        return scenarios[1]["_bulk_operations_scenario_0"]

    @pytest.fixture
    def fs_glob_edge_cases_files(self, scenarios: tuple[Any, dict[str, str]]) -> str:
        return scenarios[1]["_glob_edge_cases_files"]

    @pytest.fixture
    def fs_dir_and_file_with_same_name_prefix(self, scenarios: tuple[Any, dict[str, str]]) -> str:
        return scenarios[1]["_dir_and_file_with_same_name_prefix"]

    @pytest.fixture
    def fs_10_files_with_hashed_names(self, scenarios: tuple[Any, dict[str, str]]) -> str:
        return scenarios[1]["_10_files_with_hashed_names"]

    @pytest.fixture
    def fs_committing(self, fs: Any) -> Any:
        """The same file system, whose ``touch`` commits a snapshot with that file."""

        class Committing(CastoreFileSystem):
            def mkdir(self, path: Any, create_parents: bool = True, **_: Any) -> Any:
                """A folder comes with its file."""

            def touch(self, path: Any, truncate: bool = True, **_: Any) -> Any:
                namespace, _latest, below = str(path).split("/", 2)
                self._lookup.repository.commit(draft({below: b""}), namespace=namespace)

        return Committing(**fs.storage_options, skip_instance_cache=True)

    def test_get_directory_recursive(
        self,
        fs_committing: Any,
        fs_join: Any,
        local_fs: Any,
        local_join: Any,
        local_target: Any,
    ) -> None:
        super().test_get_directory_recursive(
            fs_committing, fs_join, "recursive/latest", local_fs, local_join, local_target
        )


# -- finding


CONTENT: dict[str, bytes | SourceEntry] = {
    "a.txt": b"hello\nworld\n",
    "deep/er/b.bin": b"12345",
    "deep/run.sh": MemoryFile(b"#!/bin/sh\n", executable=True),
    "none": b"",
    "hollow": Folder(),
    "to-file": Link("deep/er/../er/b.bin"),
    "to-folder": Link("deep"),
    "deep/up": Link("../a.txt"),
    "out": Link("../elsewhere"),
    "absolute": Link("/etc/passwd"),
    "self": Link("self"),
    "here": Link("."),
}


def test_what_a_snapshot_holds_is_found(store: Store) -> None:
    at, fs = commit(store.repository, CONTENT), store.fs()
    top = [*(p for p in CONTENT if "/" not in p), "deep"]
    assert fs.ls(at, detail=False) == sorted(f"{at}/{p}" for p in top)
    files = ["a.txt", "deep/er/b.bin", "deep/run.sh", "deep/up", "none", "to-file"]
    links = ["absolute", "here", "out", "self", "to-folder"]
    assert fs.find(at) == sorted(f"{at}/{p}" for p in files + links)
    assert fs.find(f"{at}/deep/er/b.bin") == [f"{at}/deep/er/b.bin"]
    assert fs.find(at, maxdepth=1, withdirs=True)[0] == at
    assert fs.glob(f"{at}/**/*.bin") == [f"{at}/deep/er/b.bin"]
    assert fs.glob("me/latest/*.txt") == ["me/latest/a.txt"]
    assert fs.glob("me/*/a.txt") == [f"{at}/a.txt"]
    assert fs.du(at) == 12 + 5 + 10 + 12 + 5
    assert fs.du(f"{at}/deep", total=False)[f"{at}/deep/er/b.bin"] == 5
    walked = list(fs.walk(f"{at}/deep"))
    assert walked == [(f"{at}/deep", ["er"], ["run.sh", "up"]), (f"{at}/deep/er", [], ["b.bin"])]
    assert list(fs.walk(f"{at}/deep", topdown=False)) == walked[::-1]
    assert fs.isdir(f"{at}/hollow") and fs.ls(f"{at}/hollow") == []


def test_walk_goes_where_the_caller_lets_it(local: Store) -> None:
    commit(local.repository, CONTENT)
    seen = []
    for at, folders, _ in local.fs().walk("me/latest"):
        seen.append(at)
        if "deep" in folders:
            folders.remove("deep")
    assert seen == ["me/latest", "me/latest/hollow"]


def test_info_tells_size_digest_and_time(store: Store) -> None:
    name = store.repository.commit(draft(CONTENT), namespace="me").name
    fs = store.fs()
    info = fs.info(f"castore://me/{name.id}/deep/run.sh")
    entry = store.repository.tree(name).entries["deep/run.sh"]
    assert info["sha256"] == entry.sha256 == fs.ukey("me/latest/deep/run.sh")  # type: ignore[union-attr]
    assert (info["size"], info["type"], info["mode"]) == (10, "file", 0o555)
    assert info["snapshot"] == str(name)
    when = datetime.fromtimestamp(name.time / 1e6, UTC)
    assert info["modified"] == fs.modified("me/latest") == fs.created("me") == when
    assert fs.info("me/latest/a.txt")["mode"] == 0o444
    assert fs.info("")["type"] == fs.info("me")["type"] == fs.info("me/latest")["type"]
    for listed in fs.ls("me/latest"):
        if not listed.get("islink"):
            assert listed == fs.info(listed["name"])


def test_links_are_followed_within_their_snapshot_alone(store: Store) -> None:
    commit(store.repository, CONTENT)
    fs = store.fs()
    assert fs.cat("me/latest/to-file") == b"12345"
    assert fs.cat("me/latest/deep/up") == fs.cat("me/latest/to-folder/up") == CONTENT["a.txt"]
    assert fs.ls("me/latest/to-folder", detail=False)[0] == "me/latest/to-folder/er"
    assert fs.info("me/latest/to-file")["destination"] == "deep/er/../er/b.bin"
    assert fs.isdir("me/latest/to-folder") and fs.isfile("me/latest/to-file")
    for path in ("out", "absolute", "self"):
        info = fs.info(f"me/latest/{path}")
        assert (info["type"], info["size"], info["islink"]) == ("link", 0, True)
        assert not fs.isfile(f"me/latest/{path}") and fs.lexists(f"me/latest/{path}")
        with pytest.raises(IsADirectoryError, match="leads to no file"):
            fs.cat_file(f"me/latest/{path}")
    assert fs.find("me/latest/here/here/deep/er") == ["me/latest/here/here/deep/er/b.bin"]


def test_a_copy_is_what_checkout_writes(store: Store, tmp_path: Path) -> None:
    content = {**CONTENT, **{f"odd/{name}/{name}.bin": name.encode() for name in ODD}}
    at = commit(store.repository, content)
    store.fs().get(at, str(tmp_path / "got"), recursive=True)
    got = folder(tmp_path / "got")
    assert got.pop("to-file") == b"12345" and got.pop("deep/up") == CONTENT["a.txt"]
    wanted = {k: v.data if isinstance(v, MemoryFile) else v for k, v in content.items()}
    assert got == {k: v for k, v in wanted.items() if k not in ("to-file", "deep/up")}


def test_any_name_stands_for_itself(store: Store) -> None:
    content = {f"{name}/{name}": name.encode() for name in ODD}
    at, fs = commit(store.repository, content), store.fs()
    assert fs.find(at) == sorted(f"{at}/{p}" for p in content)
    for path, data in content.items():
        with fs.open(f"castore://{at}/{path}") as f:
            assert f.read() == data
        assert fs.cat(f"{at}/{path}") == fs.cat_file(f"{at}/{path}") == data
        if "::" not in path:  # fsspec takes that apart before any file system sees it
            with fsspec.open(f"castore://me/latest/{path}", **store.options) as f:
                assert f.read() == data
    assert fs.glob(f"{at}/lr*/*") == [f"{at}/lr[1e-3]/lr[1e-3]"]


def test_a_snapshot_has_many_names(store: Store) -> None:
    repository, fs = store.repository, store.fs()
    first = repository.commit(
        draft({"n": b"1"}, labels={"step": "1/2", "a=b": "c d", "kind": "x"}), namespace="me"
    ).name
    second = repository.commit(draft({"n": b"2"}, labels={"kind": "x"}), namespace="me").name
    spelled = [first.id, first.id[:6], first.name, "step=1%2F2", "a%3Db=c d", "a%3Db=c%20d"]
    for part in spelled:
        assert fs.cat(f"me/{part}/n") == b"1"
        assert fs.info(f"me/{part}")["snapshot"] == str(first)
    for part in ("latest", second.id, "kind=x"):
        assert fs.cat(f"me/{part}/n") == b"2"
    assert fs.ls("me", detail=False) == sorted([f"me/{first.id}", f"me/{second.id}"])
    for part in ("latest", "kind=x"):
        assert f"me/{part}" not in fs.ls("me", detail=False)


def test_namespaces_are_folders(store: Store) -> None:
    for namespace in ("b", "a.x", "a"):
        store.repository.commit(draft({"f": namespace.encode()}), namespace=namespace)
    fs = store.fs()
    assert [i["name"] for i in fs.ls("castore://")] == ["a", "a.x", "b"]
    assert fs.cat(fs.glob("*/*/f")) == {p: p.split("/")[0].encode() for p in fs.find("")}


def test_slashes_around_a_path_do_not_count(local: Store, tmp_path: Path) -> None:
    commit(local.repository, CONTENT)
    fs = local.fs()
    for path in ("/me/latest/deep/", "castore:///me/latest/deep", "me/latest/deep//"):
        assert fs.find(path) == fs.find("me/latest/deep")
    fs.get("/me/latest/deep/er/", f"{tmp_path}/got", recursive=True)
    assert os.listdir(tmp_path / "got") == ["b.bin"]


MISSING = ["me/latest/no", "me/latest/a.txt/no", "me/latest/deep/er/no", "me/abcd", "me/no", "no"]
MISSING += ["me/step=9/a.txt", "me/0123456789abcdef/a.txt", "no/latest/a.txt", "a b/c", "../x/y"]
MISSING += ["me/latest/../../x", "me/latest/out/x", "me/latest/self/x", "me/latest/absolute/x"]


@pytest.mark.parametrize("path", MISSING)
def test_what_is_not_there_is_not_found(local: Store, path: str) -> None:
    commit(local.repository, CONTENT)
    fs = local.fs()
    assert not fs.exists(path) and not fs.isfile(path) and not fs.isdir(path)
    assert fs.find(path) == []
    for look in (fs.info, fs.ls, fs.open, fs.cat_file, lambda p: fs.get_file(p, "nowhere")):
        with pytest.raises(FileNotFoundError, match="castore://"):
            look(path)
    with pytest.raises(FileNotFoundError):
        list(fs.walk(path, on_error="raise"))
    assert not os.path.exists("nowhere")


def test_a_beginning_that_several_ids_have_names_them(local: Store) -> None:
    tree = local.repository.commit(draft({"n": b""}), namespace="other").snapshot.tree
    seen: dict[str, bytes] = {}
    for i in itertools.count():
        data = Snapshot(tree, i, "me").encode()
        begin = digest_of(data)[:4]
        if begin in seen:
            break
        seen[begin] = data
    for time, document in enumerate((data, seen[begin])):
        name = name_of(document, "me", "snapshot", time)
        local.repository.backend.create(name.path, document)
    with pytest.raises(FileNotFoundError, match="names 2 snapshots"):
        local.fs().info(f"me/{begin}")


# -- as of now


def test_what_changes_is_looked_up_anew(store: Store) -> None:
    first, fs = commit(store.repository, {"n": b"1"}), store.fs()
    with fs.open("me/latest/n") as held:
        assert fs.cat("me/latest/n") == b"1" and fs.ls("", detail=False) == ["me"]
        second = commit(store.repository, {"n": b"22"})
        store.repository.commit(draft({"n": b"3"}), namespace="other")
        assert store.fs() is fs
        assert fs.cat("me/latest/n") == b"22" and fs.size("me/latest/n") == 2
        assert fs.ls("me", detail=False) == sorted([first, second])
        assert fs.ls("", detail=False) == ["me", "other"]
        assert held.read() == b"1"
    store.repository.forget("me@latest")
    assert fs.cat("me/latest/n") == b"1" and fs.ls("me", detail=False) == [first]


def test_a_namespace_whose_last_snapshot_was_forgotten_is_none(store: Store) -> None:
    commit(store.repository, {"n": b"1"})
    gone = store.repository.commit(draft({"n": b"2"}), namespace="gone").name
    store.repository.backend.create(f"snapshots/gone/0{gone.name[1:]}", b"")  # a fence stays
    store.repository.forget(gone)
    fs = store.fs()
    assert fs.ls("", detail=False) == ["me"] == [i["name"] for i in fs.ls("")]
    assert not fs.exists("gone") and len(fs.find("")) == 1


def test_what_is_forgotten_between_two_steps_is_looked_up_again(local: Store) -> None:
    repository = local.repository
    first = commit(repository, {"n": b"1"}, labels={"k": "v"})
    second = repository.commit(draft({"n": b"2"}, labels={"k": "v"}), namespace="me").name

    def forget(call: Call) -> None:
        if call == Call("get", second.path):
            repository.forget(second)

    for path in ("me/latest/n", "me/k=v/n"):
        backend = FaultyBackend(repository.backend, hook=forget)
        fs = CastoreFileSystem.of(with_backend(repository, backend))
        assert fs.cat(path) == b"1"
        second = repository.unforget(second)
    backend = FaultyBackend(repository.backend, hook=forget)
    fs = CastoreFileSystem.of(with_backend(repository, backend))
    assert fs.ls("me", detail=False)[0].startswith("me/")
    with pytest.raises(FileNotFoundError):
        fs.cat(f"me/{second.id}/n")
    assert fs.cat(f"{first}/n") == b"1"


def test_a_walk_is_of_one_moment(local: Store) -> None:
    commit(local.repository, {"a/1": b"", "b/1": b""})
    seen = []
    for at, _, files in local.fs().walk("me/latest"):
        seen.append((at, files))
        commit(local.repository, {"a/2": os.urandom(8)})
    assert seen == [("me/latest", []), ("me/latest/a", ["1"]), ("me/latest/b", ["1"])]


def test_the_environment_names_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = fsspec.filesystem("castore")
    monkeypatch.delenv("CASTORE_REPOSITORY", raising=False)
    with pytest.raises(InvalidInputError, match="CASTORE_REPOSITORY"):
        fs.ls("")
    for name in ("one", "two"):
        commit(Repository.init(tmp_path / name), {"n": name.encode()})
        monkeypatch.setenv("CASTORE_REPOSITORY", str(tmp_path / name))
        assert fs.cat("me/latest/n") == name.encode()
    with pytest.raises(RepositoryNotFoundError):
        fsspec.filesystem("castore", repository=str(tmp_path / "none")).ls("")


# -- reading


def test_a_ranged_read_fetches_the_blobs_it_touches(store: Store) -> None:
    data = tensors()
    at = commit(store.repository, {"w.safetensors": data})
    names = [object_name(b) for b in blobs(store.repository, "me@latest", "w.safetensors")]
    assert len(names) == 7
    fs, backend = counted(store.repository)
    path = f"{at}/w.safetensors"
    fs.info(path)
    backend.read.clear()
    begin = len(data) - 3 * 80_000
    assert fs.cat_file(path, begin + 8, begin + 80) == data[begin + 8 : begin + 80]
    assert backend.read == [names[4]]
    assert fs.cat_file(path, begin + 79_990, begin + 80_010) == data[begin + 79_990 :][:20]
    assert backend.read == [names[4], names[5]]
    backend.read.clear()
    with fs.open(path) as f:
        f.seek(-10, os.SEEK_END)
        assert f.read() == data[-10:]
    assert backend.read == [names[6]]


def test_many_ranges_fetch_each_blob_once(store: Store) -> None:
    data = tensors()
    at = commit(store.repository, {"w": data, "small": b"0123456789"})
    fs, backend = counted(store.repository, cache_bytes=0)
    begin = len(data) - 80_000 * 6
    spans = [
        (begin + i * 80_000 + k * 100, begin + i * 80_000 + k * 100 + 50)
        for k in range(3)
        for i in range(6)
    ]
    fs.info(at)
    backend.read.clear()
    got = fs.cat_ranges([f"{at}/w"] * len(spans), *map(list, zip(*spans, strict=True)))
    assert got == [data[a:b] for a, b in spans]
    assert len(backend.read) == len(set(backend.read)) == 6
    mixed = fs.cat_ranges(
        [f"{at}/small", f"{at}/no", f"{at}/small", f"{at}/small"], [-4, 0, None, 8], [-1, 1, 2, 3]
    )
    assert [mixed[0], *mixed[2:]] == [b"678", b"01", b""]
    assert isinstance(mixed[1], FileNotFoundError)
    assert fs.cat_ranges([f"{at}/small"] * 2, 2, 4) == [b"23"] * 2
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges([f"{at}/no"], [0], [1], on_error="raise")
    with pytest.raises(ValueError, match="2 bounds for 1 paths"):
        fs.cat_ranges([f"{at}/small"], [0, 1], [1, 2])


FILES = {
    "tensors": tensors(3) + b"tail",
    "plain": noise(5_000),
    "tiny": b"x",
    "empty": b"",
    "many": safetensors({f"s{i}": weights(50, i) for i in range(40)}),
}


@pytest.fixture(scope="module")
def various() -> Any:
    repository = Repository.init(memory_url())
    commit(repository, FILES)
    return CastoreFileSystem.of(repository, cache_bytes=100_000)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(FILES)),
    st.none() | st.integers(-300_000, 300_000),
    st.none() | st.integers(-300_000, 300_000),
)
def test_any_range_is_what_a_slice_of_the_bytes_is(
    various: Any, name: str, start: int | None, end: int | None
) -> None:
    path = f"me/latest/{name}"
    assert various.cat_file(path, start, end) == FILES[name][start:end]
    assert various.cat_ranges([path], [start], [end]) == [FILES[name][start:end]]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(FILES)),
    st.lists(st.tuples(st.integers(0, 250_000), st.integers(-1, 100_000)), max_size=8),
    st.sampled_from(["none", "readahead", "bytes", "all"]),
)
def test_an_open_file_reads_like_one_in_memory(
    various: Any, name: str, steps: list[tuple[int, int]], cache: str
) -> None:
    plain = io.BytesIO(FILES[name])
    with various.open(f"me/latest/{name}", block_size=7_000, cache_type=cache) as f:
        assert f.size == len(FILES[name])
        for at, count in steps:
            assert f.seek(at) == plain.seek(at)
            assert f.read(count) == plain.read(count)
            assert f.tell() == plain.tell()


def test_text_lines_and_compression(store: Store) -> None:
    import gzip

    commit(store.repository, {"a.txt": "ä\nb\n\nc".encode(), "z.gz": gzip.compress(b"zipped")})
    fs = store.fs()
    with fs.open("me/latest/a.txt", "r") as f:
        assert list(f) == ["ä\n", "b\n", "\n", "c"]
    with fs.open("me/latest/z.gz", compression="infer") as f:
        assert f.read() == b"zipped"
    assert fs.read_text("me/latest/a.txt") == "ä\nb\n\nc"
    assert (fs.head("me/latest/a.txt", 2), fs.tail("me/latest/a.txt", 1)) == ("ä".encode(), b"c")
    assert fs.cat(["me/latest/a.txt"]) == {"me/latest/a.txt": "ä\nb\n\nc".encode()}


def test_a_folder_is_no_file(local: Store) -> None:
    commit(local.repository, CONTENT)
    for path in ("me/latest", "me/latest/deep", "me/latest/to-folder"):
        with pytest.raises(IsADirectoryError):
            local.fs().open(path)


def test_mapper_shows_a_folder_as_a_dictionary(local: Store) -> None:
    commit(local.repository, {"a/b": b"1", "c": b"2"})
    mapper = local.fs().get_mapper("castore://me/latest")
    assert dict(mapper) == {"a/b": b"1", "c": b"2"}


# -- damage and outages


def test_damage_is_refused_and_nothing_else(store: Store, tmp_path: Path) -> None:
    data = tensors(3)
    at = commit(store.repository, {"w": data, "sound": b"sound"})
    victim = blobs(store.repository, "me@latest", "w")[2]
    flip_object(store.repository, victim)
    fs = store.fs()
    bad, good = len(data) - 2 * 80_000, len(data) - 80_000
    with pytest.raises(CorruptObjectError, match=victim):
        fs.cat_file(f"{at}/w", bad, bad + 4)
    with fs.open(f"{at}/w") as f, pytest.raises(CorruptObjectError):
        f.read()
    got = fs.cat_ranges([f"{at}/w"] * 2, [bad, good], [bad + 4, good + 4])
    assert isinstance(got[0], CorruptObjectError) and got[1] == data[good : good + 4]
    with pytest.raises(CorruptObjectError):
        fs.get(at, str(tmp_path / "got"), recursive=True)
    assert "w" not in os.listdir(tmp_path / "got")
    assert not [n for n in os.listdir(tmp_path / "got") if n.endswith(".part")]
    assert fs.cat(f"{at}/sound") == b"sound"


def test_a_file_that_is_there_stays_when_its_copy_fails(local: Store, tmp_path: Path) -> None:
    at = commit(local.repository, {"w": b"new"})
    flip_object(local.repository, blobs(local.repository, "me@latest", "w")[0])
    (tmp_path / "w").write_bytes(b"old")
    with pytest.raises(CorruptObjectError):
        local.fs().get(f"{at}/w", str(tmp_path / "w"))
    assert (tmp_path / "w").read_bytes() == b"old"


@pytest.mark.parametrize("cut", [1, 30, -1])
def test_a_truncated_object_is_refused(store: Store, cut: int) -> None:
    at = commit(store.repository, {"w": noise(200)})
    name = object_name(blobs(store.repository, "me@latest", "w")[0])
    frame = store.repository.backend.get(name)
    overwrite(store.repository, name, frame[:-cut] if cut > 0 else b"")
    with pytest.raises(CorruptObjectError):
        store.fs().cat_file(f"{at}/w", 0, 1)


def test_a_lost_object_is_never_a_missing_file(store: Store) -> None:
    """Whoever takes a missing file for a fill value (zarr does) must not meet one here."""
    at = commit(store.repository, {"w": b"data"})
    store.repository.backend.delete(object_name(blobs(store.repository, "me@latest", "w")[0]))
    with pytest.raises(ObjectNotFoundError) as caught:
        store.fs().cat_file(f"{at}/w")
    assert not isinstance(caught.value, OSError | KeyError)


def test_a_damaged_tree_or_document_is_never_an_empty_folder(local: Store) -> None:
    name = local.repository.commit(draft({"w": b"data"}), namespace="me").name
    flip_object(local.repository, local.repository.snapshot(name).tree)
    fs, at = local.fs(), f"me/{name.id}"
    for look in (fs.ls, fs.find, fs.exists, fs.isdir, fs.info, fs.glob, lambda p: list(fs.walk(p))):
        with pytest.raises(CorruptObjectError):
            look(at if look != fs.glob else f"{at}/*")
    overwrite(local.repository, name.path, b"{}")
    with pytest.raises(CorruptObjectError):
        CastoreFileSystem.of(local.repository).exists(at)


def test_an_outage_is_never_an_empty_folder(local: Store) -> None:
    commit(local.repository, {"w": b"data"})
    outage = Outage(local.repository.backend, lambda call, name: True)
    fs = CastoreFileSystem.of(with_backend(local.repository, outage))
    for path in ("", "me", "me/latest", "me/latest/w"):
        for look in (fs.ls, fs.find, fs.exists if path else fs.ls, lambda p: list(fs.walk(p))):
            with pytest.raises(BackendError):
                look(path)
    for look in (fs.isdir, fs.isfile):
        with pytest.raises(BackendError):
            look("me/latest/w")
    outage.on = False
    assert fs.cat("me/latest/w") == b"data"


# -- read-only


def test_every_write_says_the_same(local: Store, tmp_path: Path) -> None:
    at, fs = commit(local.repository, {"w": b"data"}), local.fs()
    (tmp_path / "f").write_bytes(b"x")
    new, old, disk = f"{at}/new", f"{at}/w", str(tmp_path / "f")
    writes: list[Callable[[], Any]] = [
        lambda: fs.open(new, "wb"),
        lambda: fs.open(new, "w"),
        lambda: fs.open(old, "ab"),
        lambda: fs.open(new, "xb"),
        lambda: fs.pipe(new, b""),
        lambda: fs.pipe({new: b""}),
        lambda: fs.pipe_file(new, b""),
        lambda: fs.write_text(new, ""),
        lambda: fs.write_bytes(new, b""),
        lambda: fs.touch(new),
        lambda: fs.put(disk, new),
        lambda: fs.put_file(disk, new),
        lambda: fs.upload(disk, new),
        lambda: fs.mkdir(new),
        lambda: fs.makedirs(new),
        lambda: fs.mkdirs(new),
        lambda: fs.rmdir(at),
        lambda: fs.rm(old),
        lambda: fs.rm_file(old),
        lambda: fs.delete(old),
        lambda: fs.mv(old, new),
        lambda: fs.rename(old, new),
        lambda: fs.cp(old, new),
        lambda: fs.copy(old, new),
        lambda: fs.cp_file(old, new),
        fs.start_transaction,
        lambda: fs.get_mapper(at).__setitem__("k", b""),
    ]
    for i, write in enumerate(writes):
        with pytest.raises(OSError, match="castore:// is read-only") as caught:
            write()
        assert caught.value.errno == errno.EROFS, i
    assert fs.find(at) == [old] and fs.cat(old) == b"data"


# -- caches


def test_decoded_blobs_are_kept_up_to_a_bound(store: Store) -> None:
    data = tensors(8)
    at = commit(store.repository, {"w": data})
    fs, backend = counted(store.repository, cache_bytes=250_000)
    begin = len(data) - 8 * 80_000
    fs.info(f"{at}/w")

    def fetched(i: int) -> int:
        backend.read.clear()
        assert fs.cat_file(f"{at}/w", begin + i * 80_000, begin + i * 80_000 + 9)
        assert fs.cached <= 250_000
        return len(backend.read)

    assert [fetched(i) for i in range(8)] == [1] * 8
    assert [fetched(i) for i in (7, 6, 5)] == [0] * 3
    assert fetched(0) == 1
    assert [fetched(i) for i in (6, 0, 5)] == [0] * 3
    assert fetched(7) == 1


def test_small_reads_of_one_large_blob_fetch_it_once(local: Store) -> None:
    at = commit(local.repository, {"w": noise(300_000)})
    fs, backend = counted(local.repository, cache_bytes=1)
    with fs.open(f"{at}/w") as f:
        backend.read.clear()
        while f.read(10_000):
            pass
    assert len(backend.read) == 1 and fs.cached == 300_000


def test_trees_and_documents_are_read_once(store: Store) -> None:
    at = commit(store.repository, CONTENT)
    fs, backend = counted(store.repository)
    for _ in range(3):
        fs.find(at)
        fs.find("me/latest")
        fs.info(f"{at}/a.txt")
    assert len(backend.read) == 2  # one document, one tree


def test_threads_that_want_one_blob_fetch_it_once(local: Store) -> None:
    at = commit(local.repository, {"w": noise(300_000)})
    gate = threading.Barrier(8)
    fs, backend = counted(local.repository)
    fs.info(f"{at}/w")
    backend.read.clear()

    def read(i: int) -> bytes:
        gate.wait()
        return bytes(fs.cat_file(f"{at}/w", i, i + 100))

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(read, range(8)))
    assert got == [noise(300_000)[i : i + 100] for i in range(8)]
    assert len(backend.read) == 1


def test_a_failed_make_is_tried_again_and_an_interrupted_one_by_who_waits() -> None:
    cache: Cache[str, int] = Cache(10, lambda v: v)
    with pytest.raises(ZeroDivisionError):
        cache.get("k", lambda: 1 // 0)
    assert cache.get("k", lambda: 3) == 3
    under_way, waiting = threading.Event(), threading.Event()

    def interrupted() -> int:
        under_way.set()
        waiting.wait(60)
        raise KeyboardInterrupt

    def first() -> None:
        with pytest.raises(KeyboardInterrupt):
            cache.get("other", interrupted)

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first)
        under_way.wait(60)
        two = pool.submit(cache.get, "other", lambda: 5)
        waiting.set()
        one.result(60)
        assert two.result(60) == 5
    assert cache.weight == 8
    assert cache.get("large", lambda: 11) == 11 and cache.weight == 11


# -- processes


def _read(task: tuple[Any, str, int]) -> bytes:
    fs, path, at = task
    return bytes(fs.cat_file(path, at, at + 1000))


def _read_open(file: Any) -> bytes:
    return bytes(file.read())


@pytest.fixture
def by_environment(request: pytest.FixtureRequest, tmp_path: Path) -> Repository:
    """A repository whose URL and environment are enough, as for a pickled file system."""
    if request.param == "local":
        return Repository.init(tmp_path / "store")
    request.getfixturevalue("s3_env")
    return Repository.init(request.getfixturevalue("s3_url"))


@pytest.mark.parametrize(
    ("by_environment", "method"),
    [("local", "fork"), ("s3", "fork"), ("local", "spawn")],
    indirect=["by_environment"],
)
def test_processes_read_at_once(by_environment: Repository, method: str) -> None:
    data = tensors(4)
    at = commit(by_environment, {"w": data})
    fs = fsspec.filesystem("castore", repository=by_environment.url)
    assert fs.cat_file(f"{at}/w", 0, 4) == data[:4]  # connections and caches are warm
    held = fs.open(f"{at}/w")
    held.seek(len(data) - 100_000)
    starts = range(0, len(data), len(data) // 12)
    with multiprocessing.get_context(method).Pool(2) as pool:
        got = pool.map(_read, [(fs, f"{at}/w", i) for i in starts], chunksize=1)
        assert pool.apply(_read_open, [held]) == data[-100_000:]
    assert got == [data[i : i + 1000] for i in starts]
    assert held.read(5) == data[len(data) - 100_000 :][:5]


@pytest.mark.parametrize("by_environment", ["local", "s3"], indirect=True)
def test_a_child_forked_in_the_middle_of_reads_goes_on(by_environment: Repository) -> None:
    """Locks that threads of the parent hold at the fork are nobody's in the child."""
    data = tensors(4)
    at = commit(by_environment, {"w": data})
    fs = CastoreFileSystem.of(by_environment, cache_bytes=0)
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            fs.cat_file(f"{at}/w", 0, 200_000)

    threads = [threading.Thread(target=busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if fs.cat_file(f"{at}/w", 5, 200_000) == data[5:200_000] else 1)
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_pickle_holds_no_secret(store: Store) -> None:
    at = commit(store.repository, {"w": b"data"})
    secret = "s3cr3t-words"
    options = {"key": secret, "secret": secret, "client_kwargs": {"endpoint_url": "http://x:1"}}
    fs = fsspec.filesystem("castore", repository="s3://bucket/x", repository_options=options)
    file = store.fs().open(f"{at}/w")
    with_login = CastoreFileSystem(f"ftp://me:{secret}@host/store")
    shown = [pickle.dumps(o) for o in (fs, with_login)]
    shown += [fs.to_json().encode(), with_login.to_json().encode(), repr(fs).encode()]
    named = ["apikey", "pwd", "passphrase", "connection_string", "cookies", "sas_token", "auth"]
    odd = CastoreFileSystem("abfs://c/x", repository_options=dict.fromkeys(named, secret))
    shown += [pickle.dumps(odd), odd.to_json().encode()]
    for text in shown:
        assert secret.encode() not in text
    assert b"http://x:1" in shown[0]
    for name in ("key", "secret"):
        value = store.options.get("repository_options", {}).get(name, "of S3 alone")
        assert value.encode() not in pickle.dumps(file)


def test_a_closed_file_is_not_pickled(local: Store) -> None:
    at = commit(local.repository, {"w": b"data"})
    with local.fs().open(f"{at}/w") as file:
        assert pickle.loads(pickle.dumps(file)).read() == b"data"
    with pytest.raises(ValueError, match="closed"):
        pickle.dumps(file)


def test_json_brings_a_file_system_back(local: Store) -> None:
    commit(local.repository, {"w": b"data"})
    again = fsspec.AbstractFileSystem.from_json(local.fs().to_json())
    assert again.cat("me/latest/w") == b"data" and again == local.fs()
    loaded = pickle.loads(pickle.dumps(CastoreFileSystem.of(local.repository, cache_bytes=7)))
    assert loaded.cat("me/latest/w") == b"data"


# -- layouts


def test_a_snapshot_of_a_driver_that_is_not_there_is_shown_as_it_is(local: Store) -> None:
    at = commit(local.repository, {"w": b"data"}, driver="nobody")
    fs = local.fs()
    assert fs.ls("me", detail=False) == [at] and fs.cat(f"{at}/w") == b"data"
    assert not fs.exists("me/checkpoints")


DRIVER = """
from castore.driver import Shown

class Shows:
    name = "shows"

    def view(self, repository, namespace):
        newest = next(repository.snapshots(namespace))
        if "bad" in repository.tree(newest).entries:
            return {"latest/x": Shown(lambda: b"", 0)}
        def count():
            with open(COUNT, "a") as f:
                f.write("x")
            return b"made of " + newest.id.encode()
        files = {p: Shown(lambda f=f: f, newest.time) for p, f in repository.tree(newest).files()}
        return {**files, "made/it": Shown(count, newest.time, newest.id)}

    collect = materialize = verify = None
"""


@pytest.fixture
def shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed driver that shows its newest tree, and a file that it makes and counts."""
    site = tmp_path / "site"
    info = site / "shows-1.dist-info"
    info.mkdir(parents=True)
    count = tmp_path / "count"
    (site / "shows_driver.py").write_text(f"COUNT = {str(count)!r}\n{DRIVER}")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shows\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[castore.drivers]\nshows = shows_driver:Shows\n")
    monkeypatch.syspath_prepend(str(site))
    return count


def test_a_layout_is_shown_as_its_driver_tells_it(local: Store, shows: Path) -> None:
    at, fs = commit(local.repository, {"a/w": b"data"}, driver="shows"), local.fs()
    assert fs.ls("me", detail=False) == [at, "me/a", "me/made"]
    assert fs.cat("me/a/w") == b"data" and fs.find("me/made") == ["me/made/it"]
    for _ in range(3):
        made = fs.cat("me/made/it")
        assert made == b"made of " + at.removeprefix("me/").encode()
        assert (
            fs.cat_file("me/made/it", 5, 7) == fs.cat_ranges(["me/made/it"], [5], [7])[0] == b"of"
        )
    assert shows.read_text() == "x"
    held = fs.open("me/made/it")
    commit(local.repository, {"a/w": b"more", "b": b""}, driver="shows")
    assert fs.cat("me/a/w") == b"more" and fs.exists("me/b") and fs.cat("me/made/it") != made
    assert (
        held.read() == made == pickle.loads(pickle.dumps(held)).fs.open("me/made/it").read(0) + made
    )


def test_a_layout_stays_when_something_else_is_committed(local: Store, shows: Path) -> None:
    """A plain commit beside an experiment's saves takes no layout away."""
    first, fs = commit(local.repository, {"a/w": b"data"}, driver="shows"), local.fs()
    kept = [commit(local.repository, {"a/w": b"%d" % i}) for i in range(3)]
    commit(local.repository, {"x": b""}, driver="nobody")
    assert {"me/made", first, *kept} < set(fs.ls("me", detail=False))
    assert fs.find("me/made") == ["me/made/it"] and fs.cat("me/latest/x") == b""


def test_a_damaged_snapshot_leaves_no_layout_in_doubt(local: Store, shows: Path) -> None:
    """Where the one that could have a layout cannot be read, none is told to be missing."""
    commit(local.repository, {"a/w": b"data"}, driver="shows")
    name = next(local.repository.snapshots("me"))
    commit(local.repository, {"x": b""})
    overwrite(local.repository, name.path, b"{}")
    with pytest.raises(CorruptObjectError):
        local.fs().exists("me/a/w")
    assert local.fs().exists("me/latest/x")


def test_a_layout_that_hides_a_snapshot_is_refused(local: Store, shows: Path) -> None:
    commit(local.repository, {"bad": b""}, driver="shows")
    with pytest.raises(InvalidInputError, match="'latest/x', which names a snapshot"):
        local.fs().ls("me")
    assert local.fs().exists("me/latest/bad")
