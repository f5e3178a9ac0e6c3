"""Training goes on from a receipt as if it had never stopped."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from castore import (
    AlreadyExistsError,
    InvalidInputError,
    NotFoundError,
    ReceiptMismatchError,
    RepositoryNotFoundError,
)
from castore_receipts import ReceiptCallback, verify_all
from castore_receipts.arrays import read_safetensors, write_safetensors
from castore_receipts.gates import Gate
from castore_receipts.training import TrainingState, capture
from tests.drivers.receipts import runs
from tests.helpers import flip_object

SETTINGS: dict[str, dict[str, Any]] = {
    "gsde": {},
    "gsde at rollouts": {"sde_sample_freq": -1, "train_freq": 4},
    "warm-up": {"learning_starts": 35, "use_sde_at_warmup": False},
    "no gsde": {"use_sde": False},
    "noise": {
        "use_sde": False,
        "action_noise": OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1)),
    },
    "schedule": {"learning_rate": lambda left: 1e-3 * left},
    "small buffer": {"buffer_size": 25},
    "little memory": {
        "optimize_memory_usage": True,
        "replay_buffer_kwargs": {"handle_timeout_termination": False},
        "buffer_size": 25,
    },
    "four environments": {"env": 4},
    "normalized": {"env": "normalized"},
}


def made(seed: int, settings: dict[str, Any]) -> Any:
    env = settings.get("env")
    if env == "normalized":
        env = runs.normalized()
    elif env is not None:
        env = DummyVecEnv([runs.pendulum] * env)
    return runs.model(seed, **{**settings, "env": env})


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_resumed_run_is_bit_identical(tmp_path: Path, settings: dict[str, Any]) -> None:
    whole = made(1, settings)
    first = runs.callback(tmp_path / "run", replay_buffer=True)
    whole.learn(80, callback=first)
    resumed = made(99, settings)
    again = runs.resumed(
        resumed, tmp_path / "run", 40, into=tmp_path / "two", environment=runs.pendulum
    )
    resumed.learn(40, callback=again, reset_num_timesteps=False)
    assert runs.equal(whole, resumed)
    assert whole.num_timesteps == resumed.num_timesteps == 80
    for ours, theirs in zip(first.history[2:], again.history, strict=True):
        for key in ("step", "checkpoint_sha256", "policy_digest", "validation_sha256", "returns"):
            assert ours[key] == theirs[key]
        assert ours["budget"] == theirs["budget"]
        assert ours["seeds"] == theirs["seeds"]
    assert again.history[0]["parent"]["receipt_sha256"] == first.history[1]["receipt_sha256"]
    assert [r["parent"]["relation"] for r in again.history] == ["resumed", "previous"]
    assert all(r.sound for r in verify_all([tmp_path / "run", tmp_path / "two"]))


def test_resuming_at_the_end_of_training_goes_on_as_well(tmp_path: Path) -> None:
    """As one whole run does: the end of `learn` is no step of its own."""
    whole = runs.model()
    whole.learn(80)
    part = runs.model()
    part.learn(40, callback=runs.callback(tmp_path / "run", every=1000, replay_buffer=True))
    resumed = runs.model(5)
    again = ReceiptCallback.resume(resumed, tmp_path / "run", 40, log=io.StringIO())
    resumed.learn(40, callback=again, reset_num_timesteps=False)
    assert runs.equal(whole, resumed)


def test_a_run_that_another_callback_stopped_goes_on_with_new_episodes(tmp_path: Path) -> None:
    """The stop comes within a step: its transition is lost, and none may be made up from halves."""

    class Stop(BaseCallback):
        def _on_step(self) -> bool:
            return self.num_timesteps < 33

    first = runs.callback(tmp_path / "run", replay_buffer=True)
    runs.model().learn(100, callback=CallbackList([first, Stop()]))
    assert "state of the training environments" in first.history[-1]["not_contained"]
    model = runs.model(5)
    again = runs.resumed(model, tmp_path / "run", 33)
    model.learn(20, callback=again, reset_num_timesteps=False)
    buffer: Any = model.replay_buffer
    assert buffer.pos == 52
    env: Any = runs.pendulum()
    env.reset(seed=1)
    for i in range(buffer.pos):
        cos, sin, speed = buffer.observations[i, 0]
        env.unwrapped.state = np.array([np.arctan2(sin, cos), speed])
        env.unwrapped.step(2 * buffer.actions[i, 0])
        expected = env.unwrapped._get_obs()
        if not buffer.dones[i, 0]:
            np.testing.assert_allclose(buffer.next_observations[i, 0], expected, atol=1e-4)


def test_mujoco_goes_on_from_its_physics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gymnasium

    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log where it stands

    def cheetah() -> Any:
        return gymnasium.make("HalfCheetah-v5", max_episode_steps=25)

    whole = runs.model(env=cheetah())
    whole.learn(60, callback=runs.callback("run", environment=cheetah, replay_buffer=True))
    resumed = runs.model(4, env=cheetah())
    again = runs.resumed(resumed, "run", 40, into="two", environment=cheetah)
    resumed.learn(20, callback=again, reset_num_timesteps=False)
    assert runs.equal(whole, resumed)


def test_environments_of_other_processes_begin_anew(tmp_path: Path) -> None:
    def several() -> Any:
        return SubprocVecEnv([runs.pendulum] * 2, start_method="spawn")

    model = runs.model(env=several())
    first = runs.callback(tmp_path / "run", replay_buffer=True)
    model.learn(20, callback=first)
    model.env.close()  # type: ignore[union-attr]
    assert "state of the training environments" in first.history[0]["not_contained"]
    resumed = runs.model(env=several())
    again = runs.resumed(resumed, tmp_path / "run", 20, environment=runs.pendulum)
    resumed.learn(20, callback=again, reset_num_timesteps=False)
    resumed.env.close()  # type: ignore[union-attr]
    assert again.history[-1]["step"] == 40


def test_the_chain_goes_on_in_the_same_place(tmp_path: Path) -> None:
    runs.run(tmp_path / "run", 40)
    model = runs.model(3)
    again = runs.resumed(model, tmp_path / "run", 40)
    model.learn(40, callback=again, reset_num_timesteps=False)
    found = list(verify_all([tmp_path / "run"]))
    assert [r.receipt["step"] for r in found] == [20, 40, 60, 80]
    assert {r["parent"].verdict for r in found} == {"ok"}
    assert [r.receipt["seeds"]["consumed"]["101"] for r in found] == [1, 2, 3, 4]
    seconds = [r.receipt["seconds"] for r in found]
    assert seconds == sorted(seconds)


def test_gates_go_on_with_the_chain(tmp_path: Path) -> None:
    """A gate that failed is not got rid of by resuming; one may say otherwise aloud."""
    gate = Gate("balances", "mean_return", -1.0)
    runs.run(tmp_path / "run", 20, gates=[gate])
    for into, more, kept in (("a", {}, ["balances"]), ("b", {"gates": ()}, [])):
        model = runs.model()
        on = runs.resumed(model, tmp_path / "run", 20, into=tmp_path / into, **more)
        model.learn(20, callback=on, reset_num_timesteps=False)
        assert [g["name"] for g in on.history[0]["gates"]] == kept
        found = list(verify_all([tmp_path / into]))
        assert [list(r.failed_gates) for r in found] == [kept]


def test_gc8_resuming_elsewhere_leaves_the_old_place_as_it_was(tmp_path: Path) -> None:
    runs.run(tmp_path / "a", 60)
    before = {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()}
    model = runs.model(3)
    again = runs.resumed(model, tmp_path / "a", 40, into=tmp_path / "b")
    model.learn(20, callback=again, reset_num_timesteps=False)
    now = {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()}
    assert now == before
    lone = {r.location: r["parent"].verdict for r in verify_all([tmp_path / "b"])}
    assert set(lone.values()) == {"not-checked"}, "its parent lies elsewhere"


def test_later_receipts_are_in_the_way(made: Path) -> None:
    with pytest.raises(AlreadyExistsError, match=r"2 later step\(s\), up to 60.*into="):
        runs.resumed(runs.model(), made, 20, watched={})


def test_what_was_watched_is_not_let_go_silently(made: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="the run watched limits"):
        runs.resumed(runs.model(), made, 60)
    into = tmp_path / "on"
    model = runs.model()
    again = runs.resumed(model, made, 60, into=into, watched={"limits": [1.0, 2.0]})
    model.learn(10, callback=again, reset_num_timesteps=False)
    assert again.history[0]["world_model_immutable"] is True


def test_learning_twice_with_one_callback_is_one_chain(tmp_path: Path) -> None:
    made = runs.callback(tmp_path / "run")
    model = runs.model()
    model.learn(40, callback=made)
    model.learn(40, callback=made, reset_num_timesteps=False)
    found = list(verify_all([tmp_path / "run"]))
    assert [r.receipt["step"] for r in found] == [20, 40, 60, 80]
    assert {r["parent"].verdict for r in found} == {"ok"}
    seconds = [r.receipt["seconds"] for r in found]
    assert seconds == sorted(seconds)
    with pytest.raises(AlreadyExistsError):
        model.learn(40, callback=made)


def test_a_step_that_is_not_there_lists_those_that_are(made: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="0000020, 0000040, 0000060"):
        runs.resumed(runs.model(), made, 30)
    with pytest.raises(RepositoryNotFoundError):
        runs.resumed(runs.model(), tmp_path, 30)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"policy_kwargs": {"net_arch": [16, 8]}}, "actor.latent_pi.2.bias has shape"),
        ({"use_sde": False}, "has shape"),
        ({"ent_coef": 0.1}, "optimizers"),
        ({"buffer_size": 10}, "replay buffer"),
    ],
    ids=str,
)
def test_a_model_made_otherwise_is_refused(
    made: Path, settings: dict[str, Any], word: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match=word):
        runs.resumed(runs.model(**settings), made, 60, watched={})


def test_a_damaged_repository_loads_nothing(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "run")
    from castore import File, Repository

    repository = Repository.open(tmp_path / "run/.castore")
    name = next(n for n in repository.snapshots() if n.key == "receipt.step_0000060")
    for path, file in repository.tree(name).files():
        assert isinstance(file, File)
        if path.endswith("training.safetensors"):
            flip_object(repository, file.blobs()[0])
    model = runs.model(5)
    before = runs.weights(model)
    with pytest.raises(ReceiptMismatchError, match="state: unreadable"):
        runs.resumed(model, tmp_path / "run", 60, watched={})
    assert all(torch.equal(t, before[n]) for n, t in runs.weights(model).items())


def test_without_state_there_is_no_resuming(tmp_path: Path) -> None:
    runs.run(tmp_path / "run", 20, resumable=False)
    with pytest.raises(InvalidInputError, match="keeps no training state"):
        runs.resumed(runs.model(), tmp_path / "run", 20)


def test_a_role_cannot_change_at_a_resumption(made: Path) -> None:
    for roles in ({"final_seeds": [101]}, {"validation_seeds": [900], "final_seeds": []}):
        with pytest.raises(InvalidInputError, match="seeds"):
            runs.resumed(runs.model(), made, 60, watched={}, **roles)


@pytest.mark.parametrize("env", [None, "normalized"])
def test_a_final_evaluation_follows_a_resumption_at_once(env: str | None, tmp_path: Path) -> None:
    """And is still the first and only one, in whatever destination the chain goes on."""
    model = made(3, {"env": env})
    model.learn(40, callback=runs.callback(tmp_path / "run"))
    again = made(5, {"env": env})
    second = runs.resumed(again, tmp_path / "run", 40, watched={}, into=tmp_path / "second")
    receipt = second.final_evaluation()
    assert (receipt["run"], receipt["step"]) == (1, 40)
    assert all(r.sound for r in verify_all([tmp_path / "run", tmp_path / "second"]))
    third = runs.resumed(again, tmp_path / "run", 40, watched={})
    assert third.final_evaluation()["returns"] == receipt["returns"]


def test_a_second_final_evaluation_elsewhere_is_refused_too(
    made_final: Path, tmp_path: Path
) -> None:
    callback = runs.resumed(runs.model(5), made_final, 40, watched={}, into=tmp_path / "elsewhere")
    with pytest.raises(AlreadyExistsError, match=r"1 time\(s\) in .*again=True"):
        callback.final_evaluation()
    assert callback.final_evaluation(again=True)["run"] == 2


@pytest.fixture
def made_final(tmp_path: Path) -> Path:
    """Receipts of steps 20 and 40, and a final evaluation."""
    runs.run(tmp_path / "first", 40).final_evaluation()
    return tmp_path / "first"


def test_cc1_the_state_holds_plain_arrays_and_json_only(made: Path) -> None:
    """NumPy scalars, tuples and generators come back as what they were, with no pickle."""
    model = runs.model()
    model.learn(30)
    data = capture(model, "rollout")
    assert b"pickle" not in data
    held = read_safetensors(data, "x")
    assert write_safetensors(held.tensors, held.metadata["castore"]) == data
    TrainingState(data).apply(model)
    TrainingState(data).reapply(model)
    assert capture(model, "rollout") == data


def test_se1_a_forged_state_can_set_no_text_and_hide_no_method(made: Path) -> None:
    """A state sets numbers and arrays where there are such, and nothing else."""
    model = runs.model()
    model.learn(30)
    held = read_safetensors(capture(model, "rollout"), "x")
    env: Any = model.get_env().envs[0].unwrapped  # type: ignore[union-attr]
    env.path = "data/world.xml"
    forged = held.metadata["castore"].replace('"last_u"', '"path": 3, "step": 5, "last_u"')
    assert forged != held.metadata["castore"]
    TrainingState(write_safetensors(held.tensors, forged)).reapply(model)
    assert env.path == "data/world.xml"
    assert callable(env.step)


def test_the_replay_buffer_is_stored_once(tmp_path: Path) -> None:
    """Rows that are full blocks do not change from checkpoint to checkpoint."""
    made = runs.callback(tmp_path / "run", replay_buffer=True, every=10, resumable=True)
    model = runs.model(buffer_size=60_000, learning_starts=10_000)
    buffer = model.replay_buffer
    assert buffer is not None
    random = np.random.default_rng(0)
    for name in ("observations", "next_observations", "actions", "rewards"):
        array = getattr(buffer, name)
        array[:50_000] = random.standard_normal(array[:50_000].shape)
    buffer.pos = 50_000
    model.learn(40, callback=made)
    stored = sum(p.stat().st_size for p in (tmp_path / "run/.castore/objects").rglob("*"))
    plain = [r["state"]["replay.safetensors"]["bytes"] for r in made.history]
    assert stored < 1.3 * plain[0], (stored, plain)
    other = runs.model(4, buffer_size=60_000)
    runs.resumed(other, tmp_path / "run", 40)
    assert other.replay_buffer is not None
    assert np.array_equal(other.replay_buffer.observations, buffer.observations)
    assert other.replay_buffer.pos == buffer.pos
