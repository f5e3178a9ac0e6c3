"""Prune: what nobody needs goes, once it is old enough; nothing else ever does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from castore.digest import digest_of
from castore.errors import (
    BackendError,
    CastoreError,
    CorruptObjectError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    ObjectNotFoundError,
)
from castore.objects import object_name
from castore.prune import GRACE, PAUSE, PruneReport, prune
from castore.publish import OVERDUE
from castore.repository import Repository
from castore.snapshot import Snapshot, name_of
from castore.usage import usage
from tests.faults import BadReads, Clock, Counting, Outage, Wrapped
from tests.helpers import (
    checked,
    clocked,
    contents,
    draft,
    encode_raw,
    flip,
    flip_object,
    headers,
    new_repository,
    overwrite,
    problems,
    raw,
    series,
    with_backend,
)

kinds = pytest.mark.parametrize("kind", ["local", "memory"])


def sweep(repository: Repository, clock: Clock, **how: Any) -> PruneReport:
    """`prune` after the pause that two sweeps must keep."""
    clock.sleep(PAUSE * OVERDUE + 1)
    how.setdefault("grace", 0)
    return prune(repository, **how)


def objects(repository: Repository) -> dict[str, bytes]:
    return {n: d for n, d in raw(repository).items() if n.startswith("objects/")}


@kinds
def test_only_what_nobody_needs_goes(kind: str, tmp_path: Path) -> None:
    repository, clock = clocked(new_repository(kind, tmp_path))
    files = series(6)
    names = [repository.commit(draft({"m": f, "n": b"%d" % i})).name for i, f in enumerate(files)]
    before = raw(repository)
    report = sweep(repository, clock)
    assert (report.objects, report.bytes, report.victims) == (0, 0, [])
    assert report.kept_objects == len(objects(repository))
    assert raw(repository) == before
    for name in names[1::2]:
        repository.forget(name)
    total = sum(map(len, objects(repository).values()))
    report = sweep(repository, clock)
    left = objects(repository)
    assert report.kept_bytes == sum(map(len, left.values()))
    assert report.bytes + report.kept_bytes == total
    assert report.objects + report.kept_objects == len(
        [n for n in before if n.startswith("objects/")]
    )
    assert sorted(n.id for n in report.expired) == sorted(n.id for n in names[1::2])
    assert report.objects == 3 * 2 + 1  # trees, small files, and the last delta
    assert not report.failed
    for i in (0, 2, 4):
        assert contents(repository, names[i]) == {"m": files[i], "n": b"%d" % i}
    assert problems(repository) == []
    for name in names[::2]:
        repository.forget(name)
    sweep(repository, clock)
    assert {n.partition("/")[0] for n in raw(repository)} - {"lock", "lock.queue"} == (
        {"config.json"} if kind == "local" else {"config.json", "prune.json"}
    )


@kinds
def test_gc1_what_another_namespace_needs_stays(kind: str, tmp_path: Path) -> None:
    repository, clock = clocked(new_repository(kind, tmp_path))
    one, two = series(2)
    mine = repository.commit(draft({"m": one, "mine": b"1"}), namespace="a").name
    theirs = repository.commit(draft({"x/m": one, "m": two}), namespace="b").name
    repository.forget(mine)
    report = sweep(repository, clock)
    assert report.objects == 2
    assert contents(repository, theirs) == {"x/m": one, "m": two}
    assert problems(repository) == []


@kinds
def test_the_grace_period_is_kept_by_the_store_s_clock(kind: str, tmp_path: Path) -> None:
    repository, clock = clocked(new_repository(kind, tmp_path))
    name = repository.commit(draft({"m": b"1"})).name
    kept = repository.commit(draft({"k": b"2"})).name
    clock.sleep(20 * 86_400)
    repository.forget(name)
    for _ in range(2):
        clock.sleep(6 * 86_400)
        report = prune(repository)
        assert (report.objects, report.expired) == (0, [])
        assert list(repository.forgotten()) == [name]
    back = repository.unforget(name)
    assert contents(repository, back) == {"m": b"1"}
    repository.forget(back)
    clock.sleep(GRACE + 60)
    report = prune(repository)
    assert report.expired == [back]
    assert report.objects == 2
    assert list(repository.forgotten()) == []
    assert contents(repository, kept) == {"k": b"2"}


@kinds
def test_young_objects_that_nobody_needs_yet_stay_with_their_bases(
    kind: str, tmp_path: Path
) -> None:
    repository, clock = clocked(new_repository(kind, tmp_path))
    one, two, three = series(3)
    first = repository.commit(draft({"m": one})).name
    second = repository.commit(draft({"m": two})).name
    base = {d for d, h in headers(repository).items() if h.content_length > 60_000 and not h.base}
    clock.sleep(GRACE + 60)
    third = repository.commit(draft({"m": three})).name
    young = {d: h.base for d, h in headers(repository).items() if h.depth == 2}
    for name in (first, second, third):
        repository.backend.delete(name.path)
    report = prune(repository)
    left = set(headers(repository))
    assert report.objects > 0
    assert base | set(young) | set(young.values()) <= left
    clock.sleep(GRACE + 60)
    prune(repository)
    assert headers(repository) == {}


@kinds
def test_a_second_forget_restarts_the_clock(kind: str, tmp_path: Path) -> None:
    repository, clock = clocked(new_repository(kind, tmp_path))
    name = repository.commit(draft({"m": b"1"})).name
    data = repository.backend.get(name.path)
    repository.forget(name)
    clock.sleep(GRACE - 60)
    repository.backend.create(name.path, data)
    repository.forget(name)
    clock.sleep(GRACE - 60)
    assert prune(repository).objects == 0
    assert contents(repository, repository.unforget(name)) == {"m": b"1"}


@kinds
def test_what_is_listed_and_forgotten_at_once_is_kept(kind: str, tmp_path: Path) -> None:
    """A forget that died between its two steps."""
    repository, clock = clocked(new_repository(kind, tmp_path))
    name = repository.commit(draft({"m": b"1"})).name
    repository.backend.create(name.forgotten, repository.backend.get(name.path))
    report = sweep(repository, clock)
    assert (report.objects, report.expired) == (0, [])
    assert contents(repository, name) == {"m": b"1"}
    assert list(repository.forgotten()) == [name]


@kinds
def test_ux6_a_dry_run_changes_nothing_and_says_what_the_run_does(
    kind: str, tmp_path: Path
) -> None:
    repository, clock = clocked(new_repository(kind, tmp_path))
    files = series(5)
    names = [repository.commit(draft({"m": f})).name for f in files]
    for name in names[2:]:
        repository.forget(name)
    clock.sleep(60)
    before = raw(repository)
    dry = prune(repository, grace=0, dry_run=True)
    assert raw(repository) == before
    assert dry.dry_run
    real = sweep(repository, clock)
    assert not real.dry_run
    assert dry.objects == real.objects > 0
    assert (dry.bytes, dry.victims, dry.expired) == (real.bytes, real.victims, real.expired)
    assert (dry.kept_objects, dry.kept_bytes) == (real.kept_objects, real.kept_bytes)
    gone = {n for n in before if n.startswith("objects/")} - set(objects(repository))
    assert {object_name(d) for d, _ in real.victims} == gone
    assert all(len(before[object_name(d)]) == size for d, size in real.victims)


@kinds
@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize(
    ("damage", "error"),
    [
        ("tree flipped", CorruptObjectError),
        ("tree gone", ObjectNotFoundError),
        ("tree of a newer format", FormatError),
        ("document flipped", IntegrityError),
        ("document of a newer format", IntegrityError),
        ("document unreadable", BackendError),
        ("tree unreadable", BackendError),
    ],
)
def test_gc1_nothing_is_deleted_beside_a_snapshot_that_cannot_be_read(
    kind: str, forgotten: bool, damage: str, error: type[CastoreError], tmp_path: Path
) -> None:
    repository, clock = clocked(new_repository(kind, tmp_path))
    commit = repository.commit(draft({"m": b"1"}))
    orphan = repository.commit(draft({"orphan": b"2"}), namespace="b").name
    repository.backend.delete(orphan.path)
    clock.sleep(GRACE + 60)
    path = commit.name.path
    if forgotten:
        repository.forget(commit.name)
        path = commit.name.forgotten
    tree = object_name(commit.snapshot.tree)
    broken = repository
    if damage == "tree flipped":
        flip_object(repository, commit.snapshot.tree)
    elif damage == "tree gone":
        repository.backend.delete(tree)
    elif damage == "tree of a newer format":
        data = bytes(repository.store.read(commit.snapshot.tree)).replace(
            b'"format":1', b'"format":2'
        )
        repository.store.create_many([(digest_of(data), encode_raw(data))])
        body = Snapshot(digest_of(data), commit.name.time, "main").encode()
        path = name_of(body, "main", "snapshot", commit.name.time).path
        if forgotten:
            path = path.replace("snapshots/", "forgotten/", 1)
        repository.backend.create(path, body)
    elif damage.startswith("document") and "unreadable" not in damage:
        data = repository.backend.get(path)
        new = data.replace(b'"format":1', b'"format":2') if "newer" in damage else flip(data, 20)
        overwrite(repository, path, new)
    else:
        refused = path if "document" in damage else tree
        outage = Outage(clock, lambda call, name: call == "get" and name == refused)
        broken = with_backend(repository, outage, sleep=clock.sleep)
    before = raw(repository)
    for dry in (True, False):
        with pytest.raises(error):
            prune(broken, dry_run=dry)
    assert raw(repository) == before


@kinds
def test_a_bad_read_of_a_header_does_not_cost_the_base_below(kind: str, tmp_path: Path) -> None:
    """Of an object that stays the base must be known: AU4, a header may read wrong once."""
    repository, clock = clocked(new_repository(kind, tmp_path))
    one, two = series(2)
    first = repository.commit(draft({"m": one})).name
    second = repository.commit(draft({"m": two})).name
    [delta] = [d for d, h in headers(repository).items() if h.base]
    repository.forget(first)
    clock.sleep(60)

    class BadHeader(Wrapped):
        times = 0

        def get(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
            data = bytes(self.inner.get(name, start, stop))
            if name != object_name(delta) or stop != 64 or self.times <= 0:
                return data
            self.times -= 1
            return flip(data, 20)

    backend = BadHeader(clock)
    bad = with_backend(repository, backend, sleep=clock.sleep)
    before = raw(repository)
    backend.times = 99
    with pytest.raises(CorruptObjectError, match=f"{delta}.*nothing was deleted"):
        prune(bad, grace=0)
    assert raw(repository) == before
    backend.times = 1
    assert prune(bad, grace=0).objects == 1
    assert contents(repository, second) == {"m": two}
    sweep(repository, clock)
    assert contents(repository, second) == {"m": two}


@kinds
def test_deltas_go_before_their_bases(kind: str, tmp_path: Path) -> None:
    repository, clock = clocked(new_repository(kind, tmp_path))
    for name in [repository.commit(draft({"m": f})).name for f in series(5)]:
        repository.forget(name)
    depth = {object_name(d): h.depth for d, h in headers(repository).items()}
    counting = Counting(clock)
    clock.sleep(60)
    prune(with_backend(repository, counting, sleep=clock.sleep), grace=0)
    order = [depth[n] for n in counting.deleted if n in depth]
    assert order == sorted(order, reverse=True)
    assert max(order) == 4
    documents = [i for i, n in enumerate(counting.deleted) if n.startswith("forgotten/")]
    assert max(documents) < min(i for i, n in enumerate(counting.deleted) if n in depth)


@kinds
def test_a_delta_that_cannot_be_deleted_keeps_its_bases(kind: str, tmp_path: Path) -> None:
    repository, clock = clocked(new_repository(kind, tmp_path))
    for name in [repository.commit(draft({"m": f})).name for f in series(4)]:
        repository.forget(name)
    found = headers(repository)
    stuck = next(d for d, h in found.items() if h.depth == 2)
    chain = repository.store.chain(stuck, {})
    assert chain is not None
    outage = Outage(clock, lambda call, name: call == "delete" and name == object_name(stuck))
    clock.sleep(60)
    report = prune(with_backend(repository, outage, sleep=clock.sleep), grace=0)
    assert [n for n, _ in report.failed] == [object_name(stuck)]
    assert set(headers(repository)) == set(chain)
    assert report.objects == len(found) - 3
    assert report.kept_objects == 3
    assert problems(repository) == []
    again = sweep(repository, clock)
    assert (again.objects, again.failed) == (3, [])
    assert headers(repository) == {}


def test_gc4_of_2500_objects_a_few_refuse_and_all_counts_are_true(tmp_path: Path) -> None:
    repository, clock = clocked(new_repository("memory", tmp_path))
    keep = repository.commit(draft({"keep": b"k"})).name
    name = repository.commit(draft({f"{i}": b"%d" % i for i in range(2500)})).name
    repository.forget(name)
    stored = objects(repository)
    stuck = sorted(set(stored) - {object_name(d) for d in repository.tree(keep).blobs()})[
        5:2000:700
    ]
    outage = Outage(clock, lambda call, name: call == "delete" and name in stuck)
    clock.sleep(60)
    report = prune(with_backend(repository, outage, sleep=clock.sleep), grace=0)
    left = objects(repository)
    assert sorted(n for n, _ in report.failed) == stuck
    assert all("does not answer" in why for _, why in report.failed)
    assert report.objects == 2501 - len(stuck) == len(stored) - len(left)
    assert report.bytes == sum(map(len, stored.values())) - sum(map(len, left.values()))
    assert report.kept_objects == len(left) == 2 + len(stuck)
    assert report.kept_bytes == sum(map(len, left.values()))
    again = sweep(repository, clock)
    assert (again.objects, again.failed) == (len(stuck), [])
    assert set(objects(repository)) < set(left)
    assert contents(repository, keep) == {"keep": b"k"}


@kinds
def test_gc7_orphans_of_a_commit_that_died_are_found_and_freed(kind: str, tmp_path: Path) -> None:
    repository, clock = clocked(new_repository(kind, tmp_path))
    keep = repository.commit(draft({"keep": b"k"})).name
    before = raw(repository)
    lost = repository.commit(draft({"m": series(1)[0], "x": b"1"})).name
    repository.backend.delete(lost.path)
    found, report = checked(repository)
    assert found == []
    assert report.unreferenced == 4
    orphans = sum(map(len, raw(repository).values())) - sum(map(len, before.values()))
    assert usage(repository).unreferenced == orphans
    assert prune(repository).objects == 0
    result = sweep(repository, clock)
    assert (result.objects, result.bytes) == (4, orphans)
    after = raw(repository)
    after.pop("prune.json", None)
    assert after == before
    assert contents(repository, keep) == {"keep": b"k"}


def test_gc7_old_temporary_files_and_old_fences_go(tmp_path: Path) -> None:
    repository = new_repository("local", tmp_path)
    root = Path(repository.url)
    name = repository.commit(draft({"m": b"1"})).name
    fences = []
    for i, days in enumerate((400, 300)):
        fence = name_of(bytes([i]), "main", "snapshot", name.time - 10 - i)
        repository.backend.create(fence.path, b"")
        os.utime(root / fence.path, (0, time.time() - days * 86_400))
        fences.append(fence)
    for leaf, hours in (("old", 30), ("new", 1)):
        (root / "tmp" / leaf).write_bytes(b"x" * 100)
        os.utime(root / "tmp" / leaf, (0, time.time() - hours * 3600))
    before = raw(repository)
    prune(repository, dry_run=True)
    assert raw(repository) == before
    prune(repository)
    assert not (root / fences[0].path).exists()
    assert (root / fences[1].path).exists()
    left = {p.name for p in (root / "tmp").iterdir()}
    assert "new" in left
    assert "old" not in left
    assert contents(repository, name) == {"m": b"1"}


def test_a_store_without_conditions_wants_to_hear_that_nobody_writes(tmp_path: Path) -> None:
    repository, clock = clocked(new_repository("memory", tmp_path))

    class Plain(Wrapped):
        kind = "webdav"

        def probe(self) -> bool:
            return False

    plain = with_backend(repository, Plain(clock), sleep=clock.sleep)
    name = plain.commit(draft({"m": b"1"})).name
    plain.forget(name)
    clock.sleep(60)
    before = raw(repository)
    with pytest.raises(BackendError, match="--offline"):
        prune(plain, grace=0)
    assert raw(repository) == before
    assert prune(plain, grace=0, offline=True).objects == 2
    assert objects(repository) == {}


@kinds
def test_a_negative_grace_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="grace"):
        prune(new_repository(kind, tmp_path), grace=-1)


@kinds
def test_a_prune_of_nothing(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    before = raw(repository)
    assert prune(repository).kept_objects == 0
    assert raw(repository) == before


def test_bad_reads_of_a_tree_stop_a_prune(tmp_path: Path) -> None:
    repository, clock = clocked(new_repository("memory", tmp_path))
    commit = repository.commit(draft({"m": b"1"}))
    clock.sleep(GRACE + 60)
    tree = object_name(commit.snapshot.tree)
    spoil: Callable[[str, bytes, int], bytes] = lambda name, data, n: (  # noqa: E731
        flip(data, -1) if name == tree else data
    )
    before = raw(repository)
    with pytest.raises(CorruptObjectError, match=commit.snapshot.tree):
        prune(with_backend(repository, BadReads(clock, spoil), sleep=clock.sleep))
    assert raw(repository) == before
