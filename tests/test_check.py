"""Checks: each kind of damage is found, named, and laid at the right door."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from castore import check as check_module
from castore import document, frame
from castore.check import Problem
from castore.copy import copy
from castore.digest import digest_of
from castore.errors import BackendError, CorruptObjectError, InvalidInputError, ObjectNotFoundError
from castore.objects import object_name
from castore.repair import repair
from castore.repository import Repository
from castore.snapshot import Snapshot, SnapshotName, name_of
from castore.tree import File, Slice, build_tree
from tests.damage import sealed
from tests.faults import BadReads, Counting, Outage
from tests.helpers import (
    blobs,
    checked,
    contents,
    draft,
    encode_raw,
    flip,
    flip_object,
    headers,
    new_repository,
    noise,
    overwrite,
    problems,
    raw,
    series,
    with_backend,
)

kinds = pytest.mark.parametrize("kind", ["local", "memory"])


def fill(repository: Repository) -> list[SnapshotName]:
    """Three snapshots: a chain of three, a file that two share, one that stands alone."""
    one, two, three = series(3)
    return [
        repository.commit(draft({"m": one, "shared": b"s" * 100}), namespace="a").name,
        repository.commit(draft({"m": two, "deep/shared": b"s" * 100}), namespace="a").name,
        repository.commit(draft({"m": three, "own": noise(500)}), namespace="a").name,
    ]


def tensor(repository: Repository, name: SnapshotName) -> str:
    return blobs(repository, name, "m")[-1]


def needs(*pairs: tuple[SnapshotName, str]) -> set[tuple[str, str]]:
    return {(str(n), p) for n, p in pairs}


@kinds
def test_a_sound_repository_has_no_problem_and_is_left_alone(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    assert checked(repository)[0] == []
    names = fill(repository)
    repository.forget(names[2])
    before = raw(repository)
    found, report = checked(repository, layout=True)
    assert found == []
    assert report.snapshots == 2
    assert report.objects == len([n for n in before if n.startswith("objects/")])
    assert report.bytes_read == sum(len(d) for n, d in before.items() if n.startswith("objects/"))
    assert report.unreferenced == 3
    assert report.unstable == []
    found, report = checked(repository, read_data=False)
    assert (found, report.bytes_read) == ([], 0)
    assert raw(repository) == before


# -- each kind of problem


@kinds
@pytest.mark.parametrize("read_data", [False, True])
def test_a_missing_blob(kind: str, read_data: bool, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    names = fill(repository)
    [digest] = blobs(repository, names[0], "shared")
    repository.backend.delete(object_name(digest))
    [found] = problems(repository, read_data=read_data)
    assert (found.kind, found.object) == ("missing", digest)
    assert set(found.needed_by) == needs((names[0], "shared"), (names[1], "deep/shared"))


@kinds
@pytest.mark.parametrize("read_data", [False, True])
def test_a_missing_base_is_named_with_all_that_stands_on_it(
    kind: str, read_data: bool, tmp_path: Path
) -> None:
    repository = new_repository(kind, tmp_path)
    names = fill(repository)
    digest = tensor(repository, names[1])
    repository.backend.delete(object_name(digest))
    [found] = problems(repository, read_data=read_data)
    assert (found.kind, found.object) == ("missing", digest)
    assert set(found.needed_by) == needs((names[1], "m"), (names[2], "m"))


@kinds
@pytest.mark.parametrize("at", [70, -1])
def test_a_corrupt_base_is_named_with_all_that_stands_on_it(
    kind: str, at: int, tmp_path: Path
) -> None:
    repository = new_repository(kind, tmp_path)
    names = fill(repository)
    digest = tensor(repository, names[0])
    flip_object(repository, digest, at)
    assert problems(repository, read_data=False) == []
    [found] = problems(repository)
    assert (found.kind, found.object) == ("corrupt", digest)
    assert set(found.needed_by) == needs((names[0], "m"), (names[1], "m"), (names[2], "m"))


@kinds
@pytest.mark.parametrize("at", [0, 5, 8, 20, 60])
@pytest.mark.parametrize("read_data", [False, True])
def test_a_corrupt_header_is_found_without_reading_data(
    kind: str, at: int, read_data: bool, tmp_path: Path
) -> None:
    repository = new_repository(kind, tmp_path)
    names = fill(repository)
    digest = tensor(repository, names[2])
    flip_object(repository, digest, at)
    [found] = problems(repository, read_data=read_data)
    assert (found.kind, found.object) == ("corrupt", digest)
    assert set(found.needed_by) == needs((names[2], "m"))


@kinds
@pytest.mark.parametrize("size", [0, 7, 64, 100, -1])
def test_a_cut_object_is_found_without_reading_data(kind: str, size: int, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    names = fill(repository)
    digest = tensor(repository, names[0])
    name = object_name(digest)
    overwrite(repository, name, repository.backend.get(name)[:size])
    for read_data in (False, True):
        [found] = problems(repository, read_data=read_data)
        assert (found.kind, found.object) == ("corrupt", digest)
        assert len(found.needed_by) == 3 or size in (0, 7)


@kinds
def test_two_damaged_objects_of_one_chain_are_both_named(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    names = fill(repository)
    both = {tensor(repository, names[0]), tensor(repository, names[2])}
    for digest in both:
        flip_object(repository, digest)
    found = problems(repository)
    assert {(p.kind, p.object) for p in found} == {("corrupt", d) for d in both}


@kinds
@pytest.mark.parametrize("other", [b"something else", noise(500, 9), noise(900, 9)])
def test_a_wrong_object_under_a_name(kind: str, other: bytes, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    names = fill(repository)
    [digest] = blobs(repository, names[2], "own")
    overwrite(repository, object_name(digest), encode_raw(other))
    [found] = problems(repository)
    assert (found.kind, found.object) == ("corrupt", digest)
    assert digest_of(other) in found.detail
    assert set(found.needed_by) == needs((names[2], "own"))


@kinds
@pytest.mark.parametrize("what", ["blob", "base", "tree", "document"])
@pytest.mark.parametrize("read_data", [False, True])
def test_an_unreadable_object_is_a_problem_and_not_the_end(
    kind: str, what: str, read_data: bool, tmp_path: Path
) -> None:
    repository = new_repository(kind, tmp_path)
    names = fill(repository)
    digest = {
        "blob": blobs(repository, names[2], "own")[0],
        "base": tensor(repository, names[0]),
        "tree": repository.snapshot(names[1]).tree,
        "document": "",
    }[what]
    refused = object_name(digest) if digest else names[1].path
    outage = Outage(repository.backend, lambda call, name: call == "get" and name == refused)
    found = problems(with_backend(repository, outage), read_data=read_data)
    assert [(p.kind, p.object) for p in found] == [("unreadable", digest or names[1].path)]
    expected = {
        "blob": needs((names[2], "own")),
        "base": needs((names[0], "m"), (names[1], "m"), (names[2], "m")),
        "tree": needs((names[1], "")),
        "document": needs((names[1], "")),
    }[what]
    assert set(found[0].needed_by) == expected


@kinds
@pytest.mark.parametrize("call", ["list", "get"])
def test_a_store_that_cannot_be_listed_is_an_error(kind: str, call: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    fill(repository)
    outage = Outage(repository.backend, lambda c, name: c == call)
    if call == "list":
        with pytest.raises(BackendError):
            problems(with_backend(repository, outage))
    else:
        found = problems(with_backend(repository, outage))
        assert {p.kind for p in found} == {"unreadable"}
        assert len([p for p in found if p.object.startswith("snapshots/")]) == 3


@kinds
@pytest.mark.parametrize("what", ["flip", "other content", "fence"])
def test_a_damaged_document(kind: str, what: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    names = fill(repository)
    data = repository.backend.get(names[1].path)
    changed = {"flip": flip(data, 30), "other content": b"{}\n", "fence": b""}[what]
    overwrite(repository, names[1].path, changed)
    found = problems(repository)
    if what == "fence":
        assert found == []
    else:
        assert [(p.kind, p.object) for p in found] == [("corrupt", names[1].path)]
        assert found[0].needed_by == ((str(names[1]), ""),)


def published(repository: Repository, data: bytes, namespace: str = "a") -> SnapshotName:
    name = name_of(data, namespace, "snapshot", 5)
    repository.backend.create(name.path, data)
    return name


@kinds
@pytest.mark.parametrize(
    "what", ["newer document", "other namespace", "no name", "no object name", "newer frame"]
)
def test_malformed(kind: str, what: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    names = fill(repository)
    data = repository.backend.get(names[0].path)
    needed: tuple[tuple[str, str], ...] = ()
    if what == "newer document":
        name = published(repository, data.replace(b'"format":1', b'"format":2'))
        expected, needed = name.path, ((str(name), ""),)
    elif what == "other namespace":
        name = published(repository, data, "b")
        expected, needed = name.path, ((str(name), ""),)
    elif what == "no name":
        expected = "snapshots/a/README"
        repository.backend.create(expected, b"hello")
    elif what == "no object name":
        expected = "objects/ab/README"
        repository.backend.create(expected, b"hello")
    else:
        [expected] = blobs(repository, names[2], "own")
        stored = repository.backend.get(object_name(expected))
        overwrite(repository, object_name(expected), sealed(stored, _4=2))
        needed = ((str(names[2]), "own"),)
    for read_data in (False, True):
        [found] = problems(repository, read_data=read_data)
        assert (found.kind, found.object, found.needed_by) == ("malformed", expected, needed)


@kinds
@pytest.mark.parametrize("how", ["newer", "junk", "untrue", "wants too much"])
def test_a_malformed_tree(kind: str, how: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    names = fill(repository)
    [own] = blobs(repository, names[2], "own")
    tree = build_tree({"x": File(0, "0" * 64)}).encode()
    data = {
        "newer": tree.replace(b'"format":1', b'"format":2'),
        "junk": b"<html>",
        "wants too much": build_tree(
            {"x": File(200, "0" * 64, False, (Slice(own, 400, 200),))}
        ).encode(),
        "untrue": document.encode("tree", {"entries": {"../x": {"type": "folder"}}}),
    }[how]
    repository.store.create_many([(digest_of(data), encode_raw(data))])
    name = published(repository, Snapshot(digest_of(data), 5, "a").encode())
    [found] = problems(repository)
    assert (found.kind, found.object) == ("malformed", digest_of(data))
    assert found.needed_by == ((str(name), ""),)


@kinds
@pytest.mark.parametrize("how", ["depth", "ring"])
def test_a_chain_that_does_not_go_down_is_malformed(kind: str, how: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    names = fill(repository)
    one, two = (tensor(repository, n) for n in names[1:])
    stored = repository.backend.get(object_name(two))
    if how == "depth":
        overwrite(repository, object_name(two), sealed(stored, _7=1))
        bad = {two}
    else:
        first = repository.backend.get(object_name(one))
        ring = {f"_{16 + i}": b for i, b in enumerate(bytes.fromhex(two))}
        overwrite(repository, object_name(one), sealed(first, **ring))
        bad = {one}
    found = problems(repository)
    assert {(p.kind, p.object) for p in found} == {("malformed", d) for d in bad}
    if how == "ring":
        with pytest.raises(CorruptObjectError, match=one):
            repository.read(names[1], "m")
        with pytest.raises(CorruptObjectError, match="loop or a forged chain"):
            repository.checkout(names[1], tmp_path / "out")


@kinds
@pytest.mark.parametrize("how", ["sha256", "driver"])
def test_layout(kind: str, how: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    names = fill(repository)
    tree = repository.tree(names[2])
    entry = tree.entries["own"]
    assert isinstance(entry, File)
    if how == "sha256":
        data = build_tree({**tree.entries, "own": replace(entry, sha256="0" * 64)}).encode()
        repository.store.create_many([(digest_of(data), encode_raw(data))])
        name = published(repository, Snapshot(digest_of(data), 5, "a").encode())
        expected = Problem("layout", "own", "", ((str(name), "own"),))
    else:
        old = repository.snapshot(names[2])
        name = published(repository, replace(old, driver="nobody.wrote").encode())
        expected = Problem("layout", name.path, "", ((str(name), ""),))
    assert problems(repository) == []
    [found] = problems(repository, layout=True)
    assert replace(found, detail="") == expected
    assert ("nobody.wrote" if how == "driver" else "SHA-256") in found.detail


# -- what may be there


@kinds
def test_what_a_dead_writer_leaves_is_no_problem(kind: str, tmp_path: Path) -> None:
    """Unreferenced objects, a delta whose base never came, fences, pendings."""
    repository = new_repository(kind, tmp_path)
    names = fill(repository)
    base = tensor(repository, names[1])
    for name in names[1:]:
        repository.backend.create(name.pending, b"0" * 32)
        overwrite(repository, name.path, b"")
    repository.backend.delete(object_name(base))
    found, report = checked(repository)
    assert found == []
    assert report.snapshots == 1
    assert report.unreferenced == 4


@kinds
def test_corrupt_bytes_nobody_needs_are_told_all_the_same(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    names = fill(repository)
    [digest] = blobs(repository, names[2], "own")
    repository.forget(names[2])
    flip_object(repository, digest)
    [found] = problems(repository)
    assert (found.kind, found.object, found.needed_by) == ("corrupt", digest, ())


# -- unstable


@kinds
@pytest.mark.parametrize("spoil", [lambda d: flip(d, -1), lambda d: d[:-1], lambda d: d[:10]])
@pytest.mark.parametrize("what", ["blob", "base", "tree", "document"])
def test_au4_a_read_that_is_wrong_once_is_unstable_not_corrupt(
    kind: str, spoil: Callable[[bytes], bytes], what: str, tmp_path: Path
) -> None:
    repository = new_repository(kind, tmp_path)
    names = fill(repository)
    digest = {
        "blob": blobs(repository, names[2], "own")[0],
        "base": tensor(repository, names[0]),
        "tree": repository.snapshot(names[1]).tree,
        "document": "",
    }[what]
    hit = object_name(digest) if digest else names[1].path
    bad = BadReads(repository.backend, lambda name, d, n: spoil(d) if name == hit and n == 1 else d)
    found, report = checked(with_backend(repository, bad))
    assert found == []
    assert report.unstable
    assert set(report.unstable) <= {
        digest or names[1].path,
        *(tensor(repository, n) for n in names),
    }
    if what != "base":
        assert report.unstable == [digest or names[1].path]
    always = BadReads(repository.backend, lambda name, d, n: spoil(d) if name == hit else d)
    found, report = checked(with_backend(repository, always))
    assert [(p.kind, p.object) for p in found] == [("corrupt", digest or names[1].path)]


# -- how much is read


@kinds
def test_sample_reads_a_share(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    repository.commit(draft({f"f{i}": noise(200, i) for i in range(39)}))
    seen = Counting(repository.backend)
    found, report = checked(with_backend(repository, seen), read_data=False, sample=0.25)
    assert found == []
    objects = [n for n in seen.read if n.startswith("objects/")]
    assert len(objects) == 10 + 1  # and the tree
    assert 0 < report.bytes_read < sum(map(len, raw(repository).values())) / 2
    for digest in headers(repository):
        if digest != repository.snapshot("latest").tree:
            flip_object(repository, digest)
    assert 9 <= len(problems(repository, read_data=False, sample=0.25)) <= 10
    for wrong in (0, -1, 1.5):
        with pytest.raises(InvalidInputError, match="sample"):
            problems(repository, sample=wrong)


@kinds
def test_since_looks_at_new_snapshots_and_their_bases_only(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    names = fill(repository)
    [own] = blobs(repository, names[0], "shared")
    flip_object(repository, own)
    assert len(problems(repository)) == 1
    found, report = checked(repository, since=names[2].time)
    assert found == []
    assert report.snapshots == 1
    base = tensor(repository, names[0])
    flip_object(repository, base)
    [problem] = problems(repository, since=names[2].time)
    assert (problem.kind, problem.object) == ("corrupt", base)
    assert set(problem.needed_by) == needs((names[2], "m"))
    assert problems(repository, since=names[2].time + 1) == []


@kinds
def test_state_lets_an_interrupted_check_go_on(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = new_repository(kind, tmp_path)
    repository.commit(draft({f"f{i:02d}": noise(200, i) for i in range(30)}))
    state = str(tmp_path / "state")
    total = len(headers(repository))

    def stop_after(n: int) -> Callable[[int], None]:
        seen = [0]

        def progress(_: int) -> None:
            seen[0] += 1
            if seen[0] > n:
                raise KeyboardInterrupt

        return progress

    with pytest.raises(KeyboardInterrupt):
        problems(repository, state=state, progress=stop_after(10))
    counting = Counting(repository.backend)
    found, report = checked(with_backend(repository, counting), state=state)
    assert found == []
    assert len([n for n in counting.read if n.startswith("objects/")]) <= total - 10 + 1
    # A run that was complete begins anew.
    _, report = checked(repository, state=state)
    assert report.bytes_read == sum(len(d) for n, d in raw(repository).items() if "objects/" in n)
    with pytest.raises(KeyboardInterrupt):
        problems(repository, state=state, progress=stop_after(28))
    # What was replaced since is read again.
    victim = blobs(repository, "latest", "f00")[0]
    flip_object(repository, victim)
    assert [p.object for p in problems(repository, state=state)] == [victim]


def test_a_state_file_of_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    repository = new_repository("memory", tmp_path)
    fill(repository)
    other = new_repository("memory", tmp_path)
    state = tmp_path / "state"
    problems(other, state=str(state))
    before = state.read_bytes()
    with pytest.raises(InvalidInputError, match="state"):
        problems(repository, state=str(state))
    assert state.read_bytes() == before
    state.write_bytes(b"\xff\xfe notes")
    for _ in range(2):
        with pytest.raises(InvalidInputError):
            problems(repository, state=str(state))
        assert state.read_bytes() == b"\xff\xfe notes"


@kinds
def test_each_object_is_read_once(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    files = {f"s{i}/m": f for i, f in enumerate(series(10))}
    tree = repository.commit(draft(files)).snapshot.tree
    counting = Counting(repository.backend)
    problems(with_backend(repository, counting))
    objects = [n for n in counting.read if n.startswith("objects/") and n != object_name(tree)]
    assert len(objects) == len(set(objects)) == len(headers(repository)) - 1


# -- repair


@kinds
@pytest.mark.parametrize("damage", ["payload", "header", "gone", "base gone", "tree", "other"])
def test_au5_repair_puts_back_verified_bytes(kind: str, damage: str, tmp_path: Path) -> None:
    repository, other = new_repository(kind, tmp_path), new_repository("memory", tmp_path, "other")
    names = fill(repository)
    before = {n: contents(repository, n) for n in names}
    copy(repository, other)
    digest = {
        "payload": tensor(repository, names[2]),
        "header": tensor(repository, names[1]),
        "gone": blobs(repository, names[2], "own")[0],
        "base gone": tensor(repository, names[0]),
        "tree": repository.snapshot(names[1]).tree,
        "other": tensor(repository, names[0]),
    }[damage]
    if damage == "other":  # a sound frame, of what has another name
        other_content = bytes(repository.store.read(digest))[::-1]
        overwrite(repository, object_name(digest), b"".join(frame.raw(other_content)))
    elif "gone" in damage:
        repository.backend.delete(object_name(digest))
    else:
        flip_object(repository, digest, 3 if damage == "header" else -1)
    untouched = {n: d for n, d in raw(repository).items() if n != object_name(digest)}
    assert repair(repository, other) == [digest]
    assert {n: d for n, d in raw(repository).items() if n != object_name(digest)} == untouched
    assert {n: contents(repository, n) for n in names} == before
    assert problems(repository) == []
    assert headers(repository)[digest].codec != frame.DELTA
    assert repair(repository, other) == []


def test_what_only_a_missing_tree_names_is_put_back_with_it(tmp_path: Path) -> None:
    repository, other = new_repository("memory", tmp_path), new_repository("memory", tmp_path, "o")
    name = repository.commit(draft({"a": noise(5000), "b": noise(6000, 1)})).name
    copy(repository, other)
    tree, (first, second) = repository.snapshot(name).tree, repository.tree(name).blobs()
    for digest in (tree, first, second):
        repository.backend.delete(object_name(digest))
    other.backend.delete(object_name(second))
    assert [p.object for p in problems(repository)] == [tree]
    assert repair(repository, other) == [tree, first]
    assert [p.object for p in problems(repository)] == [second]


@kinds
def test_au5_nothing_is_made_up_where_no_good_copy_is(kind: str, tmp_path: Path) -> None:
    repository, other = new_repository(kind, tmp_path), new_repository("memory", tmp_path, "other")
    names = fill(repository)
    copy(repository, other)
    bad = [tensor(repository, names[2]), blobs(repository, names[2], "own")[0]]
    flip_object(repository, bad[0])
    repository.backend.delete(object_name(bad[1]))
    flip_object(other, bad[0])
    other.backend.delete(object_name(bad[1]))
    before = raw(repository)
    found = problems(repository)
    assert {p.object for p in found} == set(bad)
    assert repair(repository, other) == []
    assert raw(repository) == before
    assert problems(repository) == found


@kinds
def test_au5_a_check_never_writes(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    names = fill(repository)
    flip_object(repository, tensor(repository, names[0]))
    repository.backend.delete(object_name(tensor(repository, names[2])))
    before = raw(repository)
    assert len(problems(repository, layout=True)) >= 2
    assert raw(repository) == before


@kinds
def test_layout_of_a_damaged_snapshot_is_told_and_not_the_end(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    names = fill(repository)
    [digest] = blobs(repository, names[2], "own")
    repository.backend.delete(object_name(digest))
    found = problems(repository, layout=True)
    assert [(p.kind, p.object) for p in found if p.kind != "layout"] == [("missing", digest)]
    [layout] = [p for p in found if p.kind == "layout"]
    assert layout.object == names[2].path
    with pytest.raises(ObjectNotFoundError):
        repository.read(names[2], "own")


def test_every_kind_has_a_test() -> None:
    kinds_there: Any = check_module.Kind
    assert set(kinds_there.__args__) == {
        "missing",
        "corrupt",
        "unreadable",
        "malformed",
        "layout",
    }
