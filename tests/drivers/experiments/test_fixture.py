"""A root that version 2.0.3 of the public tool wrote: opened, taken in, and gone on with."""

from __future__ import annotations

import io
import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml

from castore import FormatError, Repository
from castore_experiments import CheckpointManager, rng, weightslab
from castore_experiments.audit import audit
from castore_experiments.components import WEIGHTSLAB_2
from castore_experiments.documents import read_object
from castore_experiments.export import export
from castore_experiments.files import Files, open_files
from castore_experiments.folder import FolderRecords
from castore_experiments.importer import Imported, import_root
from castore_experiments.layout import FOREIGN_STATE
from castore_experiments.options import Options
from castore_experiments.place import Place, World
from castore_experiments.records import Records
from tests.drivers.experiments import fixture
from tests.drivers.experiments.fixture import HASHES, LATEST, ROOT, Program
from tests.drivers.experiments.places import KINDS, place
from tests.drivers.experiments.training import Training, equal

MODEL = HASHES[LATEST]["segments"]["model"]


@pytest.fixture(params=KINDS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The public tool's root, local or on S3."""
    url = place(request.param, request, tmp_path, "single")
    fixture.lay(url)
    return url


def nothing(line: str) -> None:
    """Takes a report that a test does not look at."""


# -- reading


def open_in_place(root: str) -> CheckpointManager:
    """As its files tell."""
    return CheckpointManager(root, report=nothing)


def open_taken_in(root: str) -> CheckpointManager:
    """As its own repository tells, after the first write."""
    with CheckpointManager(root, report=nothing) as manager:
        assert manager.set_run_notes(LATEST, "written here")
    return CheckpointManager(root, report=nothing)


def open_elsewhere(root: str) -> CheckpointManager:
    """As another repository tells, which an import made; the first root is not there any more."""
    repository = Repository.init(f"{root}-store")
    importing(root, repository)
    return opened_elsewhere(root, repository)


def opened_elsewhere(
    root: str, repository: Repository, fresh: str | None = None
) -> CheckpointManager:
    options = {"repository": repository.url, "namespace": "old"}
    return CheckpointManager(fresh or f"{root}-fresh", checkpoint_manager=options, report=nothing)


Open = Callable[[str], CheckpointManager]


@pytest.fixture(params=[open_in_place, open_taken_in, open_elsewhere])
def opened(request: pytest.FixtureRequest, root: str) -> Any:
    """A manager of the root, by each of the ways there are."""
    manager: CheckpointManager = request.param(root)
    yield manager
    manager.close()


def test_every_value_of_the_fixture(opened: CheckpointManager) -> None:
    """Hashes, manifest, steps, tensors, optimizer, positions, random numbers, data, curves."""
    assert opened.current_exp_hash == fixture.EXPECTED["open_parent"]["current_exp_hash"]
    assert opened.get_latest_hash() == fixture.EXPECTED["open_parent"]["latest_hash"]
    assert not opened.is_multi_root and not opened.error_loading_checkpoint
    assert opened.list_experiment_hashes() == list(ROOT["manifest"]["experiments"])
    _check_runs(opened)
    for hash, known in HASHES.items():
        assert opened.get_checkpoint_info(hash)["steps"] == [int(s) for s in known["steps"]]
        for step, expected in known["steps"].items():
            _check_weights(opened, hash, int(step), expected)
        _check_documents(opened, hash, known)
    _check_curves(opened)


def _check_runs(opened: CheckpointManager) -> None:
    runs = {r["hash"]: r for r in opened.list_runs()}
    for hash, entry in ROOT["manifest"]["experiments"].items():
        ours = runs[hash]
        for key in entry.keys() - {"last_used", "notes"}:
            assert ours[key] == entry[key], (hash, key)
        assert ours["is_current"] is (hash == LATEST)


def _check_weights(opened: CheckpointManager, hash: str, step: int, known: Any) -> None:
    loaded = opened.load_checkpoint(hash, target_step=step, load_data=False)
    found = loaded["weights"]
    assert sorted(found) == known["keys"]
    assert (found["step"], found["exp_hash"]) == (step, known["exp_hash"])
    state = found["model_state_dict"]
    tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
    assert {k: fixture.tensor_digest(v) for k, v in tensors.items()} == known["tensors"]
    assert {k: str(v) for k, v in state.items() if k not in tensors} == known["non_tensors"]
    assert fixture.tree_digest(found["optimizer_state_dict"]) == known["optimizer_digest"]
    assert loaded["dataloader_iteration_state"] == known["dataloader_iteration_state"]
    rng.restore(loaded["rng_state"])
    assert fixture.next_randoms() == known["next_randoms_after_rng_restore"]


def _check_documents(opened: CheckpointManager, hash: str, known: Any) -> None:
    loaded = opened.load_checkpoint(hash, load_weights=False, load_config=True, force=True)
    assert loaded["config"] == known["config"]
    assert loaded["loaded_components"] == {"config", "data"}
    rng.restore(loaded["rng_state"])
    assert fixture.next_randoms() == known["data"]["next_randoms_after_rng_restore"]
    table: pd.DataFrame = loaded["data_state"]["snapshot"].reset_index()
    assert len(table) == known["data"]["rows"]
    assert sorted(table.columns) == known["data"]["columns"]
    assert sorted(table["sample_id"][table["discarded"]]) == known["data"]["discarded"]
    tags = [c for c in table.columns if c.startswith("tag:")]
    found = {c.removeprefix("tag:"): sorted(table["sample_id"][table[c]]) for c in tags}
    assert found == known["data"].get("tags", {})
    last = opened.load_checkpoint(hash)["weights"]["step"]
    assert last == known["latest_weight_step"]


def _check_curves(opened: CheckpointManager) -> None:
    for metric, by_hash in ROOT["signals"].items():
        for hash, points in by_hash.items():
            found = opened.signals(metric, hash)[["step", "metric_value"]].values.tolist()
            assert found == points, (metric, hash)
    rows = [opened.per_sample("train_loss/CE", hash) for hash in HASHES]
    every = pd.concat(rows)
    assert len(every) == ROOT["per_sample_rows"]
    assert fixture.rows_digest(every) == ROOT["per_sample_sha256"]


def test_labels_are_those_of_the_content(root: str) -> None:
    """Scheme weightslab-2 gives the segments that the tool gave."""
    with open_in_place(root) as manager:
        for hash, known in HASHES.items():
            loaded = manager.load_checkpoint(hash, load_weights=False, load_config=True, force=True)
            table = loaded["data_state"]["snapshot"].reset_index()
            state = fixture_state(table)
            labels = known["segments"]
            assert weightslab.hp_digest(loaded["config"])[:8] == labels["hp"]
            assert weightslab.data_digest(state)[:8] == labels["data"]
            init = 6 if labels["model"] == MODEL else 0
            assert weightslab.model_digest(fixture.TinyNet(), init)[:8] == labels["model"]


def fixture_state(table: pd.DataFrame) -> Any:
    from castore_experiments.samples import DataState

    return DataState.from_any(table)


def test_the_expected_files_are_those_of_the_archive(root: str) -> None:
    """The fixture is whole, and nothing of it was changed on the way here."""
    found = fixture.digests(open_files(root))
    assert ROOT["files"].items() <= found.items()
    state = read_object(open_files(root).get(".checkpoint_manager_state.json"), "state")
    assert state == ROOT["manager_state"]
    manifest = yaml.safe_load(open_files(root).get("checkpoints/manifest.yaml"))
    assert manifest == ROOT["manifest"]


def test_opening_touches_nothing_until_the_first_write(root: str) -> None:
    files = open_files(root)
    before = fixture.state_of(files)
    program = Program()
    with CheckpointManager(root, report=nothing) as manager:
        manager.watch(**program.watched())
        assert manager.update_experiment_hash() == (LATEST, False, set())
        assert not manager.save_pending_changes()
        assert manager.list_runs() and manager.get_checkpoint_info(LATEST)
        assert len(manager.signals("train_loss/CE"))
        assert manager.load_state(next(iter(HASHES)), force=True)
        assert manager.current_exp_hash == next(iter(HASHES))
    assert fixture.state_of(files) == before


# -- going on


def watched(root: str, program: Program, **options: Any) -> CheckpointManager:
    manager = CheckpointManager(root, checkpoint_manager=options, report=nothing)
    manager.watch(**program.watched())
    return manager


def test_it_is_gone_on_with_in_place(root: str) -> None:
    """'opening such a root with our manager ... touches nothing until the first write, and then
    goes on in place as the document says (manifest and curves extended, foreign files kept)'."""
    files, program = open_files(root), Program()
    before = fixture.digests(files)
    with watched(root, program) as manager:
        expected = HASHES[LATEST]["steps"]["12"]
        state = program.net.state_dict()
        assert {k: fixture.tensor_digest(v) for k, v in state.items()} == expected["tensors"]
        assert fixture.tree_digest(program.opt.state_dict()) == expected["optimizer_digest"]
        assert manager.update_experiment_hash() == (LATEST, False, set())
        for step in (13, 14):
            manager.log("train_loss/CE", 0.5, step, per_sample={"3": 0.25})
        path = manager.save_model_checkpoint(step=14)
        assert str(path).endswith(f"checkpoints/models/{MODEL}/{LATEST}_step_000014.pt")
        curve = manager.signals("train_loss/CE", LATEST)[["step", "metric_value"]].values.tolist()
    known = ROOT["signals"]["train_loss/CE"][LATEST]
    assert curve == [*known, [13, 0.5], [14, 0.5]]
    after = fixture.digests(files)
    extended = {
        "checkpoints/manifest.yaml",
        "checkpoints/loggers/loggers.duckdb",
        ".checkpoint_manager_state.json",
    }
    assert {k: v for k, v in before.items() if k not in extended}.items() <= after.items()
    with CheckpointManager(root, report=nothing) as manager:
        _check_runs_extended(files)
        assert manager.get_checkpoint_info(LATEST)["steps"] == [6, 8, 10, 12, 14]
        assert manager.get_checkpoint_info(LATEST)["scheme"] == WEIGHTSLAB_2
        curve = manager.signals("train_loss/CE", LATEST)[["step", "metric_value"]].values.tolist()
        assert curve == [*known, [13, 0.5], [14, 0.5]]


def _check_runs_extended(files: Files) -> None:
    manifest = yaml.safe_load(files.get("checkpoints/manifest.yaml"))
    old = ROOT["manifest"]["experiments"]
    assert list(manifest["experiments"]) == list(old)
    for hash, entry in manifest["experiments"].items():
        changes = {"last_used", "latest_weight_checkpoint", "latest_weight_step"}
        kept = old[hash].keys() - (changes if hash == LATEST else set())
        assert {k: entry[k] for k in kept} == {k: old[hash][k] for k in kept}
    assert manifest["experiments"][LATEST]["latest_weight_step"] == 14
    assert manifest["latest_hash"] == LATEST
    assert manifest["last_updated"] >= ROOT["manifest"]["last_updated"]


def test_hashes_go_on_by_its_scheme(root: str) -> None:
    program = Program()
    with watched(root, program) as manager:
        config = {**HASHES[LATEST]["config"], "root_log_dir": root}
        manager.watch(hyperparameters=config)
        update = manager.update_experiment_hash(dump_immediately=True)
        hp = weightslab.hp_digest(config)[:8]
        assert update == (f"{hp}{LATEST[8:]}", True, {"hp"})
        program.data.loc[[3, 7], "discarded"] = True
        program.data["tag:hard"] = program.data["sample_id"].isin(["1", "2", "5"])
        known = manager.update_experiment_hash(dump_immediately=True)
        assert known == (f"{hp}{MODEL}448e10ce", True, {"data"})
        program.data["tag:hard"] = False  # a tag alone: there that is the same label
        untagged = manager.update_experiment_hash(dump_immediately=True)
        assert untagged.changed == {"data"} and untagged.is_new
        assert untagged.hash[16:] != "448e10ce"
        assert untagged.hash[:16] == known.hash[:16]
        assert manager.load_state(known.hash, force=True)
        assert sorted(program.data["sample_id"][program.data["tag:hard"]]) == ["1", "2", "5"]
        assert manager.update_experiment_hash() == (known.hash, False, set())
        assert manager.load_state(LATEST, force=True)
        assert config == HASHES[LATEST]["config"]
        assert manager.update_experiment_hash() == (LATEST, False, set())


def test_every_hash_can_be_branched_from(root: str) -> None:
    """The step a model was initialised at stands in no file but for the current hash."""
    program = Program()
    for hash in HASHES:
        with watched(root, program) as manager:
            assert manager.load_state(hash, force=True)
            assert manager.update_experiment_hash() == (hash, False, set())
            last = max(HASHES[hash]["steps"], key=int)
            expected = HASHES[hash]["steps"][last]["tensors"]
            state = program.net.state_dict()
            assert {k: fixture.tensor_digest(v) for k, v in state.items()} == expected


def test_what_was_taken_in_verifies(root: str) -> None:
    """Names against content, labels against digests, manifest and curves against snapshots."""
    with CheckpointManager(root, report=nothing) as manager:
        assert manager.set_run_notes(LATEST, "seen")
        program = Program()
        manager.watch(**program.watched())
        program.data.loc[5, "discarded"] = True
        manager.update_experiment_hash(dump_immediately=True)
    records, files = kept(root)
    assert list(audit(records, files)) == []
    entry = yaml.safe_load(files.get("checkpoints/manifest.yaml"))["experiments"][LATEST]
    assert entry["notes"] == "seen"


def test_its_state_file_follows(root: str) -> None:
    """The public tool believes that file more than the manifest."""
    files, program = open_files(root), Program()
    files.replace(
        FOREIGN_STATE,
        json.dumps({**ROOT["manager_state"], "somebody": "else"}).encode(),
        version(files, FOREIGN_STATE),
    )
    with watched(root, program) as manager:
        program.data.loc[3, "discarded"] = True
        hash = manager.update_experiment_hash(dump_immediately=True).hash
        manager.save_model_checkpoint(step=20)
    state = read_object(files.get(FOREIGN_STATE), "state")
    assert state["somebody"] == "else" and state["last_updated"] > "2026"
    assert (state["current_exp_hash"], state["previous_exp_hash"]) == (hash, LATEST)
    assert (state["step_counter"], state["model_init_step"]) == (20, 6)
    labels = {"hp": hash[:8], "model": hash[8:16], "data": hash[16:]}
    assert state["component_hashes"] == {**labels, "combined": hash}


def test_a_damaged_state_file_is_told_and_left(tmp_path: Path) -> None:
    files = fixture.lay(str(tmp_path / "single"), frozenset({FOREIGN_STATE}))
    files.create(FOREIGN_STATE, b'{"current_exp')
    lines: list[str] = []
    with CheckpointManager(files.url, report=lines.append) as manager:
        assert manager.current_exp_hash == LATEST
    assert any(FOREIGN_STATE in line for line in lines)


# -- import


def importing(root: str, repository: Repository) -> tuple[Imported, list[str]]:
    lines: list[str] = []
    records = Records(repository, "old")
    records.refresh()
    folder = FolderRecords(open_files(root), lines.append)
    return import_root(folder, records, lines.append), lines


def counts(done: Imported) -> tuple[int, int, int, int]:
    return done.states, done.weights, done.rows, done.left


ROWS = 60 + ROOT["per_sample_rows"]
FILES = sum(len(known["steps"]) for known in HASHES.values())


def test_import_is_incremental(root: str) -> None:
    repository = Repository.init(f"{root}-store")
    before = fixture.state_of(open_files(root))
    done, lines = importing(root, repository)
    assert counts(done) == (4, FILES, ROWS, 0) and not lines
    again, lines = importing(root, repository)
    assert counts(again) == (0, 0, 0, 0) and not lines
    assert fixture.state_of(open_files(root)) == before


@pytest.mark.parametrize("kind", KINDS)
def test_import_while_the_root_is_written(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    """A file that is not whole yet is left out, told, and taken by the next import."""
    root = place(kind, request, tmp_path, "single")
    torn = {
        f"checkpoints/{HASHES[LATEST]['steps']['12']['file']}": "step 12",
        "checkpoints/data/448e10ce/448e10ce_data_snapshot.parquet": "448e10ce",
        "checkpoints/HP/fb69bfcd/fb69bfcd_config.yaml": "fb69bfcd",
    }
    whole = dict(fixture.members())
    files = fixture.lay(root, frozenset(torn))
    for name in torn:
        files.create(name, whole[name][: len(whole[name]) // 2])
    repository = Repository.init(f"{root}-store")
    done, lines = importing(root, repository)
    assert counts(done) == (4, FILES - 1, ROWS, 3)
    for name in torn:
        assert any(name.removeprefix("checkpoints/") in line for line in lines), name
    with opened_elsewhere(root, repository) as manager:
        assert manager.current_exp_hash == LATEST
        assert manager.load_checkpoint(LATEST)["weights"]["step"] == 10
        assert manager.load_checkpoint(LATEST, load_config=True, force=True)["config"] is None
    for name in torn:
        files.replace(name, whole[name], files.stat(name).version)
    done, lines = importing(root, repository)
    assert counts(done) == (2, 1, 0, 0) and not lines
    done, lines = importing(root, repository)
    assert counts(done) == (0, 0, 0, 0) and not lines
    with opened_elsewhere(root, repository) as manager:
        test_every_value_of_the_fixture(manager)


class Boom:
    """Its pickle would end the process."""

    def __reduce__(self) -> Any:
        return os.abort, ()


def test_a_root_that_would_run_code_is_imported_without_running_it(tmp_path: Path) -> None:
    """SE1: 'opening a root runs code' there. Weights with code are left out, pickles only kept."""
    files = fixture.lay(str(tmp_path / "single"))
    name = f"checkpoints/{HASHES[LATEST]['steps']['12']['file']}"
    out = io.BytesIO()
    torch.save({"step": 12, "exp_hash": LATEST, "model_state_dict": Boom()}, out)
    files.replace(name, out.getvalue(), version(files, name))
    architecture = f"checkpoints/models/{MODEL}/{MODEL}_architecture.pkl"
    files.create(architecture, pickle.dumps(Boom()))
    repository = Repository.init(str(tmp_path / "store"))
    done, lines = importing(files.url, repository)
    assert counts(done) == (4, FILES - 1, ROWS, 1)
    assert any("step_000012" in line for line in lines)
    with opened_elsewhere(files.url, repository, str(tmp_path / "fresh")) as manager:
        assert manager.load_checkpoint(LATEST)["weights"]["step"] == 10
        assert manager.load_checkpoint(LATEST)["model"] is None


@pytest.mark.parametrize("suffix", ["_architecture.pkl", "_architecture_ref.json"])
def test_architectures_that_are_cut_off(tmp_path: Path, suffix: str) -> None:
    files = fixture.lay(str(tmp_path / "single"))
    whole = {
        "_architecture.pkl": pickle.dumps(fixture.TinyNet()),
        "_architecture_ref.json": json.dumps({"architecture_hash": "57854ac3"}).encode(),
    }[suffix]
    name = f"checkpoints/models/{MODEL}/{MODEL}{suffix}"
    repository = Repository.init(str(tmp_path / "store"))
    files.create(name, whole[:-3])
    done, lines = importing(files.url, repository)
    assert done.left == 1 and any(suffix in line for line in lines)
    files.replace(name, whole, version(files, name))
    done, lines = importing(files.url, repository)
    assert counts(done) == (1, 0, 0, 0) and not lines


def test_a_table_in_json_stands_in_for_parquet(tmp_path: Path) -> None:
    """The public tool writes columns of values by row where it cannot write Parquet."""
    parquet = "checkpoints/data/448e10ce/448e10ce_data_snapshot.parquet"
    files = fixture.lay(str(tmp_path / "single"), frozenset({parquet}))
    table = pd.read_parquet(io.BytesIO(dict(fixture.members())[parquet]))
    rows = table.to_json(orient="columns").encode()
    files.create(parquet.replace(".parquet", ".data.json"), rows)
    hash = "e865e10e57854ac3448e10ce"
    with CheckpointManager(files.url, report=nothing) as manager:
        _check_documents(manager, hash, HASHES[hash])
        assert manager.set_run_notes(hash, "taken in")
    with CheckpointManager(files.url, report=nothing) as manager:
        _check_documents(manager, hash, HASHES[hash])


def test_a_root_of_ours_whose_repository_is_gone(root: str) -> None:
    """Its documents tell the rest; types that YAML lacks are no damage."""
    root = f"{root}-ours"
    training = Training()
    with CheckpointManager(root) as manager:
        training.watch(manager)
        first = manager.update_experiment_hash(dump_immediately=True).hash
        training.config["lr"] = 0.5
        second = manager.update_experiment_hash(dump_immediately=True).hash
        training.train(3, manager)
        manager.save_model_checkpoint(step=3)
    assert export(*kept(root), None, nothing) == 2
    files = open_files(root)
    for stat in list(files.list(".castore")):
        files.delete(stat.name)
    again = Training(seed=9)
    again.config["lr"] = 0.5
    with CheckpointManager(root, report=nothing) as manager:
        again.watch(manager)
        assert manager.current_exp_hash == second
        assert equal(again.weights(), training.weights())
        assert manager.update_experiment_hash() == (second, False, set())
        manager.save_model_checkpoint(step=4)
        assert manager.load_state(first, force=True)
        assert again.config["betas"] == [0.9, 0.99], "all that is left of a tuple"
        assert manager.update_experiment_hash() == (first, False, set())
        again.config["betas"] = (0.9, 0.99)
        assert manager.update_experiment_hash() == (first, False, set())
        again.config["layers"][0] = 9
        assert manager.update_experiment_hash().changed == {"hp"}
        again.config["layers"][0] = 8
        assert manager.update_experiment_hash().hash == first
        assert len(manager.signals("loss")) == 3
    assert list(audit(*kept(root))) == []


def kept(root: str) -> tuple[Records, Files]:
    place = Place(root, Options(), World(None, nothing, time.time, lambda: "00000000"))
    assert isinstance(place.archive, Records)
    return place.archive, place.files


def test_notes_and_names_are_taken_in(root: str) -> None:
    files = open_files(root)
    text = files.get("checkpoints/manifest.yaml").decode()
    text = text.replace("notes: ''", "notes: try again", 1).replace(": fixture", ": named", 1)
    files.replace("checkpoints/manifest.yaml", text.encode(), version(files))
    repository = Repository.init(f"{root}-store")
    importing(root, repository)
    first = next(iter(HASHES))
    with opened_elsewhere(root, repository) as manager:
        runs = {r["hash"]: (r["experiment_name"], r["notes"]) for r in manager.list_runs()}
    assert runs[first] == ("named", "try again")
    assert runs[LATEST] == ("fixture", "")


def version(files: Files, name: str = "checkpoints/manifest.yaml") -> str:
    return files.stat(name).version


@pytest.mark.parametrize("cut", [0, 200, -20])
def test_a_manifest_that_is_being_written(tmp_path: Path, cut: int) -> None:
    """It is read again for a while; one that stays torn is an error, never an empty root."""
    files = fixture.lay(str(tmp_path / "single"))
    whole = files.get("checkpoints/manifest.yaml")
    files.replace("checkpoints/manifest.yaml", whole[:cut], version(files))
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            files.replace("checkpoints/manifest.yaml", whole, version(files))

    assert len(FolderRecords(files, nothing, sleep=wait).hashes()) == 4
    files.replace("checkpoints/manifest.yaml", whole[:cut], version(files))
    with pytest.raises(FormatError, match=r"manifest\.yaml"):
        FolderRecords(files, nothing, sleep=waited.append)
