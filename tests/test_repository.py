"""A repository's life: made, opened, written, read, named; on each kind of store."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from castore import document
from castore.backends import open_backend
from castore.copy import copy
from castore.errors import (
    AlreadyExistsError,
    BackendError,
    CastoreError,
    CorruptObjectError,
    FormatError,
    InvalidInputError,
    NotFoundError,
    ObjectNotFoundError,
    RepositoryNotFoundError,
    SnapshotNotFoundError,
)
from castore.objects import object_name
from castore.prune import prune
from castore.repository import Repository
from castore.snapshot import Snapshot, name_of
from castore.source import Draft, MemoryFile, scan
from castore.tree import File, Folder, Link
from castore.usage import usage
from tests.faults import Counting, Outage
from tests.helpers import (
    ODD_ROOTS,
    blobs,
    clocked,
    contents,
    draft,
    flip,
    flip_object,
    folder,
    lay,
    memory_url,
    new_repository,
    new_url,
    noise,
    overwrite,
    problems,
    raw,
    safetensors,
    series,
    weights,
    with_backend,
)

EVERYTHING: dict[str, Any] = {
    "empty": b"",
    "small": b"x",
    "weights.safetensors": series(1)[0],
    "run.sh": MemoryFile(b"#!/bin/sh\n", executable=True),
    "deep/er/and/deeper": noise(300),
    "no files/in here": Folder(),
    "link": Link("deep/er"),
    "dangling": Link("../../nowhere"),
    "out": Link("/etc/passwd"),
    "ünï cödé/日本語 🎈": b"1",
    "e\u0301": b"decomposed",
    "%2e%2e": b"2",
    "a#?;*[1]": b"3",
    " spaces ": b"4",
    "C:x": b"5",
}


@pytest.fixture(params=["local", "memory", "s3"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any] | None]:
    """URL and options of a place without a repository, on each kind of store."""
    if request.param != "s3":
        return new_url(request.param, tmp_path), None
    try:
        url = request.getfixturevalue("s3_url")
    except pytest.FixtureLookupError:
        pytest.skip("conftest.py has no S3 server")
    return f"{url}/store", request.getfixturevalue("s3_options")


kinds = pytest.mark.parametrize("kind", ["local", "memory"])


# -- life


def test_init_open_and_refuse(opened: tuple[str, dict[str, Any] | None]) -> None:
    url, options = opened
    with pytest.raises(RepositoryNotFoundError, match="castore init"):
        Repository.open(url, storage_options=options)
    made = Repository.init(url, storage_options=options)
    again = Repository.open(url, storage_options=options)
    assert again.id == made.id
    assert len(made.id) == 32
    assert list(again.snapshots()) == again.namespaces() == []
    with pytest.raises(AlreadyExistsError, match="holds a repository"):
        Repository.init(url, storage_options=options)
    assert Repository.open(url, storage_options=options).id == made.id


def test_a_round_trip_of_everything(
    opened: tuple[str, dict[str, Any] | None], tmp_path: Path
) -> None:
    url, options = opened
    repository = Repository.init(url, storage_options=options)
    lay(tmp_path / "run", EVERYTHING)
    commit = repository.commit([tmp_path / "run"], namespace="me", labels={"a": "b"})
    assert commit.added > 0
    again = Repository.open(url, storage_options=options)
    assert again.namespaces() == ["me"]
    assert list(again.snapshots()) == list(again.snapshots("me")) == [commit.name]
    snapshot = again.snapshot(commit.name)
    assert snapshot == commit.snapshot
    assert (snapshot.labels, snapshot.files) == ({"a": "b"}, 11)
    assert contents(again, commit.name) == EVERYTHING
    assert again.read(commit.name, "small") == b"x"
    again.checkout(commit.name, tmp_path / "copy", sha256=True)
    assert folder(tmp_path / "copy") == EVERYTHING
    second = again.commit([tmp_path / "copy"], namespace="me")
    assert second.added == 0
    assert second.snapshot.tree == commit.snapshot.tree
    assert problems(again) == []


@pytest.mark.parametrize("name", ODD_ROOTS)
def test_s37_odd_root_names_are_taken_literally(
    name: str, opened: tuple[str, dict[str, Any] | None], tmp_path: Path
) -> None:
    url, options = opened
    root = f"{url}/{name}"
    if "://" not in url:
        lay(Path(url), {"lr1/decoy": b"", "axb/decoy": b""})
    repository = Repository.init(root, storage_options=options)
    lay(tmp_path / "src" / name, {"a[1]": b"1", "b?": b"2"})
    commit = repository.commit([tmp_path / "src" / name])
    again = Repository.open(root, storage_options=options)
    assert again.resolve("latest") == commit.name
    again.checkout("latest", tmp_path / "out" / name)
    assert folder(tmp_path / "out" / name) == {"a[1]": b"1", "b?": b"2"}
    assert problems(again) == []
    again.forget(commit.name)
    assert list(again.snapshots()) == []


@kinds
def test_init_refuses_a_place_that_holds_something_else(kind: str, tmp_path: Path) -> None:
    url = new_url(kind, tmp_path)
    backend = open_backend(url)
    backend.prepare(shared=False)
    backend.create("photo.jpg", b"holiday")
    with pytest.raises(AlreadyExistsError, match=r"something else \(photo.jpg\)"):
        Repository.init(url)
    assert [s.name for s in backend.list("")] == ["photo.jpg"]


def test_open_tells_a_file_and_a_folder_without_repository(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    for path in ("file", "folder", "file/below", "nothing/at/all"):
        with pytest.raises(RepositoryNotFoundError):
            Repository.open(tmp_path / path)
    with pytest.raises(CastoreError):
        Repository.init(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"x"


@kinds
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (
            document.encode("config", {"hash": "blake3-256", "id": "x"}).replace(b":1", b":2"),
            "upgrade",
        ),
        (document.encode("config", {"hash": "sha1024", "id": "x"}), "unknown hash 'sha1024'"),
        (document.encode("config", {"hash": "blake3-256", "id": 3}), "config.json"),
        (b"", "config.json"),
        (b"<html>not found</html>", "config.json"),
    ],
)
def test_an_odd_config_is_refused_and_left_alone(
    kind: str, data: bytes, why: str, tmp_path: Path
) -> None:
    repository = new_repository(kind, tmp_path)
    overwrite(repository, "config.json", data)
    before = raw(repository)
    with pytest.raises(FormatError, match=why):
        Repository.open(repository.url)
    with pytest.raises(AlreadyExistsError):
        Repository.init(repository.url)
    assert raw(repository) == before


@kinds
def test_a_repository_pickles_by_its_place(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    commit = repository.commit(draft({"a": b"1"}))
    data = pickle.dumps(repository)
    assert len(data) < 1000
    assert pickle.loads(data).read(commit.name, "a") == b"1"


def test_a_pickled_repository_holds_no_secrets() -> None:
    url = memory_url()
    Repository.init(url)
    repository = Repository.open(url, storage_options={"secret": "hunter2"})
    assert b"hunter2" not in pickle.dumps(repository)
    assert "hunter2" not in repr(repository) + repr(repository.backend) + repository.url


# -- what can be committed


@kinds
def test_special_files_are_refused_by_name_before_anything_is_stored(
    kind: str, tmp_path: Path
) -> None:
    repository = new_repository(kind, tmp_path)
    lay(tmp_path / "run", {"a": b"1"})
    os.mkfifo(tmp_path / "run" / "pipe")
    before = raw(repository)
    with pytest.raises(InvalidInputError, match="pipe is a socket, pipe or device"):
        repository.commit([tmp_path / "run"])
    with pytest.raises(InvalidInputError):
        repository.commit([tmp_path / "missing"])
    assert raw(repository) == before


@kinds
@pytest.mark.parametrize("path", ["../x", "/x", "a\nb", "a//b", "a" * 300])
def test_se2_names_that_could_leave_a_folder_are_refused_before_anything_is_stored(
    kind: str, path: str, tmp_path: Path
) -> None:
    repository = new_repository(kind, tmp_path)
    before = raw(repository)
    with pytest.raises(InvalidInputError):
        repository.commit(draft({path: b"1", "other": b"2"}))
    for how in ({"namespace": "../x"}, {"namespace": ""}):
        with pytest.raises(InvalidInputError):
            repository.commit(draft({"a": b"1"}), **how)
    with pytest.raises(InvalidInputError):
        repository.commit(draft({"a": b"1"}, key="../x"))
    assert raw(repository) == before


DEEP: Any = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "odd",
    [
        {"labels": {"a": 1}},
        {"labels": {"a": "\udc80"}},
        {"facts": {"x": float("nan")}},
        {"facts": {"x": DEEP}},
        {"facts": {1: "x", "1": "y"}},
        {"facts": {"x": object()}},
        {"parents": (1,)},
        {"driver": 3},
    ],
)
def test_cc5_what_could_not_be_read_back_is_refused_before_anything_is_stored(
    odd: dict[str, Any], tmp_path: Path
) -> None:
    repository = new_repository("memory", tmp_path)
    before = raw(repository)
    with pytest.raises(InvalidInputError):
        repository.commit(draft({"a": b"1"}, **odd))
    assert raw(repository) == before


def test_a_name_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    repository = new_repository("local", tmp_path)
    lay(tmp_path / "run", {"a": b"1"})
    os.close(os.open(os.fsencode(tmp_path / "run") + b"/\xff\xfe", os.O_CREAT))
    with pytest.raises(InvalidInputError, match="not valid Unicode"):
        repository.commit([tmp_path / "run"])


def test_links_are_kept_and_never_followed(tmp_path: Path) -> None:
    outside = lay(tmp_path / "outside", {"secret": b"s"})
    run = lay(tmp_path / "run", {"a": b"1"})
    (run / "folder").symlink_to(outside)
    (run / "file").symlink_to(outside / "secret")
    repository = new_repository("memory", tmp_path)
    commit = repository.commit([run])
    assert contents(repository, commit.name) == {
        "a": b"1",
        "folder": Link(str(outside)),
        "file": Link(str(outside / "secret")),
    }
    with pytest.raises(NotFoundError):
        repository.read(commit.name, "file")
    assert commit.snapshot.size == 1


def test_several_paths_keep_their_last_names(tmp_path: Path) -> None:
    repository = new_repository("memory", tmp_path)
    lay(tmp_path, {"a/one": b"1", "b/two": b"2", "b/three/x": b"3"})
    commit = repository.commit([tmp_path / "a" / "one", tmp_path / "b"])
    assert contents(repository, commit.name) == {"one": b"1", "b/two": b"2", "b/three/x": b"3"}
    with pytest.raises(InvalidInputError, match="given twice"):
        repository.commit([tmp_path / "a", tmp_path / "x" / ".." / "a"])


def test_a_repository_inside_the_folder_is_left_out(tmp_path: Path) -> None:
    lay(tmp_path / "run", {"a": b"1"})
    repository = Repository.init(tmp_path / "run" / ".castore")
    commit = repository.commit([tmp_path / "run"])
    assert contents(repository, commit.name) == {"a": b"1"}


def test_an_empty_folder_gives_an_empty_snapshot(tmp_path: Path) -> None:
    repository = new_repository("memory", tmp_path)
    (tmp_path / "run").mkdir()
    commit = repository.commit([tmp_path / "run"])
    assert contents(repository, commit.name) == {}
    repository.checkout(commit.name, tmp_path / "out")
    assert folder(tmp_path / "out") == {}
    assert problems(repository) == []


# -- names


@kinds
def test_resolve(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    with pytest.raises(SnapshotNotFoundError, match="holds no snapshot"):
        repository.resolve("latest")
    a1 = repository.commit(draft({"x": b"1"}), namespace="a").name
    b1 = repository.commit(draft({"x": b"2"}), namespace="b").name
    a2 = repository.commit(draft({"x": b"3"}, key="run.7_1"), namespace="a").name
    assert a2.key == "run.7_1"
    assert repository.resolve("latest") == a2
    assert repository.resolve("a@latest") == a2
    assert repository.resolve("b@latest") == b1
    for name in (a1, a2, b1):
        for text in (name.id, name.id[:8], str(name), name.name, f"{name.namespace}@{name.id[:8]}"):
            assert repository.resolve(text) == name
    for text in (f"b@{a1.id}", "", "abc", a1.id[:3], "zzzz", "c@latest", f"{a1.id}x", "latestx"):
        with pytest.raises(SnapshotNotFoundError):
            repository.resolve(text)
    for text in ("../a@latest", "@latest", "a/b@latest"):
        with pytest.raises(CastoreError):
            repository.resolve(text)


def test_an_ambiguous_prefix_is_refused_and_shows_what_it_could_be(tmp_path: Path) -> None:
    repository = new_repository("memory", tmp_path)
    tree = repository.commit(draft({"x": b"1"})).snapshot.tree
    seen: dict[str, bytes] = {}
    for time in range(1, 100_000):
        data = Snapshot(tree, time, "main").encode()
        name = name_of(data, "main", "snapshot", time)
        if name.id[:4] in seen:
            break
        seen[name.id[:4]] = data
    other = name_of(seen[name.id[:4]], "main", "snapshot", 1)
    repository.backend.create(name.path, data)
    repository.backend.create(other.path, seen[name.id[:4]])
    with pytest.raises(SnapshotNotFoundError, match="names 2 snapshots") as caught:
        repository.resolve(name.id[:4])
    assert str(name) in str(caught.value)
    assert str(other) in str(caught.value)
    assert repository.resolve(name.id) == name


@kinds
def test_snapshots_come_newest_first_and_no_document_is_read(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    names = [repository.commit(draft({"x": bytes([i])})).name for i in range(5)]
    assert all(a.time < b.time for a, b in zip(names, names[1:], strict=False))
    counting = Counting(repository.backend)
    seen = with_backend(repository, counting)
    assert list(seen.snapshots()) == names[::-1]
    assert list(seen.snapshots("main", limit=2)) == names[:-3:-1]
    assert seen.resolve("latest") == names[-1]
    assert counting.read == []


@kinds
def test_fences_and_foreign_files_are_no_snapshots(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    name = repository.commit(draft({"x": b"1"})).name
    for i in range(3):
        fence = name_of(bytes([i]), "main", "snapshot", name.time + 1000 + i)
        repository.backend.create(fence.path, b"")
    repository.backend.create("snapshots/main/README", b"hello")
    assert repository.resolve("latest") == name
    assert list(repository.snapshots()) == [name]
    later = repository.commit(draft({"x": b"2"})).name
    assert repository.resolve("latest") == later


def test_a_name_a_day_ahead_of_the_clock_is_an_error(tmp_path: Path) -> None:
    repository = new_repository("memory", tmp_path)
    ahead, _ = clocked(repository, 2 * 86_400)
    name = ahead.commit(draft({"x": b"1"})).name
    with pytest.raises(BackendError, match="days ahead of the clock"):
        repository.commit(draft({"x": b"2"}))
    repository.forget(name)
    assert repository.commit(draft({"x": b"2"})).name == repository.resolve("latest")


@kinds
def test_paths_within_a_snapshot(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    name = repository.commit(draft({"a/b": b"0123456789", "a/c": b"", "d": Link("a")})).name
    assert list(repository.tree(f"{name}:a").entries) == ["b", "c"]
    assert list(repository.tree(f"{name}:a/b").entries) == ["b"]
    with pytest.raises(NotFoundError, match="castore ls"):
        repository.tree(f"{name}:x")
    assert repository.read(name, "a/b", 3, 6) == b"345"
    assert repository.read(name, "a/b", 8, 99) == b"89"
    assert repository.read(name, "a/b", 9, 3) == repository.read(name, "a/c") == b""
    for path in ("a", "d", "x", "", "../a/b"):
        with pytest.raises(NotFoundError):
            repository.read(name, path)


def test_a_range_reads_only_the_blobs_it_touches(tmp_path: Path) -> None:
    repository = new_repository("memory", tmp_path)
    data = safetensors({f"w{i}": weights(seed=i) for i in range(3)})
    name = repository.commit(draft({"f": data})).name
    counting = Counting(repository.backend)
    seen = with_backend(repository, counting)
    tree = seen.tree(name)
    counting.read.clear()
    entry = tree.entries["f"]
    start = len(data) - 1000
    assert b"".join(seen.read_file(entry, start)) == data[start:]  # type: ignore[arg-type]
    assert len(counting.read) == 1


def test_a_blob_that_slices_share_is_read_once(tmp_path: Path) -> None:
    """The small things between tensors lie in one blob: it was read again for each gap."""
    repository = new_repository("local", tmp_path)
    tensors = {f"t{i}": weights(20_000 if i % 2 else 10, i) for i in range(40)}
    data = safetensors(tensors)
    [file] = repository.tree(repository.commit(draft({"m": data})).name).entries.values()
    assert isinstance(file, File) and len(file.slices) > 2 * len(file.blobs()) - 5
    counting = Counting(repository.backend)
    assert b"".join(with_backend(repository, counting).read_file(file)) == data
    assert len(counting.read) == len(set(counting.read)) == len(file.blobs())


# -- forget


@kinds
def test_forget_and_unforget(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    one = repository.commit(draft({"x": b"1"})).name
    two = repository.commit(draft({"x": b"2"})).name
    assert repository.forget(two.id) == two
    assert list(repository.snapshots()) == [one]
    assert list(repository.forgotten()) == [two]
    with pytest.raises(SnapshotNotFoundError):
        repository.forget(two)
    with pytest.raises(SnapshotNotFoundError):
        repository.tree(two)
    for text in ("zzzz", two.id[:3], f"other@{two.id}"):
        with pytest.raises(SnapshotNotFoundError):
            repository.unforget(text)
    with pytest.raises(SnapshotNotFoundError):
        repository.unforget(one)
    back = repository.unforget(two.id)
    assert back != two
    assert back.id == two.id
    assert back.time > two.time
    assert contents(repository, back) == {"x": b"2"}
    assert repository.resolve("latest") == back
    assert list(repository.forgotten()) == []
    assert problems(repository) == []


@kinds
def test_unforget_refuses_when_something_it_needs_is_gone(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    name = repository.commit(draft({"x": b"1", "y": b"2"})).name
    [digest] = blobs(repository, name, "x")
    repository.forget(name)
    repository.backend.delete(object_name(digest))
    before = raw(repository)
    with pytest.raises(ObjectNotFoundError, match=digest):
        repository.unforget(name)
    assert raw(repository) == before


# -- damage and outages


@kinds
@pytest.mark.parametrize("damage", ["one byte less", "half", "empty", "seven bytes", "pointer"])
def test_cc7_a_cut_or_replaced_object_is_named_and_nothing_partial_is_passed_on(
    kind: str, damage: str, tmp_path: Path
) -> None:
    repository = new_repository(kind, tmp_path)
    name = repository.commit(draft({"m": series(1)[0], "ok": b"fine"})).name
    digest = blobs(repository, name, "m")[-1]
    stored = repository.backend.get(object_name(digest))
    cuts = {
        "one byte less": stored[:-1],
        "half": stored[: len(stored) // 2],
        "empty": b"",
        "seven bytes": stored[:7],
        "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64,
    }
    overwrite(repository, object_name(digest), cuts[damage])
    for use in (
        lambda: repository.read(name, "m"),
        lambda: repository.checkout(name, tmp_path / "out"),
        lambda: list(repository.read_file(repository.tree(name).entries["m"])),  # type: ignore[arg-type]
    ):
        with pytest.raises(CorruptObjectError, match=digest) as caught:
            use()
        assert caught.value.name == digest
    if damage in ("one byte less", "half"):
        assert f"{len(cuts[damage])} bytes" in str(caught.value)
        assert str(len(stored)) in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert repository.read(name, "ok") == b"fine"


def test_au1_a_flipped_bit_behind_equal_size_time_and_mode_is_seen(tmp_path: Path) -> None:
    repository = new_repository("local", tmp_path)
    name = repository.commit(draft({"m": series(1)[0]})).name
    [digest] = [d for d in blobs(repository, name, "m") if len(repository.store.read(d)) > 1000]
    path = Path(repository.url) / object_name(digest)
    path.chmod(0o444)
    info = path.stat()
    path.chmod(0o644)
    path.write_bytes(flip(path.read_bytes(), 5000))
    path.chmod(0o444)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    with pytest.raises(CorruptObjectError, match=digest):
        repository.read(name, "m")
    with pytest.raises(CorruptObjectError, match=digest):
        repository.checkout(name, tmp_path / "out")
    [problem] = problems(repository)
    assert (problem.kind, problem.object) == ("corrupt", digest)
    assert problem.needed_by == ((str(name), "m"),)
    assert problems(repository, read_data=False) == []


@kinds
@pytest.mark.parametrize("what", ["tree", "snapshot"])
def test_a_damaged_document_is_named(kind: str, what: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    commit = repository.commit(draft({"m": b"1"}))
    if what == "tree":
        flip_object(repository, commit.snapshot.tree)
        expected = commit.snapshot.tree
    else:
        overwrite(repository, commit.name.path, flip(repository.backend.get(commit.name.path), 9))
        expected = commit.name.path
    with pytest.raises(CorruptObjectError) as caught:
        repository.read(commit.name, "m")
    assert caught.value.name == expected
    later = repository.commit(draft({"m": b"2"}))
    assert repository.read(later.name, "m") == b"2"


@kinds
def test_an_outage_is_never_taken_for_empty(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    name = repository.commit(draft({"m": b"1"})).name
    before = raw(repository)
    outage = Outage(repository.backend, lambda call, name: True)
    seen = with_backend(repository, outage)
    target = new_repository("memory", tmp_path, "target")
    target.commit(draft({"m": b"3"}))
    for use in (
        lambda: list(seen.snapshots()),
        lambda: seen.namespaces(),
        lambda: seen.resolve("latest"),
        lambda: seen.tree(name),
        lambda: seen.read(name, "m"),
        lambda: seen.checkout(name, tmp_path / "out"),
        lambda: seen.commit(draft({"m": b"2"})),
        lambda: seen.forget(name),
        lambda: seen.unforget("abcd"),
        lambda: list(seen.forgotten()),
        lambda: problems(seen),
        lambda: prune(seen, grace=0),
        lambda: usage(seen),
        lambda: copy(seen, target),
        lambda: copy(target, seen, namespaces=["main"]),
    ):
        with pytest.raises(BackendError, match="does not answer"):
            use()
    assert raw(repository) == before
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_gone_is_no_empty_repository(tmp_path: Path) -> None:
    repository = new_repository("local", tmp_path)
    repository.commit(draft({"m": b"1"}))
    shutil.move(repository.url, tmp_path / "unmounted")
    for use in (
        lambda: list(repository.snapshots()),
        lambda: repository.resolve("latest"),
        lambda: repository.commit(draft({"m": b"2"})),
        lambda: problems(repository),
    ):
        with pytest.raises(BackendError, match="mounted"):
            use()
    assert not Path(repository.url).exists()


def test_a_draft_is_what_scan_gives(tmp_path: Path) -> None:
    lay(tmp_path / "run", EVERYTHING)
    repository = new_repository("memory", tmp_path)
    one = repository.commit(Draft(scan([tmp_path / "run"]), facts={"n": 1}, parents=("x",)))
    two = repository.commit([tmp_path / "run"])
    assert one.snapshot.tree == two.snapshot.tree
    assert (one.snapshot.facts, one.snapshot.parents) == ({"n": 1}, ("x",))


def test_progress_adds_up(tmp_path: Path) -> None:
    repository = new_repository("memory", tmp_path)
    seen: list[int] = []
    progress: Callable[[int], None] = seen.append
    commit = repository.commit(draft({"m": series(1)[0], "n": b"1"}), progress=progress)
    assert sum(seen) == commit.snapshot.size
    seen.clear()
    repository.checkout(commit.name, tmp_path / "out", progress=progress)
    assert sum(seen) == commit.snapshot.size
