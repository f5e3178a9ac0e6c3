"""Layouts as snapshots, on a local disk and on S3: what is stored, and what comes back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from castore import AlreadyExistsError, File, LayoutError, Repository, SnapshotName
from castore.driver import find_driver
from castore.objects import object_name
from castore_pools import PoolsDriver, assemble, import_zoo, verify_zoo
from castore_pools.importing import drafts
from castore_pools.names import STATE
from castore_pools.places import SnapshotPlace
from castore_pools.verify import verify_place
from tests.drivers.pools.models import FROZEN, build, cell, collect, evaluate
from tests.helpers import blobs, flip_object, headers


def files(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()
    }


def records(root: Path) -> list[Any]:
    found: list[Any] = json.loads((root / cell("bertbase").registry_path).read_text())
    return found


def test_the_driver_is_found() -> None:
    assert isinstance(find_driver("pools"), PoolsDriver)


def test_a_layout_comes_back(repository: Repository, zoo: Path, tmp_path: Path) -> None:
    """Committed to local and S3, verified, materialised byte for byte, metrics reproduced."""
    made = list(import_zoo(repository, zoo, "team"))
    assert [c.snapshot.labels["part"] for c in made] == ["base", "pool"] * 3
    driver = PoolsDriver()
    copy = tmp_path / "copy"
    for commit in made:
        assert list(driver.verify(repository, commit.name)) == []
        driver.materialize(repository, commit.name, copy)
    registry = cell("bertbase").registry_path
    there, back = files(zoo), files(copy)
    assert json.loads(there.pop(registry)) == json.loads(back.pop(registry))
    assert there == back
    for arch in FROZEN:
        where, model = cell(arch), build(arch, 42)
        model.load_state_dict(assemble(copy / where.base_path, copy / where.pool_path(2)))
        log = next(r for r in records(copy) if r["arch"] == arch)["checkpoints"][2]
        assert evaluate(model) == (log["val_metric"], log["val_loss"])
    assert not [f for f in verify_zoo(copy) if f.verdict != "ok"]


def test_materialising_keeps_what_is_there(
    repository: Repository, zoo: Path, tmp_path: Path
) -> None:
    """Other cells' records stay; other content under a name refuses before anything is written."""
    made = {c.name.key: c.name for c in import_zoo(repository, zoo)}
    target = tmp_path / "target"
    collect(target, "wordavg", seed=5)
    mine = files(target)
    PoolsDriver().materialize(repository, made["pool.t5small__agnews.t5small_010"], target)
    assert [r["cell"] for r in records(target)] == ["t5small__agnews", "wordavg__agnews"]
    now = files(target)
    assert all(now[p] == d for p, d in mine.items() if "registry" not in p)
    with pytest.raises(AlreadyExistsError, match="other content"):
        PoolsDriver().materialize(repository, made["pool.wordavg__agnews.wordavg_010"], target)
    assert files(target) == now


def big_pool(root: Path, count: int = 7, full: bool = False, arch: str = "big") -> None:
    """A base and files of 200 kB tensors that drift, with 2 MB of frozen words."""
    torch.manual_seed(1)
    state = {"words": torch.randn(5000, 100), **{f"w{i}": torch.randn(50_000) for i in range(4)}}
    where = cell(arch)
    base = root / where.base_path
    base.parent.mkdir(parents=True)
    torch.save({"model_state_dict": state, "config": {}, "val_metric": 0.5}, base)
    folder = root / where.pool_folder
    folder.mkdir(parents=True)
    for i in range(count):
        state = {
            k: v if k == "words" else v * (1 + 1e-4 * torch.randn_like(v)) for k, v in state.items()
        }
        kept = {k: v for k, v in state.items() if full or k != "words"}
        fields = {"frozen_keys": [] if full else ["words"], "collect_step": i, "val_metric": 0.5}
        with open(folder / f"collect_{i:03d}.pth", "wb") as file:
            torch.save({"model_state_dict": kept, **fields}, file)


def test_delta_bases(repository: Repository, tmp_path: Path) -> None:
    """A pool file's delta base is the previous pool file, the first one's is the base."""
    big_pool(tmp_path / "zoo-root")
    base, pool = import_zoo(repository, tmp_path / "zoo-root")
    found = headers(repository)
    where = cell("big")

    def tensors(snapshot: Any, path: str) -> list[str]:
        return [b for b in blobs(repository, snapshot, path) if found[b].content_length == 200_000]

    last = tensors(base.name, where.base_path)
    assert len(last) == 4
    for i in range(7):
        here = tensors(pool.name, where.pool_path(i))
        expected = tensors(base.name, where.base_path) if i % 4 == 0 else last
        assert [found[b].base for b in here] == expected
        assert {found[b].depth for b in here} == {i % 4 + 1}
        last = here


def test_full_files_cost_little_more(tmp_path: Path) -> None:
    """Storing a pool in full files costs within 2 % of storing it in reduced files."""
    stored = {}
    for full in (False, True):
        root = tmp_path / f"zoo-{full}"
        big_pool(root, full=full)
        repository = Repository.init(tmp_path / f"store-{full}")
        stored[full] = sum(c.added for c in import_zoo(repository, root))
    assert stored[True] <= 1.02 * stored[False]


def test_frozen_tensors_are_stored_once_for_all_cells(
    repository: Repository, tmp_path: Path
) -> None:
    root = tmp_path / "zoo-root"
    big_pool(root, count=2)
    alone = sum(c.added for c in import_zoo(repository, root, "one"))
    big_pool(root, count=2, arch="other")  # another cell of the same weights, words included
    more = sum(c.added for c in import_zoo(repository, root, "two"))
    assert more < 0.02 * alone
    words = [
        b
        for b in blobs(repository, "two@latest", cell("other").base_path)
        if headers(repository)[b].content_length == 2_000_000
    ]
    assert set(words) <= set(blobs(repository, "one@latest", cell("big").base_path))


def test_a_pool_that_grew_is_imported_again(repository: Repository, tmp_path: Path) -> None:
    root = tmp_path / "zoo-root"
    big_pool(root, count=4)
    first = sum(c.added for c in import_zoo(repository, root))
    shutil.rmtree(root)
    big_pool(root, count=5)
    again = sum(c.added for c in import_zoo(repository, root))
    assert again < 0.2 * first
    where = cell("big")
    tree = repository.tree("main@latest")
    assert isinstance(tree.entries[where.pool_path(4)], File)


def test_what_belongs_to_no_cell(repository: Repository, zoo: Path, tmp_path: Path) -> None:
    """Code, notes and bases without a pool are kept in one snapshot; repositories and progress
    files are not."""
    root = tmp_path / "zoo-root"
    shutil.copytree(zoo, root)
    where = cell("wordavg")
    (root / "metadata/code/text_classification").mkdir(parents=True)
    (root / "metadata/code/text_classification/README.md").write_text("hello")
    (root / "NOTES").write_text("n")
    lone = root / "zoo/imdb/lstm/lstm_1.pth"
    lone.parent.mkdir(parents=True)
    shutil.copy(root / where.base_path, lone)
    (root / where.pool_folder / STATE).write_bytes(b"progress")
    (root / where.pool_folder / ".collect_009.pth.0123456789ab.tmp").write_bytes(b"crashed")
    Repository.init(root / "store")
    made = list(import_zoo(repository, root))
    *_, rest = made
    tree = repository.tree(rest.name)
    assert sorted(tree.entries) == [
        "NOTES",
        "metadata/code/text_classification/README.md",
        "zoo/imdb/lstm/lstm_1.pth",
    ]
    copy = tmp_path / "copy"
    for commit in made:
        PoolsDriver().materialize(repository, commit.name, copy)
    ours = files(root)
    kept = [p for p in ours if not p.startswith("store/") and "collect_state" not in p]
    assert sorted(files(copy)) == sorted(p for p in kept if not p.endswith(".tmp"))
    assert list(PoolsDriver().verify(repository, rest.name)) == []


def test_collect_is_what_commit_takes(repository: Repository, zoo: Path) -> None:
    """``castore commit --driver pools``: the same snapshots, without delta bases named."""
    made = [repository.commit(d, namespace="g") for d in PoolsDriver().collect(zoo)]
    assert [c.snapshot.driver for c in made] == ["pools"] * 6
    assert all(list(PoolsDriver().verify(repository, c.name)) == [] for c in made)


def test_damage_is_found_in_a_snapshot(repository: Repository, zoo: Path, tmp_path: Path) -> None:
    root = tmp_path / "zoo-root"
    shutil.copytree(zoo, root)
    where = cell("wordavg")
    (root / where.pool_path(1)).unlink()
    made = {c.name.key: c.name for c in import_zoo(repository, root)}
    defects = list(PoolsDriver().verify(repository, made["pool.wordavg__agnews.wordavg_010"]))
    assert defects == [(where.pool_folder, "numbering: 1 of 4 files: collect_001.pth")]


def stored(repository: Repository, root: Path) -> tuple[SnapshotName, list[str]]:
    """A cell whose tensors are blobs of their own; its snapshot, and the blobs of base and pool."""
    where = cell("wordavg")
    state = {"words": torch.randn(100, 200), "head": torch.randn(100, 300)}
    kept = {"model_state_dict": {"head": state["head"] + 1}, "frozen_keys": ["words"]}
    for path, fields in (
        (where.base_path, {"model_state_dict": state}),
        (where.pool_path(0), {**kept, "collect_step": 0}),
    ):
        (root / path).parent.mkdir(parents=True)
        torch.save(fields, root / path)
    (root / where.registry_path).parent.mkdir(parents=True)
    (root / where.registry_path).write_text(json.dumps([{"ckpt_path": where.base_path}]))
    *_, made = import_zoo(repository, root)
    paths = (where.base_path, where.pool_path(0), where.registry_path)
    return made.name, [_largest(repository, made.name, p) for p in paths]


def _largest(repository: Repository, name: SnapshotName, path: str) -> str:
    sizes = {d: len(repository.store.read(d)) for d in blobs(repository, name, path)}
    return max(sizes, key=lambda d: sizes[d])


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize(("which", "check"), [(0, "base"), (1, "readable"), (2, "layout")])
def test_lost_and_damaged_objects_are_findings(
    tmp_path: Path, lost: bool, which: int, check: str
) -> None:
    """HC4: the header of a file may be sound while a tensor is not; the others get their turn."""
    repository = Repository.init(tmp_path / "r")
    name, digests = stored(repository, tmp_path / "zoo")
    if lost:
        repository.backend.delete(object_name(digests[which]))
    else:
        flip_object(repository, digests[which])
    again = Repository.open(tmp_path / "r")
    defects = [d.partition(":")[0] for _, d in PoolsDriver().verify(again, name)]
    assert check in defects
    if check != "layout":
        place = SnapshotPlace(again, [str(name)])
        found = {f.check: f.verdict for f in verify_place(place) if f.broken}
        assert found[check] == ("missing" if lost else "unreadable")


def test_folders_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("y")
    with pytest.raises(LayoutError, match="not a pools layout"):
        list(drafts(tmp_path))


def test_drafts_say_what_they_are(zoo: Path) -> None:
    base, pool, *_ = drafts(zoo)
    assert base.key == "base.bertbase__agnews.bertbase_010"
    assert pool.labels == {
        "task": "text_classification",
        "arch": "bertbase",
        "dataset": "agnews",
        "model": "bertbase_010",
        "part": "pool",
    }
    assert pool.facts["generated_params"] == records(zoo)[0]["generated_params"]
    assert pool.facts["files"] == 4
