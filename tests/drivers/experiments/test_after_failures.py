"""What one failure leaves behind: nothing that a later call would not make good.

Each was found by a manager that saved for long while its storage failed at random.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from castore import BackendError, Repository, SnapshotName
from castore.check import check
from castore_experiments import CheckpointManager
from castore_experiments.audit import audit
from castore_experiments.local_files import LocalFiles
from castore_experiments.records import Records
from tests.drivers.experiments.small import filled, net, opened, started


class Failing:
    """Wraps functions; the call whose number is ``at``, counted over all of them, fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, names: list[str]):
        self.at, self.seen = 0, 0
        for name in names:
            monkeypatch.setattr(owner, name, self.wrapped(getattr(owner, name)))

    def wrapped(self, whole: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            self.seen += 1
            if self.seen == self.at:
                raise BackendError("injected")
            return whole(*args, **more)

        return call

    def arm(self, at: int) -> None:
        self.at, self.seen = at, 0


def defects(manager: CheckpointManager) -> list[Any]:
    place = manager._session.place
    assert isinstance(place.archive, Records)
    return [
        *audit(place.archive, place.files),
        *check(place.archive.repository, read_data=True),
    ]


@pytest.mark.parametrize("materialize", ["all", "latest"])
def test_the_root_comes_after_a_save_that_failed_at_any_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, materialize: str
) -> None:
    """Every write to the root of a save under a new hash fails once. What was committed by then and
    not shown is shown by the next save: documents, weight files, the whole manifest entry."""
    failing = Failing(monkeypatch, LocalFiles, ["stage", "delete"])
    options = {"materialize": materialize, "keep": {"last": 2}}
    raised = 0
    with started(tmp_path / "exp", **options) as manager:
        config = {"lr": 1.0}
        manager.watch(hyperparameters=config)
        for at in range(1, 12):
            config["lr"] = 1.0 + at
            hash = manager.update_experiment_hash().hash
            failing.arm(at)
            try:
                manager.save_model_checkpoint(net(fill=1.0), step=1)
            except BackendError:
                raised += 1
            failing.arm(0)
            for step in (2, 3, 4):
                manager.save_model_checkpoint(net(fill=float(step)), step=step)
            assert defects(manager) == [], f"after failure {at}"
            entry = yaml.safe_load((tmp_path / "exp/checkpoints/manifest.yaml").read_text())[
                "experiments"
            ][hash]
            assert entry["hp_hash"] == hash[:8] and entry["latest_weight_step"] == 4
            assert (tmp_path / f"exp/checkpoints/HP/{hash[:8]}/{hash[:8]}_config.yaml").exists()
            steps = {p.name[-9:-3] for p in (tmp_path / "exp").rglob(f"{hash}_step_*.pt")}
            assert steps == ({"000003", "000004"} if materialize == "all" else {"000004"})
    assert raised >= 4


def test_weights_of_a_failed_save_are_real_after_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``materialize: all``: they were committed, and only their file was missing."""
    failing = Failing(monkeypatch, LocalFiles, ["replace"])
    with started(tmp_path / "exp", materialize="all") as manager:
        hash = manager.current_exp_hash or ""
        failing.arm(1)
        with pytest.raises(BackendError, match="injected"):
            manager.save_model_checkpoint(net(fill=2.0), step=2)
        failing.arm(0)
        assert not list((tmp_path / "exp").rglob("*_000002.pt"))
        manager.save_model_checkpoint(net(fill=3.0), step=3)
        assert list((tmp_path / "exp").rglob("*_000002.pt"))
        assert filled(manager.load_checkpoint(hash, target_step=2)) == 2.0
        assert defects(manager) == []


def test_a_list_that_fails_takes_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at what others wrote fails in its midst: what was known before stays known, so that
    the saves after it do not fail for lack of their own hash."""
    with started(tmp_path / "exp") as manager:
        hash = manager.current_exp_hash or ""
        whole = Repository.snapshots

        def cut(self: Repository, *args: Any, **more: Any) -> Iterator[SnapshotName]:
            yield from list(whole(self, *args, **more))[:1]
            raise BackendError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(Repository, "snapshots", cut)
            with pytest.raises(BackendError, match="injected"):
                manager.get_all_hashes()
        records = manager._session.place.archive
        assert records is not None and records.hashes() == [hash]
        assert len(records.weights(hash)) == 1
        manager.save_model_checkpoint(net(fill=2.0), step=2)
        assert defects(manager) == []


def test_a_root_whose_first_opening_failed_is_resumed_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root that comes with `watch` is opened there; where that fails the manager must not go on
    as if there were nothing to resume."""
    root = tmp_path / "exp"
    with started(root) as manager:
        hash = manager.current_exp_hash
    model, said = net(fill=9.0), list[str]()
    manager = CheckpointManager(report=said.append)
    with monkeypatch.context() as patch:
        broken = Failing(patch, Records, ["weight_file"])
        broken.arm(1)
        with pytest.raises(BackendError, match="injected"):
            manager.watch(model=model, root_log_dir=root)
    manager.watch(model=model, root_log_dir=root)
    assert manager.current_exp_hash == hash and model.weight[0, 0] == 1.0
    manager.close()


def test_another_process_root_seen_only_in_part_is_seen_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two managers on a fresh root: the second meets the first's record while the store fails."""
    root = tmp_path / "exp"
    early = opened(root)
    with started(root) as manager:
        hash = manager.current_exp_hash
    with monkeypatch.context() as patch:
        broken = Failing(patch, Records, ["refresh"])
        broken.arm(1)
        with pytest.raises(BackendError, match="injected"):
            early.get_all_hashes()
    assert early.get_all_hashes() == [hash]
    early.watch(model=net(), hyperparameters={"lr": 2.0})
    early.save_model_checkpoint(step=1)
    assert len(early.get_all_hashes()) == 2
    early.close()


def test_a_dropped_manager_keeps_no_threads(tmp_path: Path) -> None:
    """Without `close`, as in a notebook that makes one after the other: its curves are saved and
    its threads end."""
    before = set(threading.enumerate())
    for n in range(3):
        manager = opened(tmp_path / "exp")
        manager.watch(model=net(), hyperparameters={"lr": 1.0})
        manager.save_model_checkpoint(step=n)
        manager.log("loss", float(n), n)
        del manager
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=60)
        assert not thread.is_alive(), thread.name
    with opened(tmp_path / "exp") as manager:
        curves = manager._session.curves()
        curves.refresh()
        rows = [
            r for s in curves.sources for t in s.rows("signals", "loss", None) for r in t["step"]
        ]
        assert sorted(r.as_py() for r in rows) == [0, 1, 2]
    assert not [p for p in (tmp_path / "exp/.castore/wal").iterdir() if p.is_dir()]
