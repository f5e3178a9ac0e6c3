"""A root through ``castore://``: the whole documented layout, as if every file were real."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import pytest
import torch

from castore import CorruptObjectError, Repository
from castore.filesystem import CastoreFileSystem
from castore.testing.faulty import FaultyBackend
from castore_experiments import CheckpointManager
from castore_experiments.export import export
from castore_experiments.files import open_files
from castore_experiments.records import Records
from tests.drivers.experiments.training import Training
from tests.helpers import flip_object, folder


@pytest.fixture(params=["local", "s3"])
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> Repository:
    if request.param == "local":
        return Repository.init(tmp_path / "store")
    request.getfixturevalue("s3_env")
    return Repository.init(request.getfixturevalue("s3_url"))


def train(root: Path, repository: Repository, steps: int = 2) -> tuple[str, Training]:
    """A root with two hashes, several saves and curves; gives its namespace."""
    training = Training()
    options = {"repository": repository.url}
    with CheckpointManager(root, checkpoint_manager=options) as manager:
        training.watch(manager)
        manager.update_experiment_hash(dump_immediately=True)
        for step in range(1, steps + 1):
            training.train(1, manager)
            manager.log("loss", 1 / step, step)
            manager.save_model_checkpoint(step=step)
        training.config["lr"] = 0.5
        manager.update_experiment_hash(dump_immediately=True)
        manager.save_model_checkpoint(step=steps)
    return json.loads((root / ".castore/root.json").read_bytes())["namespace"], training


def view(repository: Repository) -> Any:
    return fsspec.filesystem("castore", repository=repository.url)


def test_the_view_is_what_materialize_writes(repository: Repository, tmp_path: Path) -> None:
    namespace, training = train(tmp_path / "root", repository)
    fs = view(repository)
    fs.get(f"{namespace}/checkpoints", str(tmp_path / "got"), recursive=True)
    written = tmp_path / "written"
    export(Records(repository, namespace), open_files(written), str(written), print)
    got, wanted = folder(tmp_path / "got"), folder(written / "checkpoints")
    curves = "loggers/loggers.duckdb"
    assert got.keys() == wanted.keys() >= {"manifest.yaml", curves}
    del wanted[curves]
    assert {p: d for p, d in got.items() if p != curves} == wanted
    with duckdb.connect(tmp_path / "got" / curves, read_only=True) as connection:
        counted = connection.execute("SELECT count(DISTINCT step) FROM signals").fetchone()
    assert counted == (2,)
    real = folder(tmp_path / "root/checkpoints")
    assert len([p for p in got if p.endswith(".pt")]) > len([p for p in real if p.endswith(".pt")])

    found, steps = fs.glob(f"castore://{namespace}/checkpoints/models/*/*_step_*.pt"), set()
    for path in found:
        with fs.open(path) as f:
            saved = torch.load(f, weights_only=True)
        steps.add(saved["step"])
        assert saved["model_state_dict"].keys() == training.net.state_dict().keys()
    assert len(found) == len(set(found)) and steps >= {1, 2}


def test_what_is_saved_later_is_seen(tmp_path: Path) -> None:
    repository = Repository.init(tmp_path / "store")
    namespace, training = train(tmp_path / "root", repository)
    fs = view(repository)
    manifest, before = fs.cat(f"{namespace}/checkpoints/manifest.yaml"), fs.find(namespace)
    curves = fs.ukey(f"{namespace}/checkpoints/loggers/loggers.duckdb")
    with CheckpointManager(tmp_path / "root") as manager:
        training.watch(manager)
        manager.log("loss", 0.5, 9)
        manager.save_model_checkpoint(step=9)
    assert any(p.endswith("_step_000009.pt") for p in set(fs.find(namespace)) - set(before))
    assert fs.cat(f"{namespace}/checkpoints/manifest.yaml") != manifest
    assert fs.ukey(f"{namespace}/checkpoints/loggers/loggers.duckdb") != curves

    backend = FaultyBackend(repository.backend)
    counted = CastoreFileSystem.of(Repository(backend, repository.id))
    counted.find(f"{namespace}/checkpoints/models")
    backend.calls.clear()
    assert len(counted.find(f"{namespace}/checkpoints/models")) >= 3
    # However many files: the newest, and one listing of each of the three namespaces.
    spaces = [namespace, namespace, f"{namespace}.runs", f"{namespace}.signals"]
    calls = sorted((c.method, c.name) for c in backend.calls)
    assert calls == sorted(("list", f"snapshots/{s}") for s in spaces)


def test_damage_in_a_layout_is_refused(tmp_path: Path) -> None:
    repository = Repository.init(tmp_path / "store")
    namespace, _ = train(tmp_path / "root", repository)
    records = Records(repository, namespace)
    records.refresh()
    newest = records.weights(records.hashes()[0])[0]
    flip_object(repository, records.file_of(newest).slices[0].blob)
    fs = view(repository)
    path = f"{namespace}/checkpoints/{newest.path}"
    assert fs.exists(path)
    with pytest.raises(CorruptObjectError), fs.open(path) as f:
        torch.load(f, weights_only=True)
    with pytest.raises(CorruptObjectError):
        fs.get(path, str(tmp_path / "w.pt"))
    assert not os.path.exists(tmp_path / "w.pt")
    assert f"{namespace}/checkpoints" in fs.ls(namespace, detail=False)
    beside = fs.ls(f"{namespace}.signals", detail=False)  # of the same driver, but no layout
    assert beside and not any(p.endswith("checkpoints") for p in beside)
