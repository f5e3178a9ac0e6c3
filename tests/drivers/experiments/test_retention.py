"""Which weights are forgotten, and what never is.

Sentences in quotation marks are the promises that a test shows.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from castore import Repository
from castore.check import check
from castore.cli.app import app
from castore.prune import prune
from castore_experiments import CheckpointManager
from castore_experiments.audit import audit
from castore_experiments.options import Best, Keep
from castore_experiments.records import Records
from castore_experiments.retention import Saved, to_forget
from tests.drivers.experiments.places import KINDS, place
from tests.drivers.experiments.small import filled, net, opened, read


@pytest.fixture(params=KINDS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return place(request.param, request, tmp_path)


def kept(manager: CheckpointManager, hash: str | None = None) -> list[int]:
    steps: list[int] = manager.get_checkpoint_info(hash)["steps"]
    return steps


def trained(root: str | Path, keep: Any, steps: list[int], **options: Any) -> CheckpointManager:
    """Weights at every step, filled with it; the metric ``val`` is best at step 30."""
    block = {"materialize": "all", **options, **({"keep": keep} if keep else {})}
    manager = opened(root, checkpoint_manager=block)
    manager.watch(model=net(), hyperparameters={"lr": 1.0})
    for step in steps:
        metrics = {"val": -abs(step - 30) / 100}
        manager.save_model_checkpoint(net(fill=float(step)), step=step, metrics=metrics)
    return manager


# -- the rule


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({}, [10, 20, 30, 40, 50, 60]),
        ({"last": 1}, [60]),
        ({"last": 3}, [40, 50, 60]),
        ({"every": 20}, [20, 40, 60]),
        ({"every": 25}, [50, 60]),
        ({"best": {"metric": "val"}}, [30, 60]),
        ({"best": {"metric": "val", "n": 2}}, [30, 40, 60]),
        ({"best": {"metric": "val", "mode": "min"}}, [60]),
        ({"best": {"metric": "none"}}, [60]),
        ({"last": 2, "every": 20, "best": {"metric": "val", "n": 1}}, [20, 30, 40, 50, 60]),
    ],
    ids=str,
)
def test_the_keep_option(tmp_path: Path, keep: Any, left: list[int]) -> None:
    """'keep: {last: 3, every: 1000, best: {metric: val, mode: max, n: 2}} forgets weight
    snapshots ... never the latest'; their real files go too."""
    manager = trained(tmp_path / "exp", keep, [10, 20, 30, 40, 50, 60])
    hash = manager.current_exp_hash
    manager.close()
    with opened(tmp_path / "exp") as again:
        assert kept(again) == left
        for step in left:
            assert filled(again.load_checkpoint(hash or "", target_step=step)) == step
        records = again._session.place.archive
        assert isinstance(records, Records)
        assert list(audit(records, again._session.place.files)) == []
    names = {p.name for p in (tmp_path / "exp").rglob("*.pt")}
    assert names == {f"{hash}_step_{s:06d}.pt" for s in left}


def test_nothing_but_weights_is_forgotten(root: str) -> None:
    """'(never hashes, configs, data or curves)'."""
    manager = opened(root, checkpoint_manager={"keep": {"last": 1}})
    config = {"lr": 0}
    manager.watch(model=net(), hyperparameters=config)
    for n in range(3):
        config["lr"] = n
        manager.update_experiment_hash()
        for step in (1, 2):
            manager.log("loss", float(n), step)
            manager.save_model_checkpoint(net(fill=float(n)), step=step)
    hashes = manager.list_experiment_hashes()
    assert len(hashes) == 3
    for n, hash in enumerate(hashes):
        assert kept(manager, hash) == [2]
        found = manager.load_checkpoint(hash, load_config=True, force=True)
        assert found["config"] == {"lr": n} and filled(found) == n
        assert list(manager.signals("loss", hash)["step"]) == [1, 2]
    assert len(yaml.safe_load(read(root, "checkpoints/manifest.yaml"))["experiments"]) == 3
    manager.close()


def test_the_latest_is_the_last_saved_not_the_highest(tmp_path: Path) -> None:
    with trained(tmp_path / "exp", {"last": 1}, [10, 1000, 5]) as manager:
        assert kept(manager) == [5]


def test_a_step_saved_again_counts_once(tmp_path: Path) -> None:
    with trained(tmp_path / "exp", {"last": 2}, [10, 20, 20, 20]) as manager:
        assert kept(manager) == [10, 20]
        manager.save_model_checkpoint(net(fill=7.0), step=10)
        assert kept(manager) == [10, 20]
        assert filled(manager.load_checkpoint(manager.current_exp_hash or "")) == 7.0


def test_branch_points_stay(root: str) -> None:
    """'never one that is a branch point'."""
    manager = trained(root, {"last": 1}, [10])
    first = manager.current_exp_hash or ""
    manager.watch(hyperparameters={"lr": 2.0})
    child = manager.update_experiment_hash(dump_immediately=True).hash
    assert manager.get_checkpoint_info(child)["parent_step"] == 10
    assert manager.load_state(first, force=True)
    for step in (20, 30, 40):
        manager.save_model_checkpoint(net(fill=float(step)), step=step)
    assert kept(manager, first) == [10, 40]
    assert filled(manager.load_checkpoint(first, target_step=10)) == 10
    manager.close()


def test_forgotten_weights_that_others_build_on_can_be_pruned(tmp_path: Path) -> None:
    """'never one that is ... another's base': the bytes stay as long as anything is coded against
    them, also after a prune without grace."""
    root = tmp_path / "exp"
    manager = opened(root, checkpoint_manager={"keep": {"last": 1}})
    model = torch.nn.Linear(200, 200)
    manager.watch(model=model)
    for step in range(1, 7):
        with torch.no_grad():
            model.weight += 1e-4 * torch.randn_like(model.weight)
        manager.save_model_checkpoint(step=step)
    manager.close()
    repository = Repository.open(root / ".castore")
    prune(repository, grace=0)
    assert list(check(repository, read_data=True)) == []
    with opened(root) as again:
        found = again.load_checkpoint(again.current_exp_hash or "")["weights"]
        assert found["step"] == 6 and torch.equal(found["model_state_dict"]["weight"], model.weight)


def test_retention_of_a_run_leaves_the_root_it_was_resumed_from(root: str) -> None:
    """GC8: 'Resume from root A into root B, keep_last=1 ... A must stay' - two roots of one
    repository, with the same experiment hash in both."""
    store = f"{root}-store"
    Repository.init(store)
    a = trained(f"{root}/a", None, [10, 20], repository=store, namespace="a")
    hash = a.current_exp_hash or ""
    b = opened(
        f"{root}/b",
        checkpoint_manager={"repository": store, "namespace": "b", "keep": {"last": 1}},
    )
    model = net()
    model.load_state_dict(a.load_checkpoint(hash)["weights"]["model_state_dict"])
    b.watch(model=model, hyperparameters={"lr": 1.0})
    for step in (30, 40):
        b.save_model_checkpoint(step=step)
    assert b.current_exp_hash == hash and kept(b, hash) == [40] and kept(a, hash) == [10, 20]
    assert filled(a.load_checkpoint(hash, target_step=10)) == 10
    for manager in (a, b):
        manager.close()


@pytest.mark.parametrize("materialize", ["latest", "all", "documents"])
def test_two_processes_that_keep_the_last_one(tmp_path: Path, materialize: str) -> None:
    """Each forgets what the other saved, and goes on."""
    options = {"keep": {"last": 1}, "materialize": materialize}
    managers = [opened(tmp_path / "exp", checkpoint_manager=options) for _ in range(2)]
    for manager in managers:
        manager.watch(model=net(), hyperparameters={"lr": 1.0})
    for step in range(1, 17):
        manager = managers[step // 2 % 2]
        manager.save_model_checkpoint(net(fill=float(step)), step=step)
        assert kept(manager) == [step]
    assert len(list((tmp_path / "exp").rglob("*.pt"))) == (materialize != "documents")
    for manager in managers:
        assert filled(manager.load_checkpoint(manager.current_exp_hash or "")) == 16
        manager.close()


def test_weights_that_somebody_forgot_are_no_base(tmp_path: Path) -> None:
    """``castore forget`` of the last weights, while a resumed training is about to save."""
    root = tmp_path / "exp"
    trained(root, None, [10, 20]).close()
    manager = opened(root)
    manager.watch(model=net())
    repository = Repository.open(root / ".castore")
    names = [n for n in repository.snapshots(manager._session.place.namespace) if ".step." in n.key]
    for name in names:
        repository.forget(name)
    manager.save_model_checkpoint(net(fill=30.0), step=30)
    assert kept(manager) == [30]
    manager.close()


def test_weights_of_another_program_are_never_let_go(tmp_path: Path) -> None:
    """GC8: 'Retention touches only objects created by this run/root'."""
    root = tmp_path / "exp"
    trained(root, None, [10, 20]).close()
    shutil.rmtree(root / ".castore")
    theirs = sorted(root.rglob("*.pt"))
    with opened(root, checkpoint_manager={"keep": {"last": 1}}) as manager:
        manager.watch(model=net(), hyperparameters={"lr": 1.0})
        for step in (30, 40):
            manager.save_model_checkpoint(step=step)
        assert kept(manager) == [10, 20, 40]
    assert len(theirs) == 2 and {*theirs} <= {*root.rglob("*.pt")}


# -- the command


def forget(root: Path, *arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["experiments", "forget", str(root), "--json", *arguments])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_the_forget_command(tmp_path: Path) -> None:
    """'castore experiments forget' - says what it would do, does it, and it can be undone."""
    root = tmp_path / "exp"
    manager = trained(root, None, [10, 20, 30, 40])
    hash = manager.current_exp_hash or ""
    manager.close()
    rules = ["--last", "1", "--best", "val:max:1"]
    would = forget(root, *rules, "--dry-run")
    assert sorted(r["step"] for r in would) == [10, 20] and all(r["size"] > 0 for r in would)
    with opened(root) as again:
        assert kept(again) == [10, 20, 30, 40]
    did = forget(root, *rules, "--hash", hash[:6])
    assert [r["snapshot"] for r in did] == [r["snapshot"] for r in would]
    with opened(root) as again:
        assert kept(again) == [30, 40]
    assert forget(root, *rules) == []
    assert {p.name for p in root.rglob("*.pt")} == {f"{hash}_step_{s:06d}.pt" for s in (30, 40)}
    repository = Repository.open(root / ".castore")
    for row in did:
        repository.unforget(row["snapshot"])
    with opened(root) as again:
        assert kept(again) == [10, 20, 30, 40]
        assert filled(again.load_checkpoint(hash, target_step=10)) == 10


@pytest.mark.parametrize(
    "arguments", [[], ["--best", "val:most"], ["--best", "val:max:x"]], ids=str
)
def test_a_rule_must_be_one(tmp_path: Path, arguments: list[str]) -> None:
    trained(tmp_path / "exp", None, [1]).close()
    command = ["experiments", "forget", str(tmp_path / "exp"), *arguments]
    assert CliRunner().invoke(app, command).exit_code != 0
    with opened(tmp_path / "exp") as again:
        assert kept(again) == [1]


# -- the rule as such

_SAVED = st.lists(
    st.tuples(st.integers(0, 50), st.floats(allow_nan=True) | st.none()), max_size=20
).map(
    lambda rows: [Saved(str(i), s, {} if v is None else {"m": v}) for i, (s, v) in enumerate(rows)]
)
_KEEP = st.builds(
    Keep,
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 9),
    st.none() | st.builds(Best, st.just("m"), st.sampled_from(["max", "min"]), st.integers(1, 3)),
)


@given(_SAVED, _KEEP, st.sets(st.integers(0, 50)))
def test_what_never_goes(saved: list[Saved], keep: Keep, pinned: set[int]) -> None:
    """The newest and what is pinned stay; at least as many stay as each rule names; what stays
    once stays when the rule is applied again."""
    gone = to_forget(saved, keep, pinned)
    left = [s for s in saved if s not in gone]
    assert {s.step for s in gone}.isdisjoint({s.step for s in left})
    if saved:
        assert saved[0] in left
    assert {s.step for s in gone}.isdisjoint(pinned)
    steps = {s.step for s in saved}
    if keep.last is not None:
        assert len({s.step for s in left}) >= min(keep.last, len(steps))
    if keep.every is not None:
        assert {s for s in steps if s % keep.every == 0} <= {s.step for s in left}
    assert to_forget(left, keep, pinned) == []
