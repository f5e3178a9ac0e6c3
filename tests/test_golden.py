"""What a release of format 1 wrote is read byte for byte; damage and newer formats are told."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from castore import check as check_module
from castore.copy import copy
from castore.errors import FormatError
from castore.prune import prune
from castore.repository import Repository
from castore.tree import File, Folder, Link
from tests.helpers import (
    checked,
    contents,
    folder,
    headers,
    memory_url,
    problems,
    raw,
    usage_adds_up,
)

HERE = Path(__file__).parent / "golden"
EXPECTED: dict[str, Any] = json.loads((HERE / "expected.json").read_text())


def files(root: Path) -> dict[str, Any]:
    return {
        str(p.relative_to(root)): os.readlink(p) if p.is_symlink() else p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_symlink() or p.is_file()
    }


def golden(tmp_path: Path, overlay: str = "") -> Path:
    """A copy to work on, with what ``overlay`` changes."""
    target = tmp_path / "store"
    shutil.copytree(HERE / "format-1", target)
    if overlay:
        top = HERE / overlay
        removed = top / "removed.txt"
        for name in removed.read_text().split() if removed.exists() else []:
            (target / name).unlink()
        for name, data in files(top).items():
            if name == "removed.txt":
                continue
            path = target / name
            path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(data) if isinstance(data, str) else path.write_bytes(data)
    return target


def test_it_is_small() -> None:
    assert sum(p.stat().st_size for p in HERE.rglob("*") if p.is_file()) < 300_000


def test_every_file_is_read_byte_for_byte(tmp_path: Path) -> None:
    root = golden(tmp_path)
    before = files(root)
    repository = Repository.open(root)
    assert {n.id: n.path for n in repository.snapshots()} == {
        id: s["name"] for id, s in EXPECTED["snapshots"].items()
    }
    assert repository.namespaces() == ["b", "team.a"]
    for id, expected in EXPECTED["snapshots"].items():
        snapshot = repository.snapshot(id)
        assert snapshot.tree == expected["tree"]
        assert dict(snapshot.labels) == expected["labels"]
        assert dict(snapshot.facts) == expected["facts"]
        assert list(snapshot.parents) == expected["parents"]
        tree = repository.tree(id)
        assert list(tree.entries) == list(expected["entries"])
        repository.checkout(id, tmp_path / id, sha256=True)
        for path, want in expected["entries"].items():
            entry, full = tree.entries[path], tmp_path / id / path
            if isinstance(want, dict):
                assert isinstance(entry, File)
                data = full.read_bytes()
                assert hashlib.sha256(data).hexdigest() == want["sha256"] == entry.sha256
                assert len(data) == want["size"] == entry.size
                assert os.access(full, os.X_OK) == want["executable"] == entry.executable
                assert entry.blobs() == want["blobs"]
            elif want is None:
                assert entry == Folder()
                assert full.is_dir()
            else:
                assert entry == Link(want)
                assert os.readlink(full) == want
    assert files(root) == before


def test_it_holds_what_the_format_knows() -> None:
    repository = Repository.open(HERE / "format-1")
    found = headers(repository)
    assert {h.codec for h in found.values()} == {0, 1, 2}
    assert max(h.depth for h in found.values()) == 2
    entries = [e for s in EXPECTED["snapshots"].values() for e in s["entries"].items()]
    assert any(isinstance(e, dict) and e["slices"] > len(e["blobs"]) for _, e in entries)
    assert any(isinstance(e, dict) and e["executable"] for _, e in entries)
    assert any(isinstance(e, str) for _, e in entries)
    assert any(e is None for _, e in entries)
    assert not all(p.isascii() for p, _ in entries)
    assert EXPECTED["forgotten"]
    assert len(found) == len(EXPECTED["objects"])


def test_every_object_has_its_pinned_content(tmp_path: Path) -> None:
    repository = Repository.open(golden(tmp_path))
    assert set(headers(repository)) == set(EXPECTED["objects"])
    for digest, expected in EXPECTED["objects"].items():
        assert len(repository.store.read(digest)) == expected["length"]


def test_it_is_clean(tmp_path: Path) -> None:
    root = golden(tmp_path)
    before = files(root)
    repository = Repository.open(root)
    found, report = checked(repository, layout=True)
    assert found == []
    assert report.snapshots == len(EXPECTED["snapshots"])
    assert report.objects == len(EXPECTED["objects"])
    usage_adds_up(repository)
    assert files(root) == before


def test_the_lines_in_docs_read_it(tmp_path: Path) -> None:
    root = golden(tmp_path)
    script = HERE.parent.parent / "docs" / "read_object.py"
    repository = Repository.open(root)
    deepest = sorted(EXPECTED["objects"], key=lambda d: EXPECTED["objects"][d]["depth"])[-1]
    out = subprocess.run([sys.executable, script, root, deepest], capture_output=True, check=True)
    assert out.stdout == bytes(repository.store.read(deepest))


def test_it_can_be_written_to_as_ever(tmp_path: Path) -> None:
    repository = Repository.open(golden(tmp_path))
    before = {n: contents(repository, n) for n in repository.snapshots()}
    for name in list(before):
        repository.checkout(name, tmp_path / name.id)
        again = repository.commit([tmp_path / name.id], namespace=name.namespace).name
        assert contents(repository, again) == before[name]
        assert folder(tmp_path / name.id) == before[name]
    [gone] = repository.forgotten()
    assert (gone.id, gone.namespace) == next(iter(EXPECTED["forgotten"].items()))
    repository.unforget(gone)
    target = Repository.init(memory_url())
    copy(repository, target)
    assert {n.id for n in target.snapshots()} == {n.id for n in repository.snapshots()}
    for name in list(repository.snapshots()):
        if name not in before:
            repository.forget(name)
    prune(repository, grace=0)
    assert {n: contents(repository, n) for n in repository.snapshots()} == before
    assert problems(repository) == problems(target) == []


@pytest.mark.parametrize("kind", check_module.Kind.__args__)
def test_one_damaged_copy_for_each_kind_of_problem(kind: str, tmp_path: Path) -> None:
    root = golden(tmp_path, f"damaged/{kind}")
    before = files(root)
    [found] = problems(Repository.open(root), layout=kind == "layout")
    expected = EXPECTED["damaged"][kind]
    assert (
        (found.kind, found.object) == (kind, expected["object"]) == (expected["kind"], found.object)
    )
    assert sorted([n, p] for n, p in found.needed_by) == expected["needed_by"]
    assert files(root) == before


def test_there_is_a_damaged_copy_for_each_kind_and_no_other() -> None:
    assert {p.name for p in (HERE / "damaged").iterdir()} == set(check_module.Kind.__args__)


@pytest.mark.parametrize("what", ["config", "frame", "tree", "snapshot"])
def test_a_newer_format_is_refused_by_name_and_left_alone(what: str, tmp_path: Path) -> None:
    root = golden(tmp_path, f"newer/{what}")
    before = files(root)
    expected = EXPECTED["newer"][what]
    with pytest.raises(FormatError) as caught:
        Repository.open(root).checkout(expected["by"], tmp_path / "out")
    assert expected["says"] in str(caught.value)
    assert "upgrade castore" in str(caught.value)
    assert not (tmp_path / "out").exists()
    if what != "config":
        repository = Repository.open(root)
        with pytest.raises(FormatError, match="upgrade castore"):
            prune(repository, grace=0)
        [problem] = problems(repository)
        assert problem.kind == "malformed"
        assert "upgrade castore" in problem.detail
    assert files(root) == before


def test_opening_reads_and_writes_nothing_else() -> None:
    assert raw(Repository.open(HERE / "format-1"))
    assert not (HERE / "format-1" / "tmp").exists()
    assert not (HERE / "format-1" / "lock").exists()
