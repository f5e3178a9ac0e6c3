"""``castore experiments``: what each command prints, as text and as JSON, and its exit code."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import duckdb
import pytest
import torch
from typer.testing import CliRunner, Result

from castore import Repository
from castore.cli import app
from castore_experiments import CheckpointManager
from castore_experiments.files import open_files
from castore_experiments.weights import decode
from tests.drivers.experiments import fixture
from tests.drivers.experiments.fixture import HASHES, LATEST
from tests.drivers.experiments.places import KINDS, place
from tests.drivers.experiments.small import net, opened
from tests.drivers.experiments.training import Training


def castore(*words: str) -> Result:
    clean: dict[str, str | None] = {"CASTORE_REPOSITORY": None, "CASTORE_TRACEBACK": None}
    return CliRunner(env=clean).invoke(app, ["experiments", *words], prog_name="castore")


def told(*words: str, code: int = 0) -> list[dict[str, Any]]:
    """The documents that a command prints with ``--json``."""
    result = castore(*words, "--json")
    assert result.exit_code == code, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def said(*words: str, code: int = 0) -> str:
    """The results that a command prints for people."""
    result = castore(*words)
    assert result.exit_code == code, result.output
    return result.stdout


class Written:
    """A root with a configuration edit, a data edit and another model."""

    def __init__(self, root: str, namespace: str | None = None):
        self.root, training = root, Training()
        options = {"namespace": namespace} if namespace else {}
        with CheckpointManager(root, checkpoint_manager=options) as manager:
            training.watch(manager)
            self.first = manager.update_experiment_hash(dump_immediately=True).hash
            training.train(4, manager, save=1)
            training.config["lr"] = 0.5
            del training.config["layers"]
            self.hp = manager.update_experiment_hash(dump_immediately=True).hash
            training.train(6, manager)
            training.data.loc[[2, 3], "discarded"] = True
            training.data.loc[5, "tag:hard"] = True
            self.data = manager.update_experiment_hash(dump_immediately=True).hash
            wide = Training(width=16)
            wide.config, wide.data = training.config, training.data
            wide.watch(manager)
            self.model = manager.update_experiment_hash(dump_immediately=True).hash
            manager.save_model_checkpoint(step=9, metrics={"val": 0.75})
            manager.log("loss", float("nan"), 9)
            manager.set_run_notes(self.model, "wider")
        self.losses = training.losses
        self.hashes = [self.first, self.hp, self.data, self.model]


@pytest.fixture(params=KINDS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Written:
    return Written(place(request.param, request, tmp_path, "exp"), "team.exp")


@pytest.fixture
def here(tmp_path: Path) -> Written:
    return Written(str(tmp_path / "exp"))


# -- list, runs


def test_list_shows_all_namespaces(written: Written) -> None:
    store = f"{written.root}/.castore"
    found = told("list", "-r", store)
    assert [(d["type"], d["namespace"]) for d in found] == [("experiment", "team.exp")] * 4
    by_hash = {d["hash"]: d for d in found}
    assert [d["hash"] for d in found] == written.hashes[::-1]
    assert by_hash[written.first]["steps"] == [0, 1, 2, 3, 4]
    assert by_hash[written.model]["steps"] == [6, 9]
    assert all(d["size"] > 1000 and d["last_used"] > 0 and d["name"] == "first" for d in found)
    text = said("list", "-r", store)
    assert text.splitlines()[0].split() == [
        *("NAMESPACE", "HASH", "WEIGHTS", "STEPS", "SIZE", "LAST", "USED", "(UTC)")
    ]
    assert all(f"team.exp   {h}" in text for h in written.hashes)


def test_list_of_a_store_of_two_roots(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    Repository.init(store)
    for name in ("a", "b"):
        options = {"repository": store, "namespace": name}
        with CheckpointManager(tmp_path / name, checkpoint_manager=options) as manager:
            Training().watch(manager)
            manager.update_experiment_hash(dump_immediately=True)
    found = told("list", "-r", store)
    assert [d["namespace"] for d in found] == ["a", "b"]
    assert found[0]["hash"] == found[1]["hash"]


def test_runs(written: Written) -> None:
    found = told("runs", written.root)
    assert [d["hash"] for d in found] == written.hashes[::-1]
    assert [d["parent"] for d in found] == [*written.hashes[2::-1], None]
    assert [d["is_current"] for d in found] == [True, False, False, False]
    assert found[0]["notes"] == "wider"
    lines = said("runs", written.root).splitlines()
    assert lines[0].split() == ["HASH", "NAME", "STEP", "PARENT", "CREATED", "NOTES"]
    assert lines[1].split()[:4] == ["*", written.model, "first", "9"]
    assert lines[1].endswith("wider")


# -- why


def test_why_in_words(written: Written) -> None:
    root, (first, hp, data, model) = written.root, written.hashes
    assert said("why", root, first, hp).splitlines() == [
        "hp: layers: removed (was [8, 2])",
        "hp: lr: 0.01 -> 0.5",
    ]
    assert said("why", root, hp, data).splitlines() == [
        "data: 2 samples discarded: s2, s3",
        "data: tag 'hard': 1 sample got it: s5",
    ]
    lines = said("why", root, data, model).splitlines()
    assert all(line.startswith("model: ") for line in lines)
    assert "model: module first (Linear): out_features: 8 -> 16" in lines
    assert "model: first.weight: shape [8, 4] -> [16, 4]" in lines
    assert "model: initialised at step 0 -> 6" in lines
    assert said("why", root, first, first) == ""
    found = told("why", root, first, data)
    assert {d["component"] for d in found} == {"hp", "data"}
    assert {d["type"] for d in found} == {"difference"}


def test_hashes_may_be_cut(here: Written) -> None:
    cut = 1
    while sum(h.startswith(here.first[:cut]) for h in here.hashes) > 1:
        cut += 1
    assert "lr: 0.01 -> 0.5" in said("why", here.root, here.first[:cut], here.hp)


@pytest.mark.parametrize("text", ["zz", "", "0" * 24])
def test_a_prefix_that_is_unknown_or_of_several(here: Written, text: str) -> None:
    result = castore("why", here.root, text, here.first)
    assert result.exit_code == 1
    assert f"{text!r} begins" in result.stderr and here.model in result.stderr
    (error,) = told("why", here.root, text, here.first, code=1)
    assert (error["type"], error["error"]) == ("error", "NotFoundError")


def test_text_that_would_steer_a_terminal(tmp_path: Path) -> None:
    root, training = str(tmp_path / "exp"), Training()
    with CheckpointManager(root) as manager:
        training.watch(manager)
        first = manager.update_experiment_hash(dump_immediately=True).hash
        training.config["\x1b[31mred"] = "\x1b[2J"
        second = manager.update_experiment_hash(dump_immediately=True).hash
        manager.log("\x1b[5m", 1.0, 1)
    for text in (said("why", root, first, second), said("curves", root)):
        assert text and "\x1b" not in text


# -- materialize, forget, verify


def weight_files(root: str) -> list[str]:
    names = (s.name for s in open_files(root).list("checkpoints/models"))
    return sorted(n.rpartition("/")[2] for n in names if n.endswith(".pt"))


def test_materialize_in_place_and_elsewhere(written: Written, tmp_path: Path) -> None:
    steps = [(written.first, s) for s in range(5)] + [(written.hp, 4), (written.data, 6)]
    steps += [(written.model, 6), (written.model, 9)]
    every = sorted(f"{h}_step_{s:06d}.pt" for h, s in steps)
    before = weight_files(written.root)
    assert set(before) < set(every)
    to = str(tmp_path / "exported")
    (done,) = told("materialize", written.root, "--to", to)
    assert done == {"type": "materialized", "root": to, "hashes": 4}
    assert weight_files(to) == every and weight_files(written.root) == before
    assert said("materialize", written.root, "--to", to) == ""
    said("materialize", written.root)
    assert weight_files(written.root) == every
    assert not told("verify", written.root)
    with CheckpointManager(to) as manager:
        assert manager.current_exp_hash == written.model
        assert len(manager.signals("loss", written.first)) == 4


def test_materialize_into_another_experiment_is_refused(here: Written, tmp_path: Path) -> None:
    fixture.lay(str(tmp_path / "other"))
    result = castore("materialize", here.root, "--to", str(tmp_path / "other"))
    assert result.exit_code == 1 and "another experiment" in result.stderr


def test_forget(written: Written) -> None:
    rule = ["--last", "1", "--every", "3"]
    found = told("forget", written.root, *rule, "--dry-run")
    gone = [(d["hash"], d["step"]) for d in found]
    assert sorted(gone) == [(written.first, 1), (written.first, 2)]  # 4 is a branch point
    assert told("forget", written.root, *rule, "--dry-run") == found
    text = said("forget", written.root, *rule)
    assert f"{written.first} step 2" in text and len(text.splitlines()) == 2
    assert said("forget", written.root, *rule) == ""
    store = f"{written.root}/.castore"
    steps = {d["hash"]: d["steps"] for d in told("list", "-r", store)}
    assert steps[written.first] == [0, 3, 4] and steps[written.model] == [6, 9]


def test_forget_of_one_hash_and_by_metric(here: Written) -> None:
    found = told("forget", here.root, "--hash", here.model, "--best", "val:max:1", "--dry-run")
    assert [(d["hash"], d["step"]) for d in found] == [(here.model, 6)]
    assert castore("forget", here.root).exit_code == 2
    result = castore("forget", here.root, "--best", "val:best")
    assert result.exit_code == 1 and "expected one of max, min" in result.stderr


def test_verify_finds_what_was_changed(here: Written) -> None:
    assert said("verify", here.root) == ""
    label = here.first[:8]
    path = Path(here.root, "checkpoints", "HP", label, f"{label}_config.yaml")
    path.write_text(path.read_text().replace("0.01", "0.02"))
    (problem,) = told("verify", here.root, code=3)
    assert (problem["type"], problem["kind"]) == ("problem", "layout")
    assert problem["object"] == f"HP/{label}/{label}_config.yaml"
    assert f"HP/{label}/{label}_config.yaml: was edited" in said("verify", here.root, code=3)
    Path(here.root, "checkpoints", "manifest.yaml").unlink()
    assert "is missing" in said("verify", here.root, code=3)


# -- curves


def test_curves(written: Written, tmp_path: Path) -> None:
    assert [d["name"] for d in told("curves", written.root)] == ["loss"]
    assert said("curves", written.root) == "loss\n"
    found = told("curves", written.root, "loss")
    points = [(d["step"], d["metric_value"]) for d in found]
    assert points == [*zip(range(1, 7), written.losses, strict=True), (9, "nan")]
    one = told("curves", written.root, "loss", "--hash", written.hp)
    assert [(d["step"], d["experiment_hash"]) for d in one] == [(5, written.hp), (6, written.hp)]
    lines = said("curves", written.root, "loss").splitlines()
    assert lines[0].split() == ["STEP", "VALUE", "HASH", "RUN"] and len(lines) == 8
    out = tmp_path / "all.duckdb"
    (done,) = told("curves", written.root, "--merged", "--out", str(out))
    assert done == {"type": "exported", "file": str(out), "rows": 7}
    with duckdb.connect(str(out), read_only=True) as connection:
        assert connection.execute("SELECT count(*) FROM signals").fetchall() == [(7,)]
    assert told("curves", written.root, "none") == []


def test_two_remote_roots_with_one_namespace_do_not_mix(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The working copies of two roots on S3 with namespaces of one name lie on one machine."""
    urls = [place("s3", request, tmp_path, name) for name in ("a", "b")]
    for url in urls:
        Written(url, "exp")
    for url in urls:
        assert not told("verify", url)


def test_curves_merged_over_roots(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Written(str(tmp_path / "sweep" / name))
    out = tmp_path / "all.duckdb"
    (done,) = told("curves", str(tmp_path / "sweep"), "--merged", "--out", str(out))
    assert done["rows"] == 14
    (again,) = told("curves", str(tmp_path / "sweep"), "--merged", "--out", str(out))
    assert again["rows"] == 14


# -- import


def test_import_of_the_public_tools_root(tmp_path: Path) -> None:
    root, store = str(tmp_path / "old"), str(tmp_path / "store")
    files = fixture.lay(root)
    Repository.init(store)
    (done,) = told("import", root, "-r", store, "-n", "old")
    assert done == {
        "type": "imported",
        "namespace": "old",
        "states": 4,
        "weights": 14,
        "rows": 152,
        "left": 0,
    }
    result = castore("import", root, "-r", store, "-n", "old")
    assert result.exit_code == 0 and "0 hashes, 0 weight files, 0 rows" in result.stderr
    assert next(d["hash"] for d in told("list", "-r", store)) == LATEST
    assert len(told("list", "-r", store)) == len(HASHES)
    name = f"checkpoints/{HASHES[LATEST]['steps']['12']['file']}"
    files.replace(name, files.get(name)[:999], files.stat(name).version)
    (done,) = told("import", root, "-r", store, code=3)
    assert (done["weights"], done["left"]) == (13, 1) and done["namespace"].startswith("old-")
    assert "left out" in castore("import", root, "-r", store).stderr
    # A root that is only read has no repository of its own for these.
    for words in (["verify", root], ["materialize", root], ["forget", root, "--last", "1"]):
        result = castore(*words)
        assert result.exit_code == 1 and "castore experiments import" in result.stderr
    assert len(told("runs", root)) == 4
    assert said("why", root, "bcca", "e865e10e57854ac35637b652")


def test_what_the_public_tool_wrote_since_is_taken_in(tmp_path: Path) -> None:
    """It goes on in a root where we went on."""
    files, program = fixture.lay(str(tmp_path / "old")), fixture.Program()
    with CheckpointManager(files.url) as manager:
        manager.watch(**program.watched())
        manager.save_model_checkpoint(step=14)
    name = f"checkpoints/{HASHES[LATEST]['steps']['12']['file']}"
    body = decode(files.get(name), name)
    out = io.BytesIO()
    rng_state, state = dict(body.rng_state or {}), dict(body.model_state or {})
    more = {"exp_hash": LATEST, "timestamp": "2027-01-01T00:00:00", "rng_state": rng_state}
    torch.save({"step": 16, "model_state_dict": state, **more}, out)
    files.create(name.replace("000012", "000016"), out.getvalue())
    hash = f"{LATEST[:16]}448e10ce"  # a hash that it found since, of data that stand already
    entry = f'"{hash}": {{created: "2027-01-01T00:00:00", notes: "there"}}\n  "{LATEST}"'
    manifest = files.get("checkpoints/manifest.yaml").replace(
        f'"{LATEST}"'.encode(), entry.encode(), 1
    )
    files.replace(
        "checkpoints/manifest.yaml", manifest, files.stat("checkpoints/manifest.yaml").version
    )
    lines: list[str] = []
    with CheckpointManager(files.url, report=lines.append) as manager:
        assert hash not in manager.get_all_hashes()
    assert any(f"another program wrote {hash}" in line for line in lines)
    (done,) = told("import", files.url, "-r", f"{files.url}/.castore")
    assert (done["states"], done["weights"], done["rows"], done["left"]) == (1, 1, 0, 0)
    lines.clear()
    with CheckpointManager(files.url, report=lines.append) as manager:
        assert manager.get_checkpoint_info(LATEST)["steps"] == [6, 8, 10, 12, 14, 16]
        assert manager.load_checkpoint(LATEST)["weights"]["step"] == 16
        assert {r["hash"]: r["notes"] for r in manager.list_runs()}[hash] == "there"
    assert not any("another program" in line for line in lines)


def test_two_roots_of_one_name_do_not_share_a_namespace(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    Repository.init(store)
    names = set()
    for team in ("a", "b", "a"):
        root = str(tmp_path / team / "exp")
        if not Path(root).exists():
            fixture.lay(root)
        (done,) = told("import", root, "-r", store)
        names.add(done["namespace"])
    assert len(names) == 2


@pytest.mark.parametrize("name", ["lr[1e-3]", "a?b 50%", "x#y", "ünï*"])
def test_odd_names_are_literal(tmp_path: Path, name: str) -> None:
    """S37: 'Literal treatment everywhere'."""
    root, store = str(tmp_path / name), str(tmp_path / "store")
    fixture.lay(root)
    Repository.init(store)
    (done,) = told("import", root, "-r", store)
    assert (done["states"], done["weights"], done["left"]) == (4, 14, 0)
    with CheckpointManager(root) as manager:
        assert manager.set_run_notes(LATEST, "seen")
    assert len(told("runs", root)) == 4 and not told("verify", root)
    told("materialize", root, "--to", f"{root} to")
    assert len(weight_files(f"{root} to")) == 14


# -- roots that are none


@pytest.mark.parametrize(
    "words",
    [
        ["runs"],
        ["why", "ROOT", "a", "b"],
        ["materialize"],
        ["forget", "ROOT", "--last", "1"],
        ["curves"],
        ["verify"],
        ["import", "ROOT", "-r", "STORE"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_root_that_is_none(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, words: list[str]
) -> None:
    root = place(kind, request, tmp_path, "nothing")
    store = str(tmp_path / "store")
    Repository.init(store)
    line = words if "ROOT" in words else [*words, "ROOT"]
    line = [{"ROOT": root, "STORE": store}.get(w, w) for w in line]
    result = castore(*line)
    assert result.exit_code == 1, result.output
    assert "there is no experiment" in result.stderr and root in result.stderr
    (error,) = told(*line, code=1)
    assert error["type"] == "error" and error["exit_code"] == 1
    assert not list(open_files(root).list(""))


def test_usage_errors(tmp_path: Path) -> None:
    assert castore("runs").exit_code == 2
    assert castore("nothing").exit_code == 2
    assert castore("list", "-r", str(tmp_path / "none")).exit_code == 10
    assert castore("curves", "root", "--hash", "0").exit_code == 2
    assert castore("curves", "root", "loss", "--out", "all.duckdb").exit_code == 2
    assert castore("curves", "root", "--hash", "0", "--out", "all.duckdb").exit_code == 2


def test_points_from_before_there_is_a_hash(tmp_path: Path) -> None:
    root = str(tmp_path / "r")
    with opened(root) as manager:
        manager.watch(model=net())
        manager.log("loss", 0.5, 1)
    (point,) = told("curves", root, "loss")
    assert (point["step"], point["metric_value"], point["experiment_hash"]) == (1, 0.5, None)
    line = said("curves", root, "loss").splitlines()[1].split()
    assert line == ["1", "0.5", point["run"]]


def test_why_over_a_repository_and_in_the_current_folder(
    here: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, first, hp = here.root, here.first, here.hp
    expected = said("why", root, first, hp)
    assert said("why", "-r", f"{root}/.castore", first[:6], hp) == expected
    monkeypatch.chdir(root)
    assert said("why", first, hp) == expected
    assert castore("why", root, first, hp, "-r", f"{root}/.castore").exit_code == 2
    assert castore("why", first).exit_code == 2
