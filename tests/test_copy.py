"""Copies: everything verified, only what is lacking, bases first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from castore import frame
from castore.copy import copy
from castore.digest import digest_of
from castore.errors import (
    BackendError,
    CorruptObjectError,
    InvalidInputError,
    NotFoundError,
    ObjectNotFoundError,
)
from castore.objects import object_name
from castore.repository import Repository
from castore.snapshot import Snapshot
from castore.tree import File, Folder, Link, Slice, build_tree
from tests.faults import Counting, Outage
from tests.helpers import (
    blobs,
    contents,
    draft,
    encode_raw,
    flip_object,
    headers,
    new_repository,
    noise,
    problems,
    raw,
    series,
    with_backend,
)

WAYS = [("local", "memory"), ("memory", "local"), ("local", "local"), ("memory", "memory")]
both = pytest.mark.parametrize(("one", "other"), WAYS)


def pair(one: str, other: str, tmp_path: Path) -> tuple[Repository, Repository]:
    return new_repository(one, tmp_path, "source"), new_repository(other, tmp_path, "target")


def fill(repository: Repository, n: int = 5) -> list[Any]:
    """Snapshots of a drifting file, with something of each kind beside it."""
    names = []
    for i, file in enumerate(series(n)):
        files = {"m": file, "n": b"%d" % i, "e": b"", "l": Link("m"), "f": Folder()}
        commit = repository.commit(draft(files), labels={"i": str(i % 2)}, namespace="abc"[i % 2])
        names.append(commit.name)
    return names


def stored(repository: Repository) -> dict[str, bytes]:
    return {n: d for n, d in raw(repository).items() if n.startswith("objects/")}


@both
def test_there_and_back_again(one: str, other: str, tmp_path: Path) -> None:
    source, target = pair(one, other, tmp_path)
    names = fill(source)
    report = copy(source, target)
    assert (report.snapshots, report.skipped) == (5, 0)
    assert report.objects == len(stored(source))
    assert report.bytes == sum(map(len, stored(target).values()))
    assert stored(target) == stored(source)
    for ns in ("a", "b"):
        assert [n.id for n in target.snapshots(ns)] == [n.id for n in source.snapshots(ns)]
    for name in names:
        there = target.resolve(name.id)
        assert contents(target, there) == contents(source, name)
        assert target.snapshot(there) == source.snapshot(name)
    assert problems(target) == []
    before = raw(target)
    again = copy(source, target)
    assert (again.snapshots, again.skipped, again.objects, again.bytes) == (0, 5, 0, 0)
    assert raw(target) == before
    back = new_repository(one, tmp_path, "back")
    copy(target, back)
    assert stored(back) == stored(source)
    assert problems(back) == []


@both
def test_only_what_is_lacking_is_sent(one: str, other: str, tmp_path: Path) -> None:
    source, target = pair(one, other, tmp_path)
    fill(source)
    there = series(3)
    target.commit(draft({"x": there[0], "y": there[1]}), namespace="mine")
    before = set(stored(target))
    counting = Counting(target.backend)
    read = Counting(source.backend)
    report = copy(with_backend(source, read), with_backend(target, counting))
    created = [n for n in counting.created if n.startswith("objects/")]
    assert not before & set(created)
    assert len(created) == len(set(created)) == report.objects
    assert len(before | set(created)) == len(stored(target))
    assert problems(target) == []
    sent = [n for n in read.read if n in before]
    assert len(sent) <= 2
    for name in source.snapshots():
        assert contents(target, target.resolve(name.id)) == contents(source, name)


def test_objects_come_before_the_documents_that_need_them(tmp_path: Path) -> None:
    source, target = pair("memory", "memory", tmp_path)
    for file in series(6):
        source.commit(draft({"m": file}))
    counting = Counting(target.backend)
    copy(source, with_backend(target, counting))
    documents = [i for i, n in enumerate(counting.created) if n.startswith("snapshots/")]
    objects = [i for i, n in enumerate(counting.created) if n.startswith("objects/")]
    assert max(objects) < min(documents)
    assert len(documents) == 6


def test_a_copy_sends_the_same_frames_whatever_the_threads_do(tmp_path: Path) -> None:
    source = new_repository("memory", tmp_path)
    files = {f"s{i}/m": f for i, f in enumerate(series(8))}
    source.commit(draft(files))
    for _ in range(5):
        target = new_repository("memory", tmp_path)
        copy(source, target)
        assert stored(target) == stored(source)


@both
def test_a_delta_whose_base_stays_behind_goes_without_one(
    one: str, other: str, tmp_path: Path
) -> None:
    source, target = pair(one, other, tmp_path)
    names = [source.commit(draft({"m": f})).name for f in series(4)]
    assert max(h.depth for h in headers(source).values()) == 3
    counting = Counting(target.backend)
    copy(source, with_backend(target, counting), since=names[2].time)
    assert not [n for n in counting.replaced if n.startswith("objects/")]
    assert [n.id for n in target.snapshots()] == [names[3].id, names[2].id]
    found = headers(target)
    codecs = sorted(h.codec for h in found.values() if h.content_length > 60_000)
    assert codecs == [frame.PACKED, frame.DELTA]
    assert problems(target) == []
    for name in names[2:]:
        assert contents(target, target.resolve(name.id)) == contents(source, name)
    copy(source, target)
    assert problems(target) == []
    assert all(h.depth <= 8 for h in headers(target).values())
    assert len(list(target.snapshots())) == 4


def test_what_is_chosen(tmp_path: Path) -> None:
    source = new_repository("memory", tmp_path)
    names = fill(source)
    chosen: list[tuple[dict[str, Any], list[int]]] = [
        ({"namespaces": ["b"]}, [1, 3]),
        ({"namespaces": ["a", "b"]}, [0, 1, 2, 3, 4]),
        ({"labels": {"i": "0"}}, [0, 2, 4]),
        ({"labels": {"i": "0", "x": "y"}}, []),
        ({"since": names[3].time}, [3, 4]),
        ({"since": names[3].time, "namespaces": ["a"]}, [4]),
    ]
    for how, expected in chosen:
        target = new_repository("memory", tmp_path)
        report = copy(source, target, **how)
        assert {n.id for n in target.snapshots()} == {names[i].id for i in expected}
        assert report.snapshots == len(expected)
        assert problems(target) == []


def test_what_is_refused(tmp_path: Path) -> None:
    source, target = pair("memory", "local", tmp_path)
    fill(source, 1)
    with pytest.raises(NotFoundError, match="no namespace nope"):
        copy(source, target, namespaces=["a", "nope"])
    with pytest.raises(InvalidInputError, match="one and the same"):
        copy(source, Repository.open(source.url))
    assert stored(target) == {}


@both
@pytest.mark.parametrize("damage", ["flip", "gone"])
def test_damaged_bytes_are_never_copied(one: str, other: str, damage: str, tmp_path: Path) -> None:
    source, target = pair(one, other, tmp_path)
    good = source.commit(draft({"m": b"good"}), namespace="a").name
    bad = source.commit(draft({"m": series(1)[0], "n": noise(100)}), namespace="b").name
    digest = blobs(source, bad, "m")[-1]
    if damage == "flip":
        flip_object(source, digest)
    else:
        source.backend.delete(object_name(digest))
    with pytest.raises((CorruptObjectError, ObjectNotFoundError), match=digest):
        copy(source, target)
    assert {n.id for n in target.snapshots()} == {good.id}
    assert object_name(digest) not in raw(target)
    assert problems(target) == []


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("alone", [False, True])
@both
def test_a_tree_that_wants_more_than_its_blobs_have_is_not_copied(
    one: str, other: str, alone: bool, there: bool, tmp_path: Path
) -> None:
    """Named by its snapshot, whether the target has its blob already or not."""
    source, target = pair(one, other, tmp_path)
    good = source.commit(draft({"m": noise(100)}), namespace="a").name
    [blob] = blobs(source, good, "m")
    tree = build_tree({"x": File(50, "0" * 64, False, (Slice(blob, 80, 50),))}).encode()
    source.store.create_many([(digest_of(tree), encode_raw(tree))])
    bad = source.republish(Snapshot(digest_of(tree), 5, "b"))
    if there:
        copy(source, target, namespaces=["a"])
    with ThreadPoolExecutor(2) as pool, pytest.raises(CorruptObjectError) as found:
        copy(source, target, executor=None if alone else pool)
    for part in (str(bad), digest_of(tree), blob, "130 bytes", "which has 100"):
        assert part in str(found.value)
    assert [n.id for n in target.snapshots()] == [good.id]
    assert problems(target) == []
    with pytest.raises(CorruptObjectError):
        target.read(target.republish(Snapshot(digest_of(tree), 5, "b")), "x")


@both
def test_damage_in_the_target_is_no_base_and_is_mended(
    one: str, other: str, tmp_path: Path
) -> None:
    source, target = pair(one, other, tmp_path)
    files = series(3)
    first = source.commit(draft({"m": files[0]})).name
    copy(source, target)
    base = blobs(source, first, "m")[-1]
    target.backend.delete(object_name(base))
    second = source.commit(draft({"m": files[1]})).name
    copy(source, target)
    assert contents(target, target.resolve(second.id)) == {"m": files[1]}
    delta = blobs(source, second, "m")[-1]
    assert headers(source)[delta].codec == frame.DELTA
    assert headers(target)[delta].codec == frame.PACKED


@both
def test_an_interrupted_copy_goes_on_where_it_stopped(
    one: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("castore.write._BATCH_FRAMES", 1)
    source, target = pair(one, other, tmp_path)
    fill(source, 6)
    gets = 0

    def fail(call: str, name: str) -> bool:
        nonlocal gets
        gets += call == "get" and name.startswith("objects/")
        return gets > 20

    outage = Outage(source.backend, fail)
    with pytest.raises(BackendError, match="does not answer"):
        copy(with_backend(source, outage), target)
    sent = set(stored(target))
    assert sent
    assert problems(target) == []
    counting = Counting(target.backend)
    report = copy(source, with_backend(target, counting))
    assert not sent & set(counting.created)
    assert report.objects == len(stored(target)) - len(sent)
    assert stored(target) == stored(source)
    assert len(list(target.snapshots())) == 6
    assert problems(target) == []
