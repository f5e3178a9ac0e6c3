"""What a manager takes and answers: options, places, questions, what a load restores.

Sentences in quotation marks are the promises that a test shows.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from torch.utils.data import DataLoader

from castore import (
    InvalidInputError,
    Repository,
)
from castore_experiments import CheckpointManager
from castore_experiments.files import open_files
from castore_experiments.root import read_root
from tests.drivers.experiments.places import KINDS, place
from tests.drivers.experiments.small import Said, filled, net, opened, read, started
from tests.drivers.experiments.training import Indexed, Training, equal, samples


@pytest.fixture(params=KINDS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return place(request.param, request, tmp_path)


def namespace(root: str | Path) -> str:
    record = read_root(open_files(root))
    assert record is not None
    return record.namespace


# -- options


def test_an_unknown_option_names_the_nearest(tmp_path: Path) -> None:
    """'An unknown option is an error that suggests the nearest name'."""
    for block, near in [
        ({"dump_model_sate": True}, "dump_model_state"),
        ({"repositry": "x"}, "repository"),
        ({"keep": {"lats": 3}}, "last"),
        ({"keep": {"best": {"metrc": "val"}}}, "metric"),
    ]:
        with pytest.raises(InvalidInputError, match=f"did you mean '{near}'"):
            opened(tmp_path, checkpoint_manager=block)
    near = "did you mean 'materialize'"
    with opened(tmp_path / "exp") as manager, pytest.raises(InvalidInputError, match=near):
        manager.watch(hyperparameters={"checkpoint_manager": {"materialise": "all"}})


@pytest.mark.parametrize(
    "block",
    [
        *({"enable_checkpoints": v} for v in (1, "true", None)),
        *({"materialize": v} for v in ("some", True, ["all"])),
        *({"compression": v} for v in ("zip", None)),
        *({"repository": v} for v in (3, "")),
        *({"namespace": v} for v in (3, "", [])),
        *({"keep": v} for v in (3, {"last": 0}, {"last": True}, {"every": 1.5}, {"best": "val"})),
        *({"keep": {"best": v}} for v in ({}, {"metric": "v", "mode": "most"}, {"metric": 3})),
        *({"keep": {"best": {"metric": "v", "n": v}}} for v in (0, "2")),
        ["enable_checkpoints"],
        "all",
    ],
    ids=str,
)
def test_option_values_of_wrong_types(tmp_path: Path, block: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"checkpoint_manager|keep\.") as e:
        opened(tmp_path, checkpoint_manager=block)
    assert "expected" in str(e.value)


def test_the_precedence_of_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """'Precedence of roots: constructor, watch, config; two different roots for one manager are
    an error'."""
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    with opened(a) as manager:
        for more in ({"root_log_dir": b}, {"hyperparameters": {"root_log_dir": b}}):
            with pytest.raises(InvalidInputError, match="one manager has one root"):
                manager.watch(**more)
        manager.watch(root_log_dir=a + "/", hyperparameters={"root_log_dir": tmp_path / "a"})
    manager = CheckpointManager(report=lambda _: None)
    with pytest.raises(InvalidInputError, match="one manager has one root"):
        manager.watch(root_log_dir=a, hyperparameters={"root_log_dir": b})
    with CheckpointManager(report=lambda _: None) as manager:
        manager.watch(hyperparameters={"root_log_dir": b})
        assert manager.root_log_dir == Path(b)
    monkeypatch.chdir(tmp_path)
    with CheckpointManager(report=lambda _: None) as manager:
        assert manager.root_log_dir == tmp_path / "root_experiment"
    assert list(tmp_path.iterdir()) == []


def test_where_a_root_is_kept_may_come_with_the_watched_configuration(tmp_path: Path) -> None:
    """'The repository is checkpoint_manager.repository in the config, or CASTORE_REPOSITORY, or
    <root>/.castore'; once a root is kept somewhere, another place is an error."""
    store, other, root = (str(tmp_path / n) for n in ("store", "other", "exp"))
    for url in (store, other):
        Repository.init(url)
    config = {"lr": 1, "checkpoint_manager": {"repository": store, "namespace": "mine"}}
    for step in (1, 2):  # a fresh root, and one that is there
        with opened(root) as manager:
            manager.watch(model=net(), hyperparameters=config)
            manager.save_model_checkpoint(step=step)
        assert namespace(root) == "mine"
        assert len(list(Repository.open(store).snapshots("mine"))) == 1 + step
    for block in ({"repository": other}, {"namespace": "yours"}):
        with opened(root) as manager, pytest.raises(InvalidInputError, match="is kept in"):
            manager.watch(hyperparameters={"checkpoint_manager": block})
        with pytest.raises(InvalidInputError, match="is kept in"):
            opened(root, checkpoint_manager=block)


def test_the_repository_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, root = str(tmp_path / "store"), tmp_path / "exp"
    monkeypatch.setenv("CASTORE_REPOSITORY", store)
    started(root).close()
    own = namespace(root)
    assert {*Repository.open(store).namespaces()} == {own, f"{own}.signals"}
    monkeypatch.delenv("CASTORE_REPOSITORY")
    with opened(root) as manager:  # the root knows
        assert filled(manager.load_checkpoint(manager.current_exp_hash or "")) == 1.0


def test_from_config(tmp_path: Path) -> None:
    """'CheckpointManager.from_config("hyperparameters.yaml")'; all options are read."""
    file = tmp_path / "hyperparameters.yaml"
    file.write_text(
        f"root_log_dir: {tmp_path}/exp\nlr: 1e-3\nlayers: [8, 2]\ncheckpoint_manager:\n"
        "  materialize: all\n  dump_optimizer_state: false\n  keep: {last: 2}\n"
    )
    with CheckpointManager.from_config(file) as manager:
        model = net()
        manager.watch(model=model, optimizer=torch.optim.Adam(model.parameters()))
        paths = [manager.save_model_checkpoint(step=s) for s in (1, 2, 3)]
        assert "optimizer_state_dict" not in torch.load(paths[2], weights_only=True)
    assert [p.exists() for p in paths] == [False, True, True]
    with CheckpointManager.from_config(file) as again:
        assert again.current_exp_hash == manager._session.tracker.hash
        again.watch(model=net())
        assert again.update_experiment_hash() == (again.current_exp_hash, False, set())
    for broken in (b"lr: [", b"- 1\n", b"checkpoint_manager: {nonsense: 1}\n"):
        file.write_bytes(broken)
        with pytest.raises((InvalidInputError, ValueError)):
            CheckpointManager.from_config(file)


# -- answers


def test_what_every_method_gives(root: str) -> None:
    """'Every public method says what it returns'; those are the public tool's returns where it has
    the method."""
    manager = opened(root)
    assert manager.current_exp_hash is None is manager.previous_exp_hash
    assert manager.get_latest_hash() is None and manager.hash_by_module == {}
    assert manager.get_checkpoint_info() == {} and manager.load_latest_checkpoint() is None
    assert manager.save_pending_changes() is False
    assert manager.save_model_architecture() is None
    assert manager.get_HP_snapshot() is None is manager.get_dataframe_snapshot()
    config, data = {"lr": 1, "experiment_name": "given"}, samples()
    model = net(fill=5.0)
    manager.watch(model=model, hyperparameters=config, data=data)
    hash = manager.get_current_experiment_hash()
    assert manager.has_pending_changes() == (True, {"hp", "model", "data"})
    assert manager.get_all_hashes() == [] and manager.load_state(hash) is False
    assert manager.load_checkpoint(hash)["loaded_components"] == set()
    assert manager.save_pending_changes() is True is manager.save_pending_changes(force=True)
    assert manager.get_HP_snapshot() == {"lr": 1} and manager.get_model_snapshot() is model
    frame = manager.get_dataframe_snapshot()
    assert frame is not None and len(frame) == len(data)
    assert (manager.get_hp_hash(), manager.get_model_hash(), manager.get_data_hash()) == (
        hash[:8],
        hash[8:16],
        hash[16:],
    )
    path = manager.save_model_checkpoint(step=3, metrics={"val": 0.5}, metadata={"note": "x"})
    assert str(path).startswith(f"{manager.checkpoints_dir}/models/")
    assert manager.save_model_checkpoint(step=3, save_model_checkpoint=False) is None
    assert manager.get_all_hashes() == manager.list_experiment_hashes() == [hash]
    assert manager.get_hashes_by_component(model_hash=hash[8:16]) == [hash]
    assert manager.get_hashes_by_component(hp_hash="0" * 8) == []
    info = manager.get_checkpoint_info()
    assert info["metrics"] == {0: {}, 3: {"val": 0.5}} and info["steps"] == [0, 3]
    assert manager.rename_run(hash, " named ") is True
    assert manager.rename_run(hash, "  ") is False is manager.rename_run("0" * 24, "x")
    assert manager.rename_run(hash, None) is False
    assert manager.set_run_notes(hash, "notes") is True
    assert manager.set_run_notes("0" * 24, "notes") is False
    (run,) = manager.list_runs()
    assert (run["experiment_name"], run["notes"], run["is_current"]) == ("named", "notes", True)
    found = manager.load_checkpoint(hash, load_config=True, force=True)
    assert found["loaded_components"] == {"weights", "config", "data"} and found["exp_hash"] == hash
    assert isinstance(found["data_state"]["snapshot"], pd.DataFrame)
    assert list(found["data_state"]["snapshot"].index.names) == ["sample_id", "annotation_id"]
    assert found["weights"]["metadata"] == {"note": "x"} and found["rng_state"]
    assert manager.load_latest_checkpoint()["step"] == 3  # type: ignore[index]
    entry = yaml.safe_load(read(root, "checkpoints/manifest.yaml"))["experiments"][hash]
    assert (entry["experiment_name"], entry["notes"]) == ("named", "notes")
    manager.close()
    manager.close()
    for use in (
        manager.get_latest_hash,
        manager.update_experiment_hash,
        lambda: manager.log("a", 1),
    ):
        with pytest.raises(InvalidInputError, match="is closed"):
            use()


@pytest.mark.parametrize("name", ["force_dump_pending", "update_manifest"])
def test_parameters_that_would_leave_a_root_torn_are_refused(tmp_path: Path, name: str) -> None:
    with started(tmp_path / "exp") as manager, pytest.raises(InvalidInputError, match=name):
        manager.save_model_checkpoint(step=2, **{name: False})


def test_documents_by_the_public_tools_names(root: str) -> None:
    """'Names, parameters and returns of formats/weightslab.md section 3 hold': save_config,
    save_data_snapshot and load_logger_snapshot too; a document never stands under another
    content's name."""
    with opened(root) as manager:
        assert manager.save_config() is None is manager.save_data_snapshot()
        assert manager.load_logger_snapshot() is False
        config = {"lr": 1, "experiment_name": "kept out"}
        manager.watch(hyperparameters=config, data=samples())
        hash = manager.update_experiment_hash().hash
        hp, data = hash[:8], hash[16:]
        assert str(manager.save_config(config)) == f"{manager.hp_dir}/{hp}/{hp}_config.yaml"
        assert not manager.has_pending_changes()[0] and manager.get_all_hashes() == [hash]
        assert str(manager.save_data_snapshot()) == (
            f"{manager.data_checkpoint_dir}/{data}/{data}_data_snapshot.json"
        )
        assert read(root, f"checkpoints/HP/{hp}/{hp}_config.yaml")
        manager.log("loss", 1.0, 1)
        assert manager.load_logger_snapshot() is True
        for wrong in ({"config": {"lr": 2}}, {"config_name": "other"}):
            with pytest.raises(InvalidInputError, match="config"):
                manager.save_config(**wrong)
        with pytest.raises(InvalidInputError, match="force_new_state"):
            manager.save_data_snapshot(force_new_state=True)


def test_a_name_is_of_one_state_and_not_of_the_configuration(root: str) -> None:
    """`rename_run` changes neither a document nor what is watched: ``experiment_name`` of the
    configuration names the states that are written from then on; a given name stays."""
    config = {"lr": 1.0, "experiment_name": "as configured"}
    with opened(root) as manager:
        manager.watch(model=net(), hyperparameters=config)
        first = manager.update_experiment_hash(dump_immediately=True).hash
        path = f"checkpoints/HP/{first[:8]}/{first[:8]}_config.yaml"
        before = read(root, path)
        assert manager.rename_run(first, "better")
        assert config["experiment_name"] == "as configured" and read(root, path) == before
        assert manager.update_experiment_hash() == (first, False, set())
        manager.save_model_checkpoint(step=1)
        config["lr"] = 2.0
        second = manager.update_experiment_hash(dump_immediately=True).hash
        names = {r["hash"]: r["experiment_name"] for r in manager.list_runs()}
        assert names == {first: "better", second: "as configured"}
        entries = yaml.safe_load(read(root, "checkpoints/manifest.yaml"))["experiments"]
        assert {h: e["experiment_name"] for h, e in entries.items()} == names


def test_what_no_method_takes(tmp_path: Path) -> None:
    """'Every public method says what it returns and raises': a wrong value is refused by name."""
    with started(tmp_path / "exp") as manager:
        hash = manager.current_exp_hash or ""
        for target in ("3", float("nan"), [1]):
            with pytest.raises(InvalidInputError, match="target_step"):
                manager.load_checkpoint(hash, target_step=target)  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match=r"metrics\['val'\]"):
            manager.save_model_checkpoint(step=2, metrics={"val": "good"})  # type: ignore[dict-item]
        with pytest.raises(InvalidInputError, match="sort_by"):
            manager.get_all_hashes(sort_by="size")  # type: ignore[arg-type]
        loss = torch.ones(1, requires_grad=True) * 2
        for name, given in (
            ("metrics", [1.0]),
            ("metadata", [1.0]),
            ("/metadata/loss", {"loss": loss}),
            ("/metadata/of/lock", {"of": {"lock": threading.Lock()}}),
        ):
            more: Any = {name.strip("/").partition("/")[0]: given}
            with pytest.raises(InvalidInputError, match=f"^{name}: "):
                manager.save_model_checkpoint(step=2, wait=False, **more)
        with pytest.raises(InvalidInputError, match="^dataloaders: expected a mapping"):
            manager.watch(dataloaders=[1])  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match="^root_log_dir: an empty text"):
            opened("")
        assert manager.get_checkpoint_info()["steps"] == [1]


# -- what resuming gives


@pytest.mark.parametrize("how", ["constructor", "option", "watched option"])
def test_what_resuming_leaves_a_load_still_restores(tmp_path: Path, how: str) -> None:
    """'load_model, load_weights, load_config, load_data are accepted with the public tool's
    meaning': they are about resuming. 'an explicit load_state writes the old one into the watched
    mapping', and tags and weights too."""
    names = ("load_weights", "load_config", "load_data")
    block: dict[str, Any] = {"checkpoint_manager": dict.fromkeys(names, False)}
    root, data = tmp_path / "exp", samples()
    data.loc[1, "discarded"] = True
    with opened(root) as manager:
        manager.watch(model=net(fill=1.0), hyperparameters={"lr": 1.0}, data=data)
        hash = manager.update_experiment_hash(dump_immediately=True).hash
    more: dict[str, Any] = {
        "constructor": {"load_model": False, "load_config": False, "load_data": False},
        "option": {**block, "load_config": True},
        "watched option": {"load_config": True},
    }[how]
    model, config, live = net(fill=9.0), {"lr": 9.0}, samples()
    with opened(root, **more) as manager:
        watched = {**config, **block} if how == "watched option" else config
        manager.watch(hyperparameters=watched)
        manager.watch(model=model, data=live)
        assert model.weight[0, 0] == 9.0 == watched["lr"] and not live["discarded"].any()
        assert manager.update_experiment_hash().changed == {"hp", "data"}
        assert manager.load_state(hash, force=True)
        assert model.weight[0, 0] == 1.0 == watched["lr"] and live.loc[1, "discarded"]
        assert manager.update_experiment_hash() == (hash, False, set())


def test_a_pickled_model_may_be_left_out_by_option(tmp_path: Path) -> None:
    """'load_model': whether a pickled model that may be loaded is, unasked."""
    options = {"dump_model_architecture": True, "load_model": False}
    with started(tmp_path / "exp", **options) as manager:
        hash = manager.current_exp_hash or ""
        assert manager.load_checkpoint(hash)["model"] is None
        assert manager.load_checkpoint(hash, load_model=True)["model"] is not None


def test_a_load_that_cannot_be_exact_changes_nothing(tmp_path: Path) -> None:
    """RS2: 'otherwise refuse to claim deterministic resume'; RS7: 'Default strict: fail, or load
    and return a report'. 'any apply error -> False but partly applied' is what it must not be."""
    root, said = tmp_path / "exp", Said()
    training = Training()
    with opened(root) as manager:
        training.watch(manager)
        older = manager.update_experiment_hash(dump_immediately=True).hash
        training.train(2, manager)
        manager.save_model_checkpoint(step=2)
        trained = training.weights()
        training.config["lr"] = 0.5
        newer = manager.update_experiment_hash(dump_immediately=True).hash
    other = Training(seed=5)
    other.loader = DataLoader(Indexed(), batch_size=6, shuffle=True)
    other.config["lr"] = 0.5
    with opened(root, said) as manager:
        other.watch(manager)
        with torch.no_grad():
            other.net.first.weight.zero_()
        before, config = other.weights(), dict(other.config)
        with pytest.raises(InvalidInputError, match="batch size: 6 now, 4 saved.* strict=False"):
            manager.load_state(older, force=True)
        assert manager.current_exp_hash == newer and manager.previous_exp_hash is None
        assert equal(other.weights(), before) and other.config == config
        said.clear()
        assert manager.load_state(older, force=True, strict=False)
        assert said.has("does not go on exactly: BatchSampler.batch_size is 6, was 4")
        assert manager.current_exp_hash == older and equal(other.weights(), trained)
        assert other.config["lr"] == 1e-2


# -- tags


def test_an_older_state_restores_its_tags_exactly(tmp_path: Path) -> None:
    """'Loading an older state restores its tags exactly (later ones vanish)', in a frame, in a
    mapping, in what a callable gives; a callable that always gives a copy is refused."""
    first = opened(tmp_path / "exp")
    data = samples()
    first.watch(data=data)
    older = first.update_experiment_hash(dump_immediately=True).hash
    data.loc[1, "discarded"] = True
    data["tag:late"] = [i == 5 for i in range(len(data))]
    newer = first.update_experiment_hash(dump_immediately=True).hash
    assert first.load_state(older) and "tag:late" not in data and not data["discarded"].any()
    pd.testing.assert_frame_equal(data, samples())
    assert first.update_experiment_hash() == (older, False, set())
    assert first.load_state(newer) and data["tag:late"].sum() == 1 and data.loc[1, "discarded"]
    first.close()
    with opened(tmp_path / "exp") as manager:
        live = samples()
        manager.watch(data=lambda: live)
        assert live["tag:late"].sum() == 1 and live.loc[1, "discarded"]
        assert manager.update_experiment_hash() == (newer, False, set())
    with opened(tmp_path / "exp") as manager:
        mapping = {
            str(i): {"discarded": False, "tag:odd": bool(o)}
            for i, o in zip(live["sample_id"], live["tag:odd"], strict=True)
        }
        manager.watch(data=mapping)
        assert mapping["s1"]["discarded"] and manager.update_experiment_hash().hash == newer
    copies = "another object at each call"
    with opened(tmp_path / "exp") as manager, pytest.raises(InvalidInputError, match=copies):
        manager.watch(data=samples)
