"""The real public tool opens what we write. Its interpreter: CASTORE_PUBLIC_TOOL_PYTHON.

It lives in an environment of its own, since it wants other versions of what we use.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from castore import Repository
from castore_experiments import CheckpointManager
from castore_experiments.export import export
from castore_experiments.files import open_files
from castore_experiments.folder import FolderRecords
from castore_experiments.importer import import_root
from castore_experiments.records import Records
from castore_experiments.root import read_root
from tests.drivers.experiments import fixture
from tests.drivers.experiments.fixture import HASHES, LATEST, tensor_digest
from tests.drivers.experiments.test_fixture import nothing
from tests.drivers.experiments.training import Training

PYTHON = os.environ.get("CASTORE_PUBLIC_TOOL_PYTHON")
PROGRAM = Path(__file__).parent / "public_tool.py"

pytestmark = pytest.mark.skipif(PYTHON is None, reason="CASTORE_PUBLIC_TOOL_PYTHON is not set")


def ask(root: str, tmp_path: Path, *more: str) -> dict[str, Any]:
    """What the public tool resumes of a root."""
    assert PYTHON is not None
    answer = tmp_path / "answer.json"
    done = subprocess.run(
        [PYTHON, str(PROGRAM), root, str(answer), *(more or ["training"])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def digests(state: dict[str, Any]) -> dict[str, str]:
    return {k: tensor_digest(v) for k, v in state.items() if isinstance(v, torch.Tensor)}


def randoms() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(1).item()]


@pytest.mark.parametrize("how", ["in place", "exported"])
def test_it_resumes_hash_step_weights_config_and_signals(tmp_path: Path, how: str) -> None:
    """'the public tool opens that and resumes hash, step, weights, config and signals'."""
    root, training = str(tmp_path / "exp"), Training()
    manager = CheckpointManager(root)
    training.watch(manager)
    first = manager.update_experiment_hash(dump_immediately=True).hash
    training.train(4, manager, save=2)
    at_four = training.weights()
    training.config["lr"] = 0.5
    second = manager.update_experiment_hash(dump_immediately=True).hash
    training.train(6, manager)
    training.data.loc[[3, 5], "discarded"] = True
    training.data.loc[4, "tag:hard"] = True
    third = manager.update_experiment_hash(dump_immediately=True).hash
    training.train(8, manager)
    manager.log("accuracy", 0.75, 8, per_sample={"s1": 0.5})
    manager.save_model_checkpoint(step=8)
    drawn = randoms()
    manager.set_run_notes(third, "said here")
    manager.rename_run(first, "before")
    records = manager._archive()
    assert isinstance(records, Records)
    files = manager._session.place.files
    manager.close()
    to = None if how == "in place" else str(tmp_path / "exported")
    export(records, files, to, nothing)

    found = ask(to or root, tmp_path)
    assert found["current"] == found["latest"] == third
    assert found["errors"] == []
    assert found["hashes"] == [third, second, first]
    assert found["runs"] == {
        third: ["first", "said here", 8, True],
        second: ["first", "", 4, False],
        first: ["before", "", 4, False],
    }
    assert found["weights"] == digests(training.weights())
    assert found["optimizer"] == digests(training.opt.state_dict()["state"][0])
    assert found["step"] == [8, 8]
    assert found["config"] == {"lr": 0.5, "betas": [0.9, 0.99], "layers": [8, 2]}
    assert (found["discarded"], found["hard"]) == (["s3", "s5"], ["s4"])
    loss = {(p["hash"], p["step"]): p["value"] for p in found["signals"] if p["metric"] == "loss"}
    hashes = [first] * 4 + [second] * 2 + [third] * 2
    expected = zip(hashes, range(1, 9), strict=True)
    assert loss == dict(zip(expected, training.losses, strict=True))
    assert [p["value"] for p in found["signals"] if p["metric"] == "accuracy"] == [0.75]
    assert found["per_sample"] == [["accuracy", third, "s1", 8, 0.5]]
    branch = found["states"][first]
    assert branch["components"] == ["config", "data", "weights"]
    assert branch["weights"] == digests(at_four)
    assert branch["config"]["lr"] == 1e-2 and branch["rows"] == 24
    assert branch["steps"] == {"0": 0, "3": 4, "4": 4, "5": 4, "1000000": 4}
    assert branch["loaders"]["train"]["samples_yielded"] == 16
    assert len(drawn) == len(found["randoms"])


def test_its_random_streams_are_all_restored(tmp_path: Path) -> None:
    """It restores those of the data snapshot, the older ones; NumPy only from three items."""
    root, training = str(tmp_path / "exp"), Training()
    with CheckpointManager(root) as manager:
        training.watch(manager)
        np.random.standard_normal()
        manager.update_experiment_hash(dump_immediately=True)
        expected = randoms()
    assert ask(root, tmp_path)["randoms"] == expected


def test_it_goes_on_where_we_went_on_in_its_own_root(tmp_path: Path) -> None:
    """A root that it wrote has its state file, which it believes more than the manifest."""
    root = str(tmp_path / "single")
    files, program = fixture.lay(root), fixture.Program()
    with CheckpointManager(root, report=nothing) as manager:
        manager.watch(**program.watched())
        program.data.loc[[1, 2], "discarded"] = True
        hash = manager.update_experiment_hash(dump_immediately=True).hash
        torch.nn.init.ones_(program.net.fc2.weight)
        manager.log("train_loss/CE", 0.25, 13)
        manager.save_model_checkpoint(step=14)
    weights = digests(program.net.state_dict())
    found = ask(root, tmp_path, "fixture")
    assert found["current"] == found["latest"] == hash != LATEST
    assert found["hashes"] == [hash, *reversed(HASHES)]
    assert found["weights"] == weights and found["step"] == [14, 14]
    assert found["discarded"] == ["1", "2"]
    points = [p for p in found["signals"] if p["hash"] == hash]
    assert [(p["metric"], p["step"], p["value"]) for p in points] == [("train_loss/CE", 13, 0.25)]
    old = yaml.safe_load(files.get("checkpoints/manifest.yaml"))["experiments"]
    assert set(old) == {*HASHES, hash}


def test_what_it_saves_in_our_root_is_taken_in(tmp_path: Path) -> None:
    """Back and forth: we write, it goes on under the same hash, we go on after it."""
    root, training = str(tmp_path / "exp"), Training()
    with CheckpointManager(root) as manager:
        training.watch(manager)
        hash = manager.update_experiment_hash(dump_immediately=True).hash
        training.train(4, manager)
        manager.save_model_checkpoint(step=4)
    found = ask(root, tmp_path, "training", "9")
    assert found["current"] == hash and found["step"] == [4, 4]
    lines: list[str] = []
    files = open_files(root)
    store = Repository.open(f"{root}/.castore")
    record = read_root(files)
    assert record is not None
    records = Records(store, record.namespace)
    records.refresh()
    done = import_root(FolderRecords(files, lines.append), records, lines.append)
    assert (done.states, done.weights, done.left, lines) == (0, 1, 0, [])
    assert done.rows > 0
    again = Training(seed=8)
    with CheckpointManager(root, report=nothing) as manager:
        again.watch(manager)
        assert manager.current_exp_hash == hash
        assert manager.get_checkpoint_info(hash)["steps"] == [0, 4, 9]
        assert all(bool((p == 1).all()) for p in again.net.parameters())
        assert manager.update_experiment_hash() == (hash, False, set())
        points = manager.signals("loss", hash)[["step", "metric_value"]].values.tolist()
    assert points[:4] == [[i + 1, loss] for i, loss in enumerate(training.losses)]
    assert points[4:] == [[9, 0.125]]
