"""The document "Experiment Versioning", sentence by sentence: each is quoted where it is shown."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest
import torch
import yaml

from castore import InvalidInputError
from castore_experiments import CheckpointManager, manager_of, watch_or_edit
from castore_experiments.files import open_files
from tests.drivers.experiments.training import Training, equal, samples


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place for a root; nothing is there yet."""
    if request.param == "local":
        return str(tmp_path / "my_experiment")
    request.getfixturevalue("s3_env")
    return f"{request.getfixturevalue('s3_url')}/my_experiment"


def listing(root: str) -> list[str]:
    files = open_files(root)
    return sorted(s.name for s in files.list("checkpoints"))


def read(root: str, name: str) -> bytes:
    return open_files(root).get(name)


def manifest(root: str) -> Any:
    return yaml.safe_load(read(root, "checkpoints/manifest.yaml"))


def started(root: str, **options: Any) -> tuple[CheckpointManager, Training]:
    training = Training()
    manager = CheckpointManager(root, checkpoint_manager={"materialize": "all", **options})
    training.watch(manager)
    manager.update_experiment_hash(dump_immediately=True)
    return manager, training


def test_the_directory_structure(root: str) -> None:
    """'CheckpointManager(root_log_dir=...) lays out everything under one root'."""
    manager, training = started(root)
    training.train(2, manager)
    path = manager.save_model_checkpoint(step=100)
    hash = manager.current_exp_hash
    assert hash is not None
    hp, model, data = hash[:8], hash[8:16], hash[16:]
    manager.close()
    assert listing(root) == sorted(
        [
            "checkpoints/manifest.yaml",
            f"checkpoints/models/{model}/{hash}_step_000000.pt",
            f"checkpoints/models/{model}/{hash}_step_000100.pt",
            f"checkpoints/HP/{hp}/{hp}_config.yaml",
            f"checkpoints/data/{data}/{data}_data_snapshot.json",
            f"checkpoints/data/{data}/{data}_data_snapshot.parquet",
            "checkpoints/loggers/loggers.duckdb",
        ]
    )
    assert str(path).endswith(f"checkpoints/models/{model}/{hash}_step_000100.pt")


def test_the_hash_is_three_segments_of_the_content(root: str) -> None:
    """'The 24-byte combined hash is three 8-byte segments concatenated: HP(8) + MODEL(8) +
    DATA(8)'; 'WeightsLab versions an experiment by content, not by filename'; 'Each segment is
    also used as a directory name on its own'."""
    manager, training = started(root)
    hash = manager.current_exp_hash
    assert hash is not None and len(hash) == 24 and set(hash) <= set("0123456789abcdef")
    assert manager.hash_by_module == {"hp": hash[:8], "model": hash[8:16], "data": hash[16:]}
    manager.close()
    other = Training(seed=5)
    again = CheckpointManager(f"{root}-elsewhere")
    other.watch(again)
    assert again.update_experiment_hash().hash == hash
    again.close()


@pytest.mark.parametrize("component", ["hp", "model", "data"])
def test_each_component_changes_its_own_segment(root: str, component: str) -> None:
    """'Changing only the data state (tagging/discarding samples) changes the DATA segment and
    produces a new combined hash, while HP and MODEL segments stay the same ... The same applies to
    changing only hyperparameters or only the model'; 'the model directory is reused and only a new
    data/weights checkpoint is written'; 'HP — hyperparameters snapshot (everything in the
    registered config)', 'DATA — per-sample tags and discard state'; 'Every time the model,
    hyperparameters, or data state changes, CheckpointManager computes a new experiment hash and
    checkpoints under it'."""
    manager, training = started(root)
    before, there = manager.current_exp_hash, set(listing(root))
    assert before is not None
    if component == "hp":
        training.config["lr"] = 0.5
    elif component == "data":
        training.data.loc[3, "discarded"] = True
        training.data.loc[4, "tag:hard"] = True
    else:
        training = Training(width=16)
        training.watch(manager)
    update = manager.update_experiment_hash(dump_immediately=True)
    at = {"hp": 0, "model": 8, "data": 16}[component]
    assert update.is_new and update.changed == {component}
    assert update.hash[at : at + 8] != before[at : at + 8]
    assert update.hash[:at] + update.hash[at + 8 :] == before[:at] + before[at + 8 :]
    label, model = update.hash[at : at + 8], update.hash[8:16]
    new = {n.removeprefix("checkpoints/") for n in set(listing(root)) - there}
    weights = {f"models/{model}/{update.hash}_step_000000.pt"}
    expected = {
        "hp": {f"HP/{label}/{label}_config.yaml"},
        "model": set(),
        "data": {f"data/{label}/{label}_data_snapshot.{e}" for e in ("json", "parquet")},
    }[component]
    assert new == weights | expected
    manager.close()


def test_pending_and_immediate(root: str) -> None:
    """'marks pending — remembers what changed but defers the write until save_pending_changes()
    is called'; 'dumps immediately (dump_immediately=True) — writes the new checkpoint right
    away'; 'This avoids writing a checkpoint for every intermediate edit'."""
    manager, training = started(root)
    first, there = manager.current_exp_hash, listing(root)
    for lr in (0.1, 0.2, 0.3):
        training.config["lr"] = lr
        assert manager.update_experiment_hash().changed == {"hp"}
    assert manager.has_pending_changes() == (True, {"hp"})
    assert listing(root) == there
    assert manager.get_all_hashes() == [first]
    assert manager.save_pending_changes()
    assert manager.has_pending_changes() == (False, set())
    assert manager.get_all_hashes() == [manager.current_exp_hash, first]
    assert not manager.save_pending_changes()
    written = yaml.safe_load(
        read(root, f"checkpoints/HP/{manager.get_hp_hash()}/{manager.get_hp_hash()}_config.yaml")
    )
    assert written["hyperparameters"]["lr"] == 0.3
    training.config["lr"] = 0.4
    waits = manager.update_experiment_hash().hash
    assert manager.update_experiment_hash(dump_immediately=True) == (waits, False, set())
    assert manager.has_pending_changes() == (False, set())  # nothing new, and what waited is there
    assert manager.get_all_hashes()[0] == waits
    manager.close()


def test_an_edit_taken_back_is_not_pending(root: str) -> None:
    manager, training = started(root)
    first = manager.current_exp_hash
    training.config["lr"] = 9.0
    manager.update_experiment_hash()
    training.config["lr"] = 1e-2
    update = manager.update_experiment_hash(dump_immediately=True)
    assert (update.hash, update.is_new, update.changed) == (first, False, {"hp"})
    assert manager.has_pending_changes() == (False, set())
    assert manager.get_all_hashes() == [first]
    manager.close()


def test_the_manifest(root: str) -> None:
    """'checkpoints/manifest.yaml tracks every experiment hash ever seen under that root, with
    created/last_used timestamps, the latest_hash, and each hash's
    latest_weight_checkpoint/latest_weight_step'."""
    manager, training = started(root)
    first = manager.current_exp_hash
    manager.save_model_checkpoint(step=7)
    training.config["lr"] = 0.5
    second = manager.update_experiment_hash(dump_immediately=True).hash
    manager.save_model_checkpoint(step=9)
    manager.close()
    found = manifest(root)
    assert list(found["experiments"]) == [first, second]
    assert found["latest_hash"] == second
    for hash, step in ((first, 7), (second, 9)):
        entry = found["experiments"][hash]
        assert entry["hp_hash"] + entry["model_hash"] + entry["data_hash"] == hash
        assert entry["latest_weight_step"] == step
        assert entry["latest_weight_checkpoint"] == f"{hash}_step_{step:06d}.pt"
        assert entry["created"] <= entry["last_used"]
        assert entry["experiment_name"] == "first"
    assert found["experiments"][second]["castore"]["parent"] == first


@pytest.mark.parametrize("first", ["manager", "model"])
def test_an_existing_root_resumes_the_latest_hash(root: str, first: str) -> None:
    """'Constructing CheckpointManager(root_log_dir=...) on an existing root automatically resumes
    the latest hash — no explicit load_state() call needed'."""
    manager, training = started(root)
    training.train(4, manager)
    training.data.loc[2, "discarded"] = True
    hash = manager.update_experiment_hash(dump_immediately=True).hash
    saved = training.weights()
    training.train(6, manager)
    manager.close()
    training = Training(seed=9)
    resumed = CheckpointManager(root)
    assert resumed.current_exp_hash == hash == resumed.get_latest_hash()
    assert not resumed.first_time
    assert resumed.hyperparameters == {"lr": 1e-2, "betas": (0.9, 0.99), "layers": [8, 2]}
    if first == "model":
        resumed.watch(model=training.net)
        assert equal(training.weights(), saved)
    training.watch(resumed)
    assert equal(training.weights(), saved)
    assert training.data.loc[2, "discarded"]
    assert training.opt.state_dict()["state"][0]["step"] == 4
    assert resumed.update_experiment_hash() == (hash, False, set())
    resumed.close()


def test_a_watched_configuration_that_differs_is_an_edit(root: str) -> None:
    manager, training = started(root)
    first = manager.current_exp_hash
    manager.close()
    training = Training()
    training.config["lr"] = 0.7
    resumed = CheckpointManager(root)
    training.watch(resumed)
    assert training.config["lr"] == 0.7
    update = resumed.update_experiment_hash()
    assert update.changed == {"hp"} and update.hash[8:] == (first or "")[8:]
    resumed.close()


def test_branching_from_an_older_state(root: str) -> None:
    """'branching is just loading an older hash and continuing training — the next change produces
    a new hash alongside (not replacing) the branch point'; '# descends from older_hash, leaving
    the original branch on disk intact'; 'resuming, branching from an earlier state, and
    reproducing a run are all the same mechanism: load the hash you want'."""
    manager, training = started(root)
    training.train(3, manager)
    manager.save_model_checkpoint(step=3)
    older, old = manager.current_exp_hash, training.weights()
    assert older is not None
    training.config["lr"] = 0.5
    training.data.loc[1, "tag:hard"] = True
    newer = manager.update_experiment_hash(dump_immediately=True).hash
    training.train(6, manager)
    manager.save_model_checkpoint(step=6)
    there = listing(root)
    assert manager.load_state(older, force=True)
    assert manager.current_exp_hash == older and manager.previous_exp_hash == newer
    assert equal(training.weights(), old)
    assert training.config["lr"] == 1e-2 and training.config["experiment_name"] == "first"
    assert not training.data["tag:hard"].any()
    training.config["lr"] = 0.25
    update = manager.update_experiment_hash(dump_immediately=True)
    assert update.changed == {"hp"} and update.hash[8:16] == older[8:16]
    runs = {r["hash"]: r for r in manager.list_runs()}
    assert runs[update.hash]["parent"] == older
    assert set(runs) == {older, newer, update.hash}
    assert set(there) <= set(listing(root))
    manager.close()
    resumed = CheckpointManager(root)
    assert resumed.current_exp_hash == update.hash
    resumed.close()


def test_step_aware_selection(root: str) -> None:
    """'load_checkpoint(exp_hash, target_step=...) picks the checkpoint closest to target_step
    (ties break toward the higher step); omit target_step to get the latest one'; 'Within one
    experiment hash, multiple weight checkpoints accumulate at different training steps'."""
    manager, _ = started(root)
    for step in (100, 200, 300):
        manager.save_model_checkpoint(step=step)
    manager.save_model_checkpoint(step=5)
    hash = manager.current_exp_hash
    assert hash is not None

    def picked(target: int | None) -> int:
        return int(manager.load_checkpoint(hash, target_step=target)["weights"]["step"])

    assert [picked(t) for t in (0, 40, 149, 150, 151, 260, 10**9)] == [
        *(0, 5, 100, 200, 200, 300, 300)
    ]
    assert picked(None) == 5
    assert manager.load_checkpoint("0" * 24)["loaded_components"] == set()
    assert not manager.load_state("0" * 24)
    manager.close()


def test_every_checkpoint_carries_rng_and_loader_state(root: str) -> None:
    """'Every weight checkpoint and data snapshot also carries: RNG state (Python/NumPy/Torch) ...
    Dataloader iteration state — how far each registered dataloader had progressed'."""
    manager, training = started(root)
    for i, _ in enumerate(training.loader):
        if i == 2:
            path = manager.save_model_checkpoint(step=3)
            training.data.loc[0, "discarded"] = True
            manager.update_experiment_hash(dump_immediately=True)
            break
    name = str(path).partition("/checkpoints/")[2]
    file = torch.load(io.BytesIO(read(root, f"checkpoints/{name}")), weights_only=True)
    label = manager.get_data_hash()
    snapshot = json.loads(read(root, f"checkpoints/data/{label}/{label}_data_snapshot.json"))
    for found in (file, snapshot):
        assert {"python_random", "numpy_random", "torch_rng"} <= set(found["rng_state"])
        assert found["dataloader_iteration_state"]["train"]["samples_yielded"] == 12
        assert found["dataloader_iteration_state"]["train"]["batch_size"] == 4
    assert {"step", "model_state_dict", "timestamp", "exp_hash", "optimizer_state_dict"} <= set(
        file
    )
    manager.close()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_resuming_continues_deterministically(root: str, optimizer: str) -> None:
    """'so resuming a checkpoint continues training deterministically rather than just reloading
    weights'; saved within the epoch, twice, and at its end."""
    straight = Training(optimizer=optimizer)
    straight.train(17)
    losses, seen = [], []
    for stop in (2, 4, 12, 17):  # an epoch has 6 steps
        part = Training(optimizer=optimizer, seed=0 if stop == 2 else 99)
        with CheckpointManager(root) as manager:
            part.watch(manager)
            manager.update_experiment_hash(dump_immediately=True)
            part.step = manager.load_checkpoint(manager.current_exp_hash or "")["weights"]["step"]
            part.train(stop, manager)
            manager.save_model_checkpoint(step=stop)
        losses += part.losses
        seen += part.seen
    assert seen == straight.seen
    assert losses == straight.losses
    assert equal(part.weights(), straight.weights())


def test_curves_are_kept_by_metric_hash_and_step(root: str) -> None:
    """'Training curves ... persist to an on-disk DuckDB file at
    checkpoints/loggers/loggers.duckdb, keyed by (metric_name, experiment_hash, step)'; 'switching
    between branches never overwrites another branch's curves'."""
    manager, training = started(root)
    first = manager.current_exp_hash
    for step in range(5):
        manager.log("loss", 1.0 / (1 + step), step, per_sample={"s1": 0.5, "s2": float(step)})
    manager.save_model_checkpoint(step=4)
    training.config["lr"] = 0.3
    second = manager.update_experiment_hash(dump_immediately=True).hash
    for step in range(5, 8):
        manager.log("loss", 2.0, step)
    manager.close()
    data = read(root, "checkpoints/loggers/loggers.duckdb")
    rows = _query(data, "SELECT experiment_hash, step, metric_value FROM signals ORDER BY 1, 2")
    assert sorted(rows) == sorted(
        [(first, s, 1.0 / (1 + s)) for s in range(5)] + [(second, s, 2.0) for s in range(5, 8)]
    )
    assert _query(data, "SELECT count(*) FROM per_sample") == [(10,)]


def _query(data: bytes, query: str) -> list[Any]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copy.duckdb"
        path.write_bytes(data)
        with duckdb.connect(str(path), read_only=True) as connection:
            return list(connection.execute(query).fetchall())


@pytest.mark.parametrize(
    ("option", "gone"),
    [
        ("enable_checkpoints", {"models", "HP", "data", "manifest.yaml"}),
        ("dump_model_state", {"models"}),
        ("dump_data_state", {"data"}),
        ("dump_config_state", {"HP"}),
    ],
)
def test_what_is_dumped(root: str, option: str, gone: set[str]) -> None:
    """'enable_checkpoints: Master switch — set False to disable all checkpoint dumping';
    'dump_model_state: Save the model's state_dict()'; 'dump_data_state: Save the per-sample
    tag/discard snapshot'; 'dump_config_state: Save the hyperparameters YAML for this hash'."""
    manager, _ = started(root, **{option: False})
    manager.save_model_checkpoint(step=1)
    manager.close()
    there = {n.split("/")[1] for n in listing(root)}
    assert there == {"models", "HP", "data", "manifest.yaml", "loggers"} - gone - (
        {"loggers"} if option == "enable_checkpoints" else set()
    )


@pytest.mark.parametrize("wanted", [True, False])
def test_optimizer_state_is_an_option(root: str, wanted: bool) -> None:
    """'dump_optimizer_state: Save the optimizer's state_dict() alongside the model weights'."""
    manager, training = started(root, dump_optimizer_state=wanted)
    training.train(1)
    name = str(manager.save_model_checkpoint(step=1)).partition("/checkpoints/")[2]
    file = torch.load(io.BytesIO(read(root, f"checkpoints/{name}")), weights_only=True)
    assert ("optimizer_state_dict" in file) is wanted
    manager.close()


def test_the_architecture_is_pickled_only_when_asked_for(root: str) -> None:
    """'dump_model_architecture: Pickle the full model object (structure + code), not just weights.
    Skipped by default'; 'when skipped, a new hash whose model didn't change stores a small
    reference to the hash that has the architecture instead of duplicating it'."""
    manager, _ = started(root, dump_model_architecture=True)
    first = manager.current_exp_hash
    assert first is not None
    pickled = f"checkpoints/models/{first[8:16]}/{first[8:16]}_architecture.pkl"
    assert pickled in listing(root)
    assert isinstance(manager.load_checkpoint(first)["model"], torch.nn.Module)
    manager.close()
    training = Training()
    training.config["lr"] = 0.123
    with CheckpointManager(root) as manager:
        training.watch(manager)
        second = manager.update_experiment_hash(dump_immediately=True).hash
        assert manager.load_checkpoint(second)["model"] is None
    reference = f"checkpoints/models/{first[8:16]}/{first[8:16]}_architecture_ref.json"
    assert json.loads(read(root, reference))["architecture_hash"] == first[8:16]
    with CheckpointManager(root, allow_pickle=True) as manager:
        assert isinstance(manager.load_checkpoint(second)["model"], torch.nn.Module)


def test_root_log_dir_comes_from_the_configuration_or_an_object(tmp_path: Path) -> None:
    """'root_log_dir comes from the top-level root_log_dir key in your hyperparameters config (or
    the root_log_dir= kwarg on wl.watch_or_edit(..., flag="model"/"data"/...) for a per-object
    override)'."""
    file = tmp_path / "hyperparameters.yaml"
    file.write_text(
        f"root_log_dir: {tmp_path}/from_config\nlr: 1e-3\n"
        "checkpoint_manager:\n  dump_optimizer_state: false\n"
    )
    with CheckpointManager.from_config(file) as manager:
        assert manager.root_log_dir == tmp_path / "from_config"
        assert manager.hyperparameters is not None and manager.hyperparameters["lr"] == 1e-3
        with pytest.raises(InvalidInputError, match="one manager has one root"):
            manager.watch(model=torch.nn.Linear(1, 1), root_log_dir=tmp_path / "other")
    net = torch.nn.Linear(2, 2)
    assert watch_or_edit(net, flag="model", root_log_dir=tmp_path / "by_object") is net
    frame = watch_or_edit(samples(), flag="data", root_log_dir=tmp_path / "by_object")
    assert isinstance(frame, pd.DataFrame)
    with manager_of(tmp_path / "by_object") as made:
        assert made.update_experiment_hash().changed == {"model", "data"}
    with pytest.raises(InvalidInputError, match="flag"):
        watch_or_edit(net, flag="nonsense")  # type: ignore[arg-type]


def test_multi_root(root: str) -> None:
    """'searches up to 3 levels of subdirectories below the given root'; 'Several roots found — the
    one whose manifest was most recently updated is adopted'; 'signal-history curves are merged
    from every one of them'; 'merging the same sibling twice never duplicates rows'; 'its latest
    model weights, hyperparameters, and data state are loaded, and any further training writes new
    checkpoints there too'; 'this is purely additive: nothing is overwritten'."""
    for n, place in enumerate(("dataShuffling_tests/v1", "lr_tests/v1", "lr_tests/v2")):
        training = Training()
        training.config["lr"] = 0.1 + n
        with CheckpointManager(f"{root}/{place}") as manager:
            training.watch(manager)
            manager.update_experiment_hash(dump_immediately=True)
            manager.log("loss", float(n), n)
    too_deep = f"{root}/a/b/c/d"
    with CheckpointManager(too_deep) as manager:
        Training(seed=3).watch(manager)
        manager.update_experiment_hash(dump_immediately=True)
    with CheckpointManager(root) as manager:
        assert manager.given_root_log_dir == root
        assert str(manager.root_log_dir) == f"{root}/lr_tests/v2"
        assert [str(d) for d in manager.discovered_root_dirs] == [
            f"{root}/dataShuffling_tests/v1",
            f"{root}/lr_tests/v1",
            f"{root}/lr_tests/v2",
        ]
        assert manager.is_multi_root
        assert manager.hyperparameters is not None and manager.hyperparameters["lr"] == 2.1
        for _ in range(2):
            assert sorted(manager.signals("loss")["metric_value"]) == [0.0, 1.0, 2.0]
    with CheckpointManager(f"{root}/lr_tests/v1") as manager:
        assert not manager.is_multi_root
        Training().watch(manager)
        manager.save_model_checkpoint(step=50)
    there = {n: len(listing(f"{root}/{n}")) for n in ("lr_tests/v1", "lr_tests/v2")}
    with CheckpointManager(root) as manager:
        assert str(manager.root_log_dir) == f"{root}/lr_tests/v1"
        training = Training(seed=8)
        training.watch(manager)
        loaded = manager.load_latest_checkpoint()
        assert loaded is not None and loaded["step"] == 50
        assert equal(training.weights(), loaded["model_state_dict"])
        training.config["lr"] = 0.77
        manager.update_experiment_hash(dump_immediately=True)
    assert len(listing(f"{root}/lr_tests/v1")) > there["lr_tests/v1"]
    assert len(listing(f"{root}/lr_tests/v2")) == there["lr_tests/v2"]


def test_one_architecture_file_for_all_that_share_it(root: str) -> None:
    """'so unrelated experiments that happen to share, say, the same model architecture reuse that
    one architecture file instead of duplicating it'."""
    manager, training = started(root, dump_model_architecture=True)
    first = manager.current_exp_hash or ""
    pickled = f"checkpoints/models/{first[8:16]}/{first[8:16]}_architecture.pkl"
    before = read(root, pickled)
    training.train(2)
    training.config["lr"] = 0.5
    training.data.loc[0, "discarded"] = True
    second = manager.update_experiment_hash(dump_immediately=True).hash
    assert second[8:16] == first[8:16] and second[:8] != first[:8] and second[16:] != first[16:]
    assert [n for n in listing(root) if "architecture" in n] == [pickled]
    assert read(root, pickled) == before
    for hash in (first, second):
        assert isinstance(manager.load_checkpoint(hash)["model"], torch.nn.Module)
    manager.close()


def test_a_fresh_root(root: str) -> None:
    """'Nothing found (a brand-new, empty directory) — behaves exactly as before: a fresh
    experiment is started there'."""
    with CheckpointManager(root) as manager:
        assert str(manager.root_log_dir) == root == manager.given_root_log_dir
        assert manager.discovered_root_dirs == [] and not manager.is_multi_root
        assert manager.current_exp_hash is None and manager.first_time
        assert manager.get_all_hashes() == [] and manager.list_runs() == []
    assert listing(root) == []
