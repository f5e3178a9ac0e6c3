"""Checks in parts: all parts together tell what one check tells, and each holds its part only."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from castore import table as table_module
from castore.backend import Stat
from castore.check import CheckReport, Problem, check
from castore.cli import app
from castore.errors import InvalidInputError
from castore.frame import parse_header
from castore.objects import digest_of_name, object_name
from castore.parts import Part
from castore.repository import Repository
from castore.snapshot import Snapshot, name_of
from castore.table import NONE, Needs, Table, raw_of
from castore.tree import File, Slice, build_tree
from castore.workers import Processes
from tests.damage import WAYS, Damage, fill, publish, put
from tests.faults import Counting, Outage, Wrapped
from tests.helpers import (
    blobs,
    draft,
    encode_delta,
    flip_object,
    headers,
    new_repository,
    noise,
    raw,
    with_backend,
)
from tests.stores import new_store

COUNTS = (1, 2, 3, 16)
"""How many parts; 256 where it is said."""

Told = dict[tuple[str, str], set[tuple[str, str]]]


def united(problems: Iterable[Problem]) -> Told:
    """Problems merged by kind and object, with all that needs them."""
    result: Told = defaultdict(set)
    for problem in problems:
        result[problem.kind, problem.object].update(problem.needed_by)
    return dict(result)


def in_parts(
    repository: Repository, count: int, **how: Any
) -> tuple[list[list[Problem]], list[CheckReport]]:
    """What each of ``count`` parts tells."""
    problems, reports = [], [CheckReport() for _ in range(count)]
    for k, report in enumerate(reports, 1):
        problems.append(list(check(repository, part=(k, count), report=report, **how)))
    return problems, reports


def same_in_parts(repository: Repository, counts: Iterable[int] = COUNTS, **how: Any) -> Told:
    """Check as a whole and in parts; gives what both tell."""
    whole = CheckReport()
    expected = united(check(repository, report=whole, **how))
    for count in counts:
        problems, reports = in_parts(repository, count, **how)
        assert united(p for found in problems for p in found) == expected, count
        assert sum(r.objects for r in reports) == whole.objects
        assert {r.snapshots for r in reports} == {whole.snapshots}
        assert whole.unstable == [] == [name for r in reports for name in r.unstable]
        assert {r.unreferenced for r in reports} == {whole.unreferenced if count == 1 else 0}
        if not expected and how.get("since") is None:
            assert sum(r.bytes_read for r in reports) == whole.bytes_read
    return expected


# -- what they tell


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_the_parts_together_tell_what_one_check_tells(
    way: Callable[[Damage], None], tmp_path: Path
) -> None:
    repository = Repository.init(tmp_path / "store")
    way(Damage(repository, fill(repository), random.Random(way.__name__)))
    kinds = {kind for kind, _ in same_in_parts(repository)}
    kinds |= {kind for kind, _ in same_in_parts(repository, (3, 16), read_data=True)}
    assert kinds or way is Damage.fence


def test_what_is_no_base_is_told_by_one_part(tmp_path: Path) -> None:
    """Trees, documents, lone objects and names, though every part reads all documents and trees."""
    repository = Repository.init(tmp_path / "store")
    damage = Damage(repository, fill(repository), random.Random(1))
    for name in ("missing_tree", "corrupt_tree", "damaged_document", "missing_blob"):
        getattr(damage, name)()
    damage.malformed_names()
    expected = list(check(repository, read_data=True))
    problems, _ = in_parts(repository, 16, read_data=True)
    twice = [p.object for some in problems for p in some]
    assert sorted(twice) == sorted(p.object for p in expected)


@pytest.mark.parametrize("seed", range(8))
def test_much_damage_at_once_is_told_the_same_in_parts(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    repository = Repository.init(tmp_path / "store")
    names = fill(repository)
    damage = Damage(repository, names, rng)
    for way in rng.sample(WAYS, 5):
        way(damage)
    since = sorted(n.time for n in names)[rng.randrange(1, 6)]
    counts = rng.sample(COUNTS, 2)
    same_in_parts(repository, counts)
    same_in_parts(repository, counts, read_data=True)
    same_in_parts(repository, counts, since=since)
    same_in_parts(repository, counts, since=since, read_data=True)


def test_a_sound_repository_in_parts(tmp_path: Path) -> None:
    """Also after all bytes were read and layouts verified; in as many parts as there may be."""
    repository = Repository.init(tmp_path / "store")
    fill(repository)
    assert same_in_parts(repository, read_data=True, layout=True) == {}
    assert same_in_parts(repository, [256]) == {}
    empty = Repository.init(tmp_path / "empty")
    assert same_in_parts(empty, [1, 2, 256], read_data=True) == {}


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_all_damage_at_once_on_a_disk_and_on_s3(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    repository = new_store(request, tmp_path, kind).repository
    damage = Damage(repository, fill(repository), random.Random(5))
    for name in ("cut", "corrupt_base", "missing_base", "ring", "short_tree", "missing_tree"):
        getattr(damage, name)()
    damage.malformed_names()
    damage.damaged_document()
    found = same_in_parts(repository, [3] if kind == "s3" else [256], read_data=True)
    assert {kind for kind, _ in found} == {"missing", "corrupt", "malformed"}
    assert len([name for kind, name in found if kind == "malformed"]) >= 18


def test_layouts_in_parts(tmp_path: Path) -> None:
    """A driver nobody has, a wrong SHA-256: told by one part each."""
    repository = Repository.init(tmp_path / "store")
    own = put(repository, b"own")
    wrong = build_tree({"own": File(3, "0" * 64, False, (Slice(own, 0, 3),))}).encode()
    tree = put(repository, wrong)
    for i in range(4):
        publish(repository, tree, 10 + i)
    data = Snapshot(tree, 3, "a", driver="nobody.wrote").encode()
    repository.backend.create(name_of(data, "a", "snapshot", 3).path, data)
    found = same_in_parts(repository, layout=True)
    assert [len(v) for _, v in sorted(found.items())] == [4, 1]
    problems, _ = in_parts(repository, 16, layout=True)
    assert len([p for some in problems for p in some]) == 5


def test_a_store_that_does_not_answer_for_an_object(tmp_path: Path) -> None:
    """An outage of a base, of its size alone, of a document: unreadable, as in one check."""
    repository = Repository.init(tmp_path / "store")
    names = fill(repository)
    damage = Damage(repository, names, random.Random(0))
    refused = {object_name(damage.bases[0]), names[3].path}
    outage = Outage(repository.backend, lambda call, name: call == "get" and name in refused)
    found = same_in_parts(with_backend(repository, outage), read_data=True)
    assert set(found) == {("unreadable", damage.bases[0]), ("unreadable", names[3].path)}
    outage = Outage(repository.backend, lambda call, name: call == "stat" and name in refused)
    problems, _ = in_parts(with_backend(repository, outage), 16)
    assert united(p for some in problems for p in some).keys() == {("unreadable", damage.bases[0])}


# -- what a part does


@pytest.mark.parametrize("wrong", [(0, 3), (4, 3), (1, 0), (1, 257), (-1, -1), (1.0, 2), (1, "2")])
def test_a_part_that_is_none_is_refused(wrong: Any, tmp_path: Path) -> None:
    repository = new_repository("memory", tmp_path)
    with pytest.raises(InvalidInputError, match="expected K/N"):
        list(check(repository, part=wrong))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 255, 256])
def test_every_object_is_of_one_part_and_parts_are_runs_of_much_the_same_size(count: int) -> None:
    digests = [f"{b:02x}{'00' * 31}" for b in range(256)]
    parts = [Part(k, count) for k in range(1, count + 1)]
    owners = [[p.number for p in parts if p.holds(d)] for d in digests]
    assert [len(o) for o in owners] == [1] * 256
    assert owners == sorted(owners)
    sizes = [owners.count([p.number]) for p in parts]
    assert max(sizes) - min(sizes) <= 1
    for part in parts:
        mask = part.among(raw_of(digests))
        assert mask.tolist() == [part.holds(d) for d in digests]
    assert len(parts[0].among(raw_of([]))) == 0


class Lists(Wrapped):
    """Keeps what was listed, and how many names of it."""

    def __init__(self, inner: Any):
        super().__init__(inner)
        self.listed: list[tuple[str, int | None]] = []
        self.got: list[str] = []

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> Iterator[Stat]:
        self.listed.append((prefix, limit))
        found: Iterator[Stat] = self.inner.list(prefix, after, limit)
        return found

    def get(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        self.got.append(name)
        return bytes(self.inner.get(name, start, stop))


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_a_part_lists_its_own_folders_and_asks_for_its_own_objects(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Trees apart, and without deltas: each object's header once, by one part."""
    repository = new_store(request, tmp_path, kind).repository
    repository.commit(draft({f"f{i}": noise(80, i) for i in range(60)}))
    tree = repository.snapshot("latest").tree
    asked: list[str] = []
    for k in range(1, 5):
        seen = Lists(repository.backend)
        assert list(check(with_backend(repository, seen), part=(k, 4))) == []
        own = [f"objects/{b:02x}" for b in range(256) if b * 4 // 256 == k - 1]
        assert [p for p, limit in seen.listed if limit is None] == ["snapshots", *own]
        jumps = [(p, limit) for p, limit in seen.listed if limit is not None]
        assert set(jumps) == ({("objects", 1)} if k == 1 else set())
        assert len(jumps) <= 2 * 60 + 3
        objects = [n for n in seen.got if n.startswith("objects/") and n != object_name(tree)]
        assert all(n[:10] in own for n in objects)
        asked += objects
    assert sorted(asked) == sorted(object_name(d) for d in headers(repository) if d != tree)


def test_a_part_holds_what_it_looks_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the tables: a sixteenth for lone objects; for deltas their bases beside."""
    tables: list[Table] = []
    needs: list[int] = []

    def list_table(*how: Any) -> tuple[Table, list[str]]:
        table, strange = table_module.list_table(*how)
        tables.append(table)
        return table, strange

    class Seen(Needs):
        def table(self) -> Any:
            rows = super().table()
            needs.append(len(rows))
            return rows

    monkeypatch.setattr("castore.check.list_table", list_table)
    monkeypatch.setattr("castore.check.Needs", Seen)
    repository = Repository.init(tmp_path / "raw")
    repository.commit(draft({f"f{i}": noise(80, i) for i in range(800)}))
    in_parts(repository, 16)
    sizes = [len(table) for table in tables]
    assert sum(sizes) == sum(needs) == len(headers(repository))
    assert max(sizes) <= 2 * sum(sizes) / 16
    assert max(needs) <= 2 * sum(needs) / 16

    tables.clear()
    chains = Repository.init(tmp_path / "chains")
    fill(chains)
    in_parts(chains, 16)
    found = headers(chains)
    for k, table in enumerate(tables, 1):
        own = {d for d in found if Part(k, 16).holds(d)}
        below: set[str] = set()
        todo = own
        while todo := {found[d].base for d in todo if found[d].base} - below:
            below |= todo
        assert {table.digest(p) for p in range(len(table))} == own | below
        assert table.listed == len(own)
        assert bool(np.all(table.known))


def test_bases_that_were_not_listed_join_a_table() -> None:
    """Of three chains, in waves: there, gone, there on what is gone."""
    listed = [f"{i:02x}" + "11" * 31 for i in range(4)]
    far = [f"f{i}" + "22" * 30 + "00" for i in range(4)]
    table = Table(raw_of(listed), np.ones(4, np.int64))

    def header(base: str) -> Any:
        repeated = encode_delta(b"abcd", b"abce", base, 1, 1)
        return parse_header(repeated)

    table.learn(np.arange(4), [header(far[0]), header(far[1]), header(far[0]), header(listed[0])])
    assert table.below(np.arange(4)).tolist() == []
    before, new = table.incomplete, table.adopt()
    assert table.named(new) == far[:2]
    assert (before, table.incomplete) == (True, False)
    table.learn(new[:1], [header(far[2])])
    table.drop(new[1:].tolist())
    assert table.lost == {1: far[1]}
    assert table.place(far[1]) == NONE
    assert [table.place(d) for d in [*listed, far[0]]] == [0, 1, 2, 3, 4]
    assert table.named(table.adopt()) == [far[2]]
    table.learn(np.array([table.place(far[2])]), [header(far[3])])
    table.lose()
    assert table.chain(listed[3]) == [listed[3], listed[0], far[0], far[2], far[3]]
    assert [table.is_far(d) for d in (listed[0], far[0], far[3], "x")] == [
        False,
        True,
        False,
        False,
    ]
    assert table.closure(table.mask([3])).tolist() == [True, False, False, True, True, False, True]


# -- with the other options


def test_sample_reads_a_share_of_the_part(tmp_path: Path) -> None:
    repository = Repository.init(tmp_path / "store")
    repository.commit(draft({f"f{i}": noise(200, i) for i in range(79)}))
    tree = repository.snapshot("latest").tree
    for k in (1, 2):
        seen = Counting(repository.backend)
        assert list(check(with_backend(repository, seen), part=(k, 2), sample=0.25)) == []
        own = [d for d in headers(repository) if Part(k, 2).holds(d)]
        read = [digest_of_name(n) for n in seen.read if n.startswith("objects/")]
        read.remove(tree)
        assert len(read) == round(len(own) / 4)
        assert set(read) <= set(own)


def test_an_interrupted_part_goes_on_with_its_own_state(tmp_path: Path) -> None:
    repository = Repository.init(tmp_path / "store")
    repository.commit(draft({f"f{i:02d}": noise(200, i) for i in range(60)}))
    state, seen = tmp_path / "state", list[int]()

    def stop(size: int) -> None:
        seen.append(size)
        if len(seen) == 6:
            raise KeyboardInterrupt

    how: dict[str, Any] = {"read_data": True, "state": str(state)}
    with pytest.raises(KeyboardInterrupt):
        list(check(repository, part=(2, 3), progress=stop, **how))
    for other in ((1, 3), (2, 4), None):
        with pytest.raises(InvalidInputError, match="of this part"):
            list(check(repository, part=other, **how))
    kept = {line.split()[0] for line in state.read_text().splitlines()[1:]}
    report = CheckReport()
    assert list(check(repository, part=(2, 3), report=report, **how)) == []
    sizes = {digest_of_name(n): len(d) for n, d in raw(repository).items() if "objects/" in n}
    own = {d for d in sizes if Part(2, 3).holds(d)}
    assert len(kept & own) == len(kept) >= 5
    assert report.bytes_read == sum(sizes[d] for d in own - kept)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_parts_by_workers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("castore.check.BATCH", 4)
    repository = Repository.init(tmp_path / "store")
    damage = Damage(repository, fill(repository), random.Random(5))
    for name in ("cut", "corrupt_base", "missing_base", "short_tree", "damaged_document"):
        getattr(damage, name)()
    made: Executor = ThreadPoolExecutor(2) if kind == "threads" else Processes(1)
    with made as executor:
        for k in (1, 2):
            alone, report = CheckReport(), CheckReport()
            how: dict[str, Any] = {"part": (k, 2), "read_data": True, "layout": True}
            expected = list(check(repository, report=alone, **how))
            assert expected
            assert list(check(repository, report=report, executor=executor, **how)) == expected
            assert report == alone


# -- the command


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["check", *words])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_tells_of_a_part(tmp_path: Path) -> None:
    repository = Repository.init(tmp_path / "store")
    name = repository.commit(draft({f"f{i}": noise(200, i) for i in range(20)})).name
    [digest] = blobs(repository, name, "f3")
    flip_object(repository, digest)
    url, codes, count = str(tmp_path / "store"), [], 0
    for k in range(1, 5):
        words = ["-r", url, "--read-data", "--part", f"{k}/4"]
        code, shown, said = run(*words)
        codes.append(code)
        assert f"part {k}/4: 1 snapshot, " in said
        assert shown.startswith(f"corrupt: {digest}") == (code == 3)
        code, shown, _ = run(*words, "--json")
        *found, summary = map(json.loads, shown.splitlines())
        assert [p["object"] for p in found] == [digest] * (code == 3)
        assert summary["part"] == [k, 4]
        assert "unreferenced" not in summary
        count += summary["objects"]
    assert sorted(codes) == [0, 0, 0, 3]
    assert Part(codes.index(3) + 1, 4).holds(digest)
    assert count == 21


@pytest.mark.parametrize("text", ["0/3", "4/3", "1/257", "3", "1/2/3", "a/b", "-1/2", "1/", "١/٢"])
def test_the_command_refuses_what_is_no_part(text: str, tmp_path: Path) -> None:
    Repository.init(tmp_path / "store")
    code, _, said = run("-r", str(tmp_path / "store"), "--part", text)
    assert code == 2
    assert "expected" in said or "option" in said


def test_the_command_does_not_repair_in_parts(tmp_path: Path) -> None:
    Repository.init(tmp_path / "store")
    url = str(tmp_path / "store")
    code, _, said = run("-r", url, "--part", "1/2", "--repair-from", url)
    assert code == 2
    assert "--part" in said
