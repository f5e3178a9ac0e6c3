"""Roots that people changed by hand, beyond what `test_live_roots` and `test_damage` show."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from castore_experiments.audit import audit
from castore_experiments.records import Records
from tests.drivers.experiments.small import Said, filled, net, opened, read, started


@pytest.mark.parametrize("edit", ["entry gone", "labels", "weights", "latest", "emptied"])
def test_an_edited_manifest_is_mended_by_the_next_save(tmp_path: Path, edit: str) -> None:
    """'manifest.yaml ... can be deleted and rebuilt from snapshots': what is resumed is what the
    store says, whatever stands there; the next save enters it again, and a key of somebody's own
    stays."""
    root = tmp_path / "exp"
    with started(root) as manager:
        first = manager.current_exp_hash or ""
        manager.watch(hyperparameters={"lr": 2.0})
        second = manager.update_experiment_hash(dump_immediately=True).hash
        manager.save_model_checkpoint(net(fill=2.0), step=2)
    file = root / "checkpoints/manifest.yaml"
    body = yaml.safe_load(file.read_text())
    body["mine"] = "kept"
    if edit == "entry gone":
        del body["experiments"][first]
    elif edit == "labels":
        body["experiments"][first] |= {"hp_hash": "01234567", "data_hash": "89abcdef"}
    elif edit == "weights":
        body["experiments"][first] |= {
            "latest_weight_checkpoint": f"{first}_step_000077.pt",
            "latest_weight_step": 77,
        }
    elif edit == "latest":
        body["latest_hash"] = first
    else:
        body["experiments"] = {}
    file.write_text(yaml.safe_dump(body))
    with opened(root) as manager:
        assert manager.current_exp_hash == second
        manager.watch(model=net(), hyperparameters={"lr": 2.0})
        manager.save_model_checkpoint(net(fill=3.0), step=3)
        place = manager._session.place
        assert isinstance(place.archive, Records)
        assert list(audit(place.archive, place.files)) == []
    body = yaml.safe_load(read(root, "checkpoints/manifest.yaml"))
    assert body["mine"] == "kept" and body["latest_hash"] == second
    assert body["experiments"][first]["latest_weight_step"] == 1


def test_a_copy_that_is_edited_and_loses_its_repository(tmp_path: Path) -> None:
    """Copied with ``cp -r``, a weight file replaced by another state's bytes, a file added, then
    ``.castore`` deleted: the copy goes on from its files, tells the one that lies, and the original
    is not touched."""
    first, copy = tmp_path / "exp", tmp_path / "copy"
    with started(first, materialize="all") as manager:
        hash = manager.current_exp_hash or ""
        manager.save_model_checkpoint(net(fill=2.0), step=2)
        manager.save_model_checkpoint(net(fill=3.0), step=3)
    before = {p: p.read_bytes() for p in first.rglob("*") if p.is_file()}
    shutil.copytree(first, copy)
    shutil.rmtree(copy / ".castore")
    models = copy / f"checkpoints/models/{hash[8:16]}"
    shutil.copy(models / f"{hash}_step_000001.pt", models / f"{hash}_step_000003.pt")
    (models / "notes.txt").write_text("mine")
    said = Said()
    with opened(copy, said, checkpoint_manager={"materialize": "all"}) as manager:
        manager.watch(model=(model := net()), hyperparameters={"lr": 1.0})
        assert manager.current_exp_hash == hash and model.weight[0, 0] == 2.0
        assert said.has("the name says step 3, the file 1")
        manager.save_model_checkpoint(net(fill=4.0), step=4)
        assert filled(manager.load_checkpoint(hash, target_step=2)) == 2.0
        assert filled(manager.load_checkpoint(hash)) == 4.0
    assert (models / "notes.txt").read_text() == "mine"
    assert {p: p.read_bytes() for p in first.rglob("*") if p.is_file()} == before


def test_everything_deleted_is_a_fresh_root(tmp_path: Path) -> None:
    """``checkpoints/`` and ``.castore`` both gone, a file of somebody's own left."""
    root = tmp_path / "exp"
    started(root).close()
    shutil.rmtree(root / "checkpoints")
    shutil.rmtree(root / ".castore")
    (root / "notes.txt").write_text("mine")
    with opened(root) as manager:
        assert manager.first_time and manager.get_all_hashes() == []
        manager.watch(model=net(), hyperparameters={"lr": 1.0})
        manager.save_model_checkpoint(step=1)
        assert len(manager.get_all_hashes()) == 1
    assert (root / "notes.txt").read_text() == "mine"
