"""Which model a save is of: the one that its hash stands for, as it was when that was computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from castore import InvalidInputError
from castore_experiments.audit import audit
from castore_experiments.place import Place
from tests.drivers.experiments.small import Said, net, opened, started
from tests.drivers.experiments.training import Net, equal


def problems(manager: Any) -> list[tuple[str, str]]:
    place: Place = manager._session.place
    return [*audit(manager._session.records(), place.files)]


@pytest.mark.parametrize("given", [True, False])
def test_weights_of_another_model_are_refused_at_the_save(tmp_path: Path, given: bool) -> None:
    """'Saved right or refused by name at save, never at load': no shape that the hash has not."""
    with started(tmp_path / "r") as manager:
        hash, other = manager.get_current_experiment_hash(), net(7)
        if not given:
            manager.watch(model=other)
        with pytest.raises(InvalidInputError, match=r"weight: \(4, 2\) there, \(7, 2\) now") as e:
            manager.save_model_checkpoint(other if given else None, step=2)
        assert hash in str(e.value) and "update_experiment_hash" in str(e.value)
        assert manager.get_checkpoint_info(hash)["steps"] == [1]
        manager.watch(model=other)
        assert manager.update_experiment_hash().changed == {"model"}
        assert manager.save_model_checkpoint(step=2)
        assert problems(manager) == []


def test_a_model_edited_in_place_after_its_hash_is_refused(tmp_path: Path) -> None:
    model = Net()
    with opened(tmp_path / "r") as manager:
        manager.watch(model=model, hyperparameters={"lr": 1.0})
        first = manager.update_experiment_hash().hash
        model.extra = torch.nn.Linear(2, 2)
        with pytest.raises(InvalidInputError, match=r"extra.weight: none there, \(2, 2\) now"):
            manager.save_pending_changes()
        assert manager.update_experiment_hash().hash != first
        assert manager.save_pending_changes() and problems(manager) == []


def test_a_resumed_hash_refuses_another_model(tmp_path: Path) -> None:
    started(tmp_path / "r").close()
    said = Said()
    with opened(tmp_path / "r", said) as manager:
        manager.watch(model=net(7))
        assert said.has("counts as an edit")
        with pytest.raises(InvalidInputError, match=r"stands for"):
            manager.save_model_checkpoint(step=2)
        manager.watch(model=net())
        assert manager.save_model_checkpoint(step=2)


def test_a_setting_that_training_moves_keeps_no_save_from_being_made(tmp_path: Path) -> None:
    """What is written of the architecture is what the hash was computed of."""
    model = Net()
    with opened(tmp_path / "r") as manager:
        manager.watch(model=model)
        hash = manager.update_experiment_hash().hash
        for step, p in enumerate((0.4, 0.5)):
            model.drop.p = p
            manager.save_model_checkpoint(step=step)
        assert manager.current_exp_hash == hash and problems(manager) == []
    with opened(tmp_path / "r") as manager:
        again = Net()
        manager.watch(model=again)
        assert equal(again.state_dict(), model.state_dict())
        again.drop.p = 0.6
        assert manager.save_model_checkpoint(step=2)


def test_a_wrapper_and_what_is_no_module_may_be_saved(tmp_path: Path) -> None:
    class Average:
        def __init__(self) -> None:
            self.inner = net(fill=3.0)

        def state_dict(self) -> dict[str, Any]:
            return self.inner.state_dict()

    with started(tmp_path / "r") as manager:
        manager.save_model_checkpoint(torch.nn.DataParallel(net(fill=2.0)), step=2)
        manager.save_model_checkpoint(Average(), step=3)
        fresh = net()
        for step in (2, 3):
            hash = manager.get_current_experiment_hash()
            found = manager.load_checkpoint(hash, target_step=step)
            assert found["weights"]["step"] == step
            manager.watch(model=fresh)
            assert manager.load_state(hash, target_step=step)
            assert fresh.weight[0, 0].item() == step


@pytest.mark.parametrize("written", [True, False])
def test_an_edit_of_the_model_taken_back_is_not_pending(tmp_path: Path, written: bool) -> None:
    """The step of initialisation comes back with the model, also when training went on."""
    a = net()
    with opened(tmp_path / "r") as manager:
        manager.watch(model=a, hyperparameters={"lr": 1.0})
        first = manager.update_experiment_hash(dump_immediately=written).hash
        manager.save_model_checkpoint(step=100)
        manager.watch(model=net(7))
        edited = manager.update_experiment_hash()
        assert edited.changed == {"model"} and edited.is_new
        manager.watch(model=a)
        assert manager.update_experiment_hash() == (first, False, {"model"})
        assert manager.has_pending_changes() == (False, set())
        manager.watch(model=net(7))
        assert manager.update_experiment_hash().hash == edited.hash


@pytest.mark.parametrize("call", ["save_pending_changes", "save_model_checkpoint"])
def test_a_save_without_weights_after_a_branch_makes_it_the_latest(
    tmp_path: Path, call: str
) -> None:
    """'latest_hash is the hash current at the last write, so reopening after a branch resumes the
    branch', also where the branch's content was written long ago and no weights are dumped."""
    options = {"dump_model_state": False}
    config = {"lr": 1.0}
    with opened(tmp_path / "r", checkpoint_manager=options) as manager:
        manager.watch(model=net(), hyperparameters=config)
        first = manager.update_experiment_hash(dump_immediately=True).hash
        config["lr"] = 2.0
        second = manager.update_experiment_hash(dump_immediately=True).hash
        assert manager.load_state(first, force=True)
        assert manager.get_latest_hash() == second
        if call == "save_pending_changes":
            assert manager.save_pending_changes(force=True)
        else:
            manager.save_model_checkpoint(step=3)
        assert manager.get_latest_hash() == first
    with opened(tmp_path / "r") as again:
        assert again.current_exp_hash == first and again.hyperparameters == {"lr": 1.0}
