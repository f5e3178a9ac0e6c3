"""Damage: found, named, fallen back from, never run and never passed on.

Sentences in quotation marks are the promises that a test shows.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest
import torch
import yaml
from typer.testing import CliRunner

from castore import (
    CastoreError,
    CorruptObjectError,
    FormatError,
    IntegrityError,
    ObjectNotFoundError,
    Options,
    Repository,
    UntrustedPickleError,
)
from castore.cli.app import app
from castore.objects import object_name
from castore_experiments import CheckpointManager
from castore_experiments.commits import Save, commit_state, commit_weights
from castore_experiments.documents import CONFIG
from castore_experiments.layout import architecture_path, config_path, data_json_path
from castore_experiments.records import Records
from castore_experiments.states import State
from tests.drivers.experiments.small import Said, filled, net, opened, started
from tests.drivers.experiments.training import samples
from tests.helpers import flip_object


def records_of(manager: CheckpointManager) -> Records:
    records = manager._session.place.archive
    assert isinstance(records, Records)
    return records


# -- weights


def trained(root: Path, steps: int = 3, **options: Any) -> str:
    """Weights of steps 1.. filled with the step; each has an object of its own."""
    with opened(root, checkpoint_manager={"compression": "none", **options}) as manager:
        manager.watch(model=net(20_000), hyperparameters={"lr": 1.0})
        for step in range(1, steps + 1):
            manager.save_model_checkpoint(net(20_000, float(step)), step=step)
        return manager.current_exp_hash or ""


def own_object(root: Path, hash: str, step: int) -> tuple[Repository, str]:
    """An object that only the weights of one step need."""
    with opened(root) as manager:
        records = records_of(manager)
        by_step = {w.step: {*records.file_of(w).blobs()} for w in records.weights(hash)}
    others = set[str]().union(*(b for s, b in by_step.items() if s != step))
    return records.repository, sorted(by_step[step] - others)[0]


def damage_object(root: Path, hash: str, step: int, how: str) -> str:
    repository, digest = own_object(root, hash, step)
    if how == "flipped":
        flip_object(repository, digest)
    elif how == "missing":
        repository.backend.delete(object_name(digest))
    else:
        (Path(repository.url) / object_name(digest)).chmod(0o600)
        (Path(repository.url) / object_name(digest)).write_bytes(b"")
    return digest


@pytest.mark.parametrize("how", ["flipped", "missing", "empty"])
def test_resuming_falls_back_from_damaged_weights(tmp_path: Path, how: str) -> None:
    """MC3: 'Falls back to the newest complete one, says what it skipped and why; never deletes it
    on its own'. CC7: an explicit load 'names experiment, object ..., and the next step'."""
    root = tmp_path / "exp"
    hash = trained(root)
    digest = damage_object(root, hash, 3, how)
    said = Said()
    with opened(root, said) as manager:
        model = net(20_000)
        manager.watch(model=model)
        assert torch.all(model.weight == 2.0) and manager.current_exp_hash == hash
        assert said.has(f"step 3 of {hash} is skipped") and said.has(digest[:12])
        with pytest.raises((CorruptObjectError, ObjectNotFoundError)) as e:
            manager.load_checkpoint(hash)
        assert hash in str(e.value) and digest[:12] in str(e.value)
        assert "castore check" in str(e.value)
        with pytest.raises(CastoreError):
            manager.load_state(hash, force=True)
        assert torch.all(model.weight == 2.0)
        assert filled(manager.load_checkpoint(hash, target_step=2)) == 2.0
        assert manager.get_checkpoint_info(hash)["steps"] == [1, 2, 3]
        manager.save_model_checkpoint(step=4)
    with opened(root, said) as manager:
        assert filled(manager.load_checkpoint(hash)) == 2.0


def test_all_weights_damaged_is_an_error(tmp_path: Path) -> None:
    root = tmp_path / "exp"
    hash = trained(root, 1)
    damage_object(root, hash, 1, "flipped")
    with pytest.raises(CorruptObjectError):
        opened(root)
    with opened(root, load_model=False) as manager:  # the rest can still be had
        assert manager.hyperparameters == {"lr": 1.0}


def test_an_experiment_that_is_damaged_is_skipped(tmp_path: Path) -> None:
    """'the newest complete one' may be of an older hash; it is told, and `error_loading_checkpoint`
    says so."""
    root = tmp_path / "exp"
    older = trained(root)
    with opened(root) as manager:
        manager.watch(hyperparameters={"lr": 2.0, "text": "x" * 200_000})
        newer = manager.update_experiment_hash(dump_immediately=True).hash
        file = records_of(manager).state_files(newer)[CONFIG]
        repository = records_of(manager).repository
    flip_object(repository, file.blobs()[0])
    said = Said()
    with opened(root, said) as manager:
        assert manager.current_exp_hash == older and manager.error_loading_checkpoint
        assert said.has(f"experiment {newer} is skipped")
        assert manager.hyperparameters == {"lr": 1.0}
        with pytest.raises(CorruptObjectError):
            manager.load_checkpoint(newer, load_config=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:7],
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: b"version https://git-lfs.github.com/spec/v1\n",
        lambda data: b"<html>not found</html>",
    ],
    ids=["empty", "7 bytes", "half", "one less", "pointer", "page"],
)
def test_files_that_are_no_weights(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """CC7: 'Cut ... by 1 byte, by half, to 0 bytes, to 7 bytes; replace by a text pointer', in a
    root that another program wrote."""
    root = tmp_path / "exp"
    hash = trained(root, 2, materialize="all")
    shutil.rmtree(root / ".castore")
    (newest,) = root.rglob("*_step_000002.pt")
    newest.write_bytes(damage(newest.read_bytes()))
    said = Said()
    with opened(root, said) as manager:
        model = net(20_000)
        manager.watch(model=model, hyperparameters={"lr": 1.0})
        assert torch.all(model.weight == 1.0) and said.has(f"step 2 of {hash} is skipped")
        with pytest.raises(FormatError, match=newest.name):
            manager.load_checkpoint(hash)
        bytes_of = newest.read_bytes()
        manager.save_model_checkpoint(step=3)
        assert said.has(f"{newest.name}: left out")
        assert manager.get_checkpoint_info(hash)["steps"] == [1, 3]
    assert newest.read_bytes() == bytes_of  # kept where it is


def test_weights_under_another_steps_name(tmp_path: Path) -> None:
    root = tmp_path / "exp"
    hash = trained(root, 2, materialize="all")
    shutil.rmtree(root / ".castore")
    (first,) = root.rglob("*_step_000001.pt")
    shutil.copy(first, first.with_name(f"{hash}_step_000009.pt"))
    with opened(root) as manager, pytest.raises(FormatError, match="the name says step 9"):
        manager.load_checkpoint(hash, target_step=9)


# -- pickles


class Trap:
    """Unpickled, it leaves a trace."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def trapped(trace: Path) -> bytes:
    """A weight file whose unpickling has a side effect."""
    out = io.BytesIO()
    torch.save({"step": 9, "model_state_dict": {}, "rng_state": Trap(trace)}, out)
    return out.getvalue()


def _put(root: Path, where: str, hash: str, trace: Path) -> None:
    checkpoints = root / "checkpoints"
    name = {
        "weights": f"models/{hash[8:16]}/{hash}_step_000009.pt",
        "architecture": architecture_path(hash[8:16]),
        "config": config_path(hash[:8]),
        "data": data_json_path(hash[16:]),
    }[where]
    path = checkpoints / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if where == "weights":
        path.write_bytes(trapped(trace))
    elif where == "config":
        path.write_text(f"hyperparameters: !!python/object/apply:os.mkdir ['{trace}']\n")
    else:
        path.write_bytes(pickle.dumps(Trap(trace)))


@pytest.mark.parametrize("where", ["weights", "architecture", "config", "data"])
@pytest.mark.parametrize("sibling", [False, True])
def test_code_in_a_root_never_runs(tmp_path: Path, where: str, sibling: bool) -> None:
    """SE1: 'Never executed on open/discover/audit/load; explicit trust flag for architecture
    pickles; no automatic fallback' - in the root, and in a sibling found by discovery."""
    trace, root = tmp_path / "trace", tmp_path / "sweep" / "a"
    with opened(root, checkpoint_manager={"materialize": "all"}) as manager:
        manager.watch(model=net(), hyperparameters={"lr": 1.0}, data=samples())
        manager.save_model_checkpoint(step=1)
        hash = manager.current_exp_hash or ""
    shutil.rmtree(root / ".castore")
    _put(root, where, hash, trace)
    given = root
    if sibling:
        given = tmp_path / "sweep"
        started(given / "b").close()
    said = Said()
    try:
        with opened(given, said) as manager:
            manager.watch(model=net(), hyperparameters={"lr": 1.0}, data=samples())
            manager.get_all_hashes()
            manager.signals("loss")
            for load in (False, True):
                try:
                    manager.load_checkpoint(hash, load_config=load, force=True)
                    manager.load_checkpoint(hash, load_model=load, load_weights=False)
                except (FormatError, UntrustedPickleError):
                    pass
            manager.update_experiment_hash()
            manager.save_model_checkpoint(step=2)
    except (FormatError, UntrustedPickleError):
        assert where in ("config", "data")  # what is damaged of the one hash there is
    for command in (["verify", str(root)], ["runs", str(root)], ["why", str(root), hash, hash]):
        CliRunner().invoke(app, ["experiments", *command])
    Repository.init(tmp_path / "store")
    result = CliRunner().invoke(
        app, ["experiments", "import", str(root), "-r", str(tmp_path / "store"), "-n", "imported"]
    )
    assert result.exit_code in (0, 3), result.output
    CliRunner().invoke(app, ["check", "-r", str(tmp_path / "store"), "--layout"])
    assert not trace.exists()
    pickle.loads(pickle.dumps(Trap(trace)))  # the trap works
    assert trace.exists()


def test_code_in_weights_of_a_repository_never_runs(tmp_path: Path) -> None:
    """SE1, committed by someone else of the team: skipped at resuming, an error when asked for."""
    trace, root = tmp_path / "trace", tmp_path / "exp"
    with started(root) as manager:
        records, state = records_of(manager), manager._session.tracker.state
        assert state is not None
        commit_weights(records, state, Save(9, "t"), trapped(trace))
        hash = state.hash
    said = Said()
    with opened(root, said, allow_pickle=True) as manager:
        assert said.has(f"step 9 of {hash} is skipped")
        with pytest.raises(UntrustedPickleError):
            manager.load_checkpoint(hash)
        with pytest.raises(UntrustedPickleError):
            manager.load_state(hash, force=True)
        assert filled(manager.load_checkpoint(hash, target_step=1)) == 1.0
    assert not trace.exists()


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize("where", ["manifest", "config"])
@pytest.mark.parametrize("text", [BOMB, "a: " + "[" * 100_000, "a: 1" + ":1" * 100_000])
def test_a_yaml_bomb_in_a_root_is_refused_in_little_memory(
    tmp_path: Path, where: str, text: str
) -> None:
    """SE3: 'size/depth/alias limits', in a root that is opened and imported."""
    root = tmp_path / "exp"
    with opened(root, checkpoint_manager={"materialize": "all"}) as manager:
        manager.watch(model=net(), hyperparameters={"lr": 1.0})
        manager.save_model_checkpoint(step=1)
        hash = manager.current_exp_hash or ""
    shutil.rmtree(root / ".castore")
    path = "manifest.yaml" if where == "manifest" else config_path(hash[:8])
    (root / "checkpoints" / path).write_text(text)
    tracemalloc.start()
    try:
        try:
            with opened(root, Said()) as manager:
                assert manager.get_all_hashes() in ([], [hash])
                manager.load_checkpoint(hash, load_config=True)
        except CastoreError:
            pass
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


# -- verify


def verify(root: Path) -> list[tuple[str, str]]:
    """What ``castore experiments verify`` finds."""
    result = CliRunner().invoke(app, ["experiments", "verify", str(root), "--json"])
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == (3 if found else 0), result.output
    return [(f["object"], f["detail"]) for f in found]


def check_layout(root: Path) -> list[str]:
    """What ``castore check --layout`` finds."""
    result = CliRunner().invoke(app, ["check", "-r", str(root / ".castore"), "--layout", "--json"])
    found = [json.loads(line) for line in result.stdout.splitlines()]
    problems = [f for f in found if f["type"] == "problem"]
    assert result.exit_code == (3 if problems else 0), result.output
    return [json.dumps(f) for f in problems]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two hashes, weights, data, curves; nothing wrong with it."""
    root = tmp_path / "exp"
    with opened(root, checkpoint_manager={"materialize": "all"}) as manager:
        manager.watch(model=net(), hyperparameters={"lr": 1.0}, data=samples())
        for step in (1, 2):
            manager.log("loss", step / 2, step, per_sample={"s1": 0.5})
            manager.save_model_checkpoint(net(fill=float(step)), step=step)
        manager.watch(hyperparameters={"lr": 2.0})
        manager.update_experiment_hash(dump_immediately=True)
    assert verify(root) == [] == check_layout(root)
    return root


def first_state(root: Path) -> tuple[Records, State]:
    with opened(root) as manager:
        records = records_of(manager)
    return records, records.state(records.hashes()[-1])


def flip(label: str) -> str:
    return label[:-1] + ("0" if label[-1] != "0" else "1")


@pytest.mark.parametrize("segment", [0, 8, 16])
def test_a_flipped_label_is_found(root: Path, segment: int) -> None:
    """'labels against digests'."""
    from dataclasses import replace

    records, state = first_state(root)
    hash = (
        state.hash[:segment] + flip(state.hash[segment : segment + 8]) + state.hash[segment + 8 :]
    )
    files = records.state_files(state.hash)
    commit_state(records, replace(state, hash=hash), files, Options())
    (*_, name) = [n for n in records.repository.snapshots(records.namespace) if hash in n.key]
    for found in ("\n".join(map(str, verify(root))), "\n".join(check_layout(root))):
        assert "is no part of" in found and hash[segment : segment + 8] in found
        assert name.id in found or name.path in found


def test_a_file_under_anothers_name_is_found(root: Path) -> None:
    """'every file's name against its content', 'step in the name against the step in the file'."""
    records, state = first_state(root)
    data = records.weight_file(records.weights(state.hash)[0])
    commit_weights(records, state, Save(7, "t"), data)
    for text in (str(verify(root)), str(check_layout(root))):
        assert "the name says step 7, the file 2" in text


@pytest.mark.parametrize("kind", ["config", "data_json", "weights"])
def test_an_edited_file_is_found(root: Path, kind: str) -> None:
    _, state = first_state(root)
    hash = state.hash
    path = {
        "config": config_path(hash[:8]),
        "data_json": data_json_path(hash[16:]),
        "weights": f"models/{hash[8:16]}/{hash}_step_000001.pt",
    }[kind]
    file = root / "checkpoints" / path
    file.write_bytes(file.read_bytes() + b" ")
    assert [p for p, _ in verify(root)] == [path]
    assert check_layout(root) == []  # the repository is whole


def test_a_config_that_another_state_claims_is_found(root: Path) -> None:
    records, state = first_state(root)
    other = records.state(records.hashes()[0])
    files = {**records.state_files(state.hash), CONFIG: records.state_files(other.hash)[CONFIG]}
    commit_state(records, state, files, Options())
    for text in (str(verify(root)), str(check_layout(root))):
        assert CONFIG in text and "its digest is" in text and "is not what" in text


@pytest.mark.parametrize(
    "edit", ["step", "number", "gone", "besides", "latest", "label", "garbage", "deleted"]
)
def test_an_edited_manifest_is_found(root: Path, edit: str) -> None:
    """'manifest against snapshots'."""
    file = root / "checkpoints" / "manifest.yaml"
    body = yaml.safe_load(file.read_text())
    _, state = first_state(root)
    if edit == "step":
        body["experiments"][state.hash]["latest_weight_step"] = 1
        body["experiments"][state.hash]["latest_weight_checkpoint"] = f"{state.hash}_step_000001.pt"
    elif edit == "number":
        body["experiments"][state.hash]["latest_weight_step"] = 1
    elif edit == "gone":
        del body["experiments"][state.hash]
    elif edit == "besides":
        body["experiments"]["0" * 24] = {
            **body["experiments"][state.hash],
            **dict.fromkeys(("hp_hash", "model_hash", "data_hash"), "0" * 8),
        }
    elif edit == "latest":
        body["latest_hash"] = state.hash
    elif edit == "label":
        body["experiments"][state.hash]["hp_hash"] = "01234567"
    file.write_text("experiments: [" if edit == "garbage" else yaml.safe_dump(body))
    if edit == "deleted":
        file.unlink()
    found = verify(root)
    assert found and {p for p, _ in found} == {"checkpoints/manifest.yaml"}


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE signals SET metric_value = 9 WHERE step = 1",
        "DELETE FROM signals WHERE step = 1",
        "INSERT INTO signals SELECT * FROM signals WHERE step = 1",
        "UPDATE per_sample SET value = 9",
        "DROP TABLE per_sample",
    ],
)
def test_a_changed_row_of_the_database_is_found(root: Path, change: str) -> None:
    """'curves' Parquet files against the database'."""
    with duckdb.connect(str(root / "checkpoints/loggers/loggers.duckdb")) as connection:
        connection.execute(change)
    found = verify(root)
    assert found and {p for p, _ in found} == {"checkpoints/loggers/loggers.duckdb"}


def test_what_is_no_database_is_found(root: Path) -> None:
    """A problem among the others, not the end of the check."""
    (root / "checkpoints/loggers/loggers.duckdb").write_bytes(b"x")
    ((path, text),) = verify(root)
    assert path == "checkpoints/loggers/loggers.duckdb" and "no DuckDB file" in text


def test_damage_in_the_repository_is_found(root: Path) -> None:
    records, state = first_state(root)
    (newest, *_) = records.weights(state.hash)
    digest = records.file_of(newest).blobs()[0]
    flip_object(records.repository, digest)
    assert any(digest[:12] in text for _, text in verify(root))
    with opened(root) as manager, pytest.raises(IntegrityError):
        manager.load_checkpoint(state.hash)
