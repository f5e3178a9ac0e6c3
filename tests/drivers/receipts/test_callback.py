"""The callback on the real Stable-Baselines3: what it writes, when, and what it leaves alone."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

from castore import AlreadyExistsError, InvalidInputError, ReceiptMismatchError
from castore_receipts import verify_all, verify_receipt
from castore_receipts.arrays import read_safetensors
from castore_receipts.destination import Destination
from castore_receipts.gates import Gate
from castore_receipts.journal import Journal
from castore_receipts.policy import Adapter
from castore_receipts.replaying import replay
from castore_receipts.traces import read_npz
from tests.drivers.receipts import runs
from tests.helpers import interrupted

ROOT = Path(__file__).parents[3]


def test_a_checkpoint_is_a_folder_with_weights_traces_and_a_receipt(made: Path) -> None:
    """'The callback saves the policy and critic tensors, checks that they are finite, evaluates a
    frozen adapter and writes trajectories. A receipt then records training step, update count,
    elapsed time, resource measurements and content hashes.'"""
    at = runs.folder(made, 40)
    assert sorted(os.listdir(at)) == ["policy.safetensors", "receipt.json", "validation.npz"]
    tensors = read_safetensors((at / "policy.safetensors").read_bytes(), "x").tensors
    branches = {name.split(".")[0] for name in tensors}
    assert branches == {"actor", "critic", "critic_target"}
    assert "actor.log_std" in tensors
    traces = read_npz((at / "validation.npz").read_bytes(), "x")
    assert {n: a.shape for n, a in traces.items()} == {"trace_101": (20, 5), "trace_102": (20, 5)}
    receipt = runs.read(at)
    assert (receipt["step"], receipt["updates"]) == (40, 20)
    assert receipt["seconds"] > 0
    for name in ("process_peak_bytes", "parameter_bytes", "policy_array_bytes"):
        assert receipt[name] > 0
    assert receipt["mps_driver_bytes"] is None
    assert receipt["world_model_immutable"] is True


def test_a_receipt_tells_where_it_comes_from(made: Path) -> None:
    """'save the resolved Python/framework versions, backend, dtype, seed, input shapes, batch size
    and exact source revision'"""
    receipt = runs.read(runs.folder(made, 40))
    assert receipt["versions"]["torch"] == torch.__version__
    assert receipt["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (receipt["backend"], receipt["dtype"], receipt["seed"]) == ("cpu", "float32", 1)
    assert receipt["input_shapes"] == {"observation": [3], "action": [1]}
    assert receipt["batch_size"] == 8
    assert receipt["source"]["kind"] in ("git", "files")
    settings = receipt["hyperparameters"]
    assert settings["use_sde"] is True
    assert settings["ent_coef"] == "auto_0.01"
    assert settings["train_freq"] == {"every": 1, "unit": "step"}


def test_steps_calls_and_updates_are_told_apart_and_beside_the_budget(tmp_path: Path) -> None:
    """'Log training steps separately from epochs or environment steps. Do not equate the
    configured maximum with a completed budget or convergence.'"""

    class Stop(BaseCallback):
        def _on_step(self) -> bool:
            return self.num_timesteps < 50

    made = runs.callback(tmp_path / "run", every=20)
    model = runs.model(gradient_steps=3, train_freq=5)
    model.learn(1000, callback=CallbackList([made, Stop()]))
    budget = made.history[-1]["budget"]
    assert budget["configured"] == {"environment_steps": 1000}
    assert budget["completed"]["environment_steps"] == 50
    assert budget["completed"]["training_steps"] == 5  # after steps 25, 30, 35, 40, 45
    assert budget["completed"]["updates"] == 15
    assert made.history[-1]["step"] == 50


def test_times_are_measured_separately(made: Path) -> None:
    """'Measure initialization/compilation, data preparation, warmed forward pass, training updates
    and evaluation separately.'"""
    timings = runs.read(runs.folder(made, 60))["timings"]
    phases = ("initialization", "data_preparation", "warmed_forward", "training_updates")
    assert all(timings[p]["seconds"] > 0 and timings[p]["count"] > 0 for p in phases)
    assert timings["evaluation"]["count"] == 3
    assert timings["training_updates"]["count"] == 40


def test_the_run_is_the_same_bits_with_and_without_the_callback(tmp_path: Path) -> None:
    """Weights, optimizers, streams and the environment's own state: nothing is touched."""
    states, models = [], []
    for callback in (None, runs.callback(tmp_path / "run", every=7)):
        model = runs.model()
        models.append(model)
        random.seed(3)
        model.learn(60, callback=callback)
        env: Any = model.get_env().envs[0].unwrapped  # type: ignore[union-attr]
        states.append(
            (random.random(), np.random.random(), torch.rand(1).item(), env.state.tobytes())
        )
    plain, watched = models
    assert runs.equal(plain, watched)
    assert states[0] == states[1]
    assert plain.policy.training == watched.policy.training
    assert np.array_equal(plain.replay_buffer.rewards, watched.replay_buffer.rewards)
    noise = [m.actor.action_dist.exploration_mat for m in (plain, watched)]
    assert torch.equal(*noise)


def test_each_checkpoint_is_one_line_and_goes_to_sb3s_logger(tmp_path: Path) -> None:
    log = io.StringIO()
    made = runs.callback(tmp_path / "run", log=log)
    seen: list[dict[str, Any]] = []
    model = runs.model()

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            seen.append(dict(self.logger.name_to_value))
            return True

    model.learn(41, callback=CallbackList([made, Look()]))
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [(n["phase"], n["step"]) for n in lines] == [("checkpoint", s) for s in (20, 40, 41)]
    assert lines[0]["mean_return"] == made.history[0]["mean_return"]
    assert lines[0]["bytes"] > 10_000
    logged = [s["receipts/mean_return"] for s in seen if "receipts/mean_return" in s]
    assert logged[0] == lines[0]["mean_return"]


# -- when


@pytest.mark.parametrize(
    ("envs", "every", "total", "steps"),
    [
        (4, 20, 80, [20, 40, 60, 80]),
        (3, 20, 50, [21, 42, 51]),
        (1, 20, 50, [20, 40, 50]),
        (1, 1000, 30, [30]),
        (4, 1, 12, [4, 8, 12]),
    ],
)
def test_rc5_cadence_and_step_are_environment_steps(
    tmp_path: Path, envs: int, every: int, total: int, steps: list[int]
) -> None:
    model = runs.model(env=DummyVecEnv([runs.pendulum] * envs), learning_starts=4)
    made = runs.callback(tmp_path / "run", every=every)
    model.learn(total, callback=made)
    assert [r["step"] for r in made.history] == steps
    assert made.history[0]["environments"] == envs


def test_rc5_training_by_episodes_takes_receipts_between_rollouts(tmp_path: Path) -> None:
    model = runs.model(train_freq=(1, "episode"), gradient_steps=2)
    made = runs.callback(tmp_path / "run", every=15)
    model.learn(60, callback=made)
    assert [r["step"] for r in made.history] == [20, 40, 60]


def test_rc5_an_early_stop_by_another_callback_still_gets_its_last_receipt(tmp_path: Path) -> None:
    class Stop(BaseCallback):
        def _on_step(self) -> bool:
            return self.num_timesteps < 33

    made = runs.callback(tmp_path / "run")
    runs.model().learn(100, callback=CallbackList([made, Stop()]))
    assert [r["step"] for r in made.history] == [20, 33]


# -- what fails


def poison(model: Any) -> None:
    with torch.no_grad():
        model.critic_target.qf1[2].weight[3, 4] = float("nan")
        model.critic_target.qf1[2].weight[5, 0] = float("inf")


class Poison(BaseCallback):
    def _on_step(self) -> bool:
        if self.num_timesteps == 30:
            poison(self.model)
        if self.num_timesteps == 41:
            torch.nan_to_num_(self.model.critic_target.qf1[2].weight.data, 0.0, 0.0, 0.0)
            torch.nan_to_num_(self.model.critic.qf1[2].weight.data, 0.0, 0.0, 0.0)
        return True


BAD = r"critic_target\.qf1\.2\.weight: 2 not finite, the first at \[3, 4\]: nan"


def test_a_nonfinite_tensor_stops_the_run_before_anything_is_published(tmp_path: Path) -> None:
    made = runs.callback(tmp_path / "run")
    model = runs.model(learning_starts=1000)
    with pytest.raises(InvalidInputError, match=BAD):
        model.learn(100, callback=CallbackList([made, Poison()]))
    assert not runs.folder(tmp_path / "run", 40).exists()
    assert [n.key for n in made.destination.snapshots()] == ["receipt.step_0000020"]


def test_a_run_may_go_on_and_record_the_failure(tmp_path: Path) -> None:
    made = runs.callback(tmp_path / "run", on_failure="record")
    runs.model(learning_starts=1000).learn(60, callback=CallbackList([made, Poison()]))
    assert [r["step"] for r in made.history] == [20, 60]
    failures = runs.read(runs.folder(tmp_path / "run", 60))["failures"]
    assert [f["step"] for f in failures] == [40]
    assert "critic_target.qf1.2.weight" in failures[0]["error"]
    told = json.loads((tmp_path / "run/failures/step_0000040.json").read_text())
    assert told == failures[0]
    assert made.history[-1]["parent"]["step"] == 20
    assert all(r.sound for r in verify_all([tmp_path / "run"]))


def test_rc2_training_episodes_of_any_return_are_kept(tmp_path: Path) -> None:
    """A reward that is no number, before anything is learned from it, is no reason to stop."""

    class Odd(gymnasium.Wrapper[Any, Any, Any, Any]):
        best = float("-inf")

        def step(self, action: Any) -> Any:
            observation, _, terminated, truncated, info = self.env.step(action)
            return observation, float("nan"), terminated, truncated, info

    made = runs.callback(tmp_path / "run")
    runs.model(env=Odd(runs.pendulum()), learning_starts=1000).learn(40, callback=made)
    again = runs.model(3, env=Odd(runs.pendulum()), learning_starts=1000)
    runs.resumed(again, tmp_path / "run", 40, environment=runs.pendulum)
    assert [np.isnan(e["r"]) for e in again.ep_info_buffer or ()] == [True, True]


def test_rc2_a_return_that_is_no_number_is_refused_by_field(tmp_path: Path) -> None:
    class Broken(gymnasium.RewardWrapper[Any, Any]):
        def reward(self, reward: Any) -> float:
            return float("nan")

    with pytest.raises(InvalidInputError, match=r"receipt\.mean_return is nan"):
        runs.run(tmp_path / "run", 20, environment=lambda: Broken(runs.pendulum()))
    assert not (tmp_path / "run/checkpoints").exists()


def test_an_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    at = runs.folder(tmp_path / "run", 20)
    at.mkdir(parents=True)
    with pytest.raises(AlreadyExistsError, match="step_0000020 exists already"):
        runs.run(tmp_path / "run", 20)
    assert not any(at.iterdir())


def test_a_destination_of_another_run_is_refused_at_the_start(made: Path) -> None:
    with pytest.raises(AlreadyExistsError, match="earlier run"):
        runs.run(made, 20)


def test_a_watched_object_that_changes_is_named_and_nothing_is_published(tmp_path: Path) -> None:
    """'An actuator digest is checked before and after validation, providing a targeted assertion
    that the declared world-model object did not change.'"""
    actuator = {"gains": np.ones(3)}

    class Careless(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            actuator["gains"][1] += 1e-9
            return self.env.step(action)

    with pytest.raises(AssertionError, match=r"during validation: actuator\['gains'\]\.data"):
        runs.run(
            tmp_path / "run",
            20,
            environment=lambda: Careless(runs.pendulum()),
            watched={"actuator": actuator},
        )
    assert not (tmp_path / "run/checkpoints").exists()

    made = runs.callback(tmp_path / "two", watched={"actuator": actuator})

    class Change(BaseCallback):
        def _on_step(self) -> bool:
            actuator["gains"][0] = 5.0
            return True

    with pytest.raises(AssertionError, match="before validation"):
        runs.model().learn(20, callback=CallbackList([made, Change()]))


def test_nothing_is_claimed_about_a_world_model_where_nothing_was_watched(tmp_path: Path) -> None:
    made = runs.run(tmp_path / "run", 20)
    assert made.history[0]["world_model_immutable"] is None
    assert verify_receipt(runs.folder(tmp_path / "run", 20))["world_model"].verdict == "not-checked"


@pytest.mark.parametrize(
    "wrong", [{"every": 0}, {"on_failure": "ignore"}, {"replay_buffer": True, "resumable": False}]
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        runs.callback(tmp_path / "run", **wrong)
    assert not (tmp_path / "run").exists()


def test_an_algorithm_without_adapter_is_refused_before_training(tmp_path: Path) -> None:
    model = PPO("MlpPolicy", runs.pendulum(), n_steps=16, batch_size=8, device="cpu")
    with pytest.raises(InvalidInputError, match="adapter="):
        model.learn(32, callback=runs.callback(tmp_path / "run"))
    assert model.num_timesteps == 0


def test_an_adapter_of_ones_own_serves_another_algorithm(tmp_path: Path) -> None:
    class Still:
        """Does nothing, with one array of the policy."""

        def __init__(self, tensors: Any):
            self.held = {"log_std": tensors["log_std"]}

        def act(self, observation: Any) -> Any:
            return np.zeros(1, np.float32)

        def tensors(self) -> Any:
            return self.held

        def describe(self) -> dict[str, Any]:
            return {"kind": "still/1", "arrays": ["log_std"]}

    def adapter(model: Any, tensors: Any, normalizer: Any) -> Adapter:
        return Still(tensors)

    model = PPO("MlpPolicy", runs.pendulum(), n_steps=16, batch_size=8, n_epochs=2, device="cpu")
    made = runs.callback(tmp_path / "run", adapter=adapter)
    model.learn(32, callback=made)
    assert [(r["step"], r["updates"]) for r in made.history] == [(32, 4)]
    assert verify_receipt(runs.folder(tmp_path / "run", 32)).sound


KILLED = """
import os, sys
sys.path[:0] = [{root!r}]
from castore.backends.local import LocalBackend
from tests.drivers.receipts import runs
real = LocalBackend.create
def create(self, name, data):
    if name.endswith("step_0000040/{file}"):
        os.kill(os.getpid(), 9)
    return real(self, name, data)
LocalBackend.create = create
runs.run({to!r}, 60)
"""


@pytest.mark.parametrize("file", ["policy.safetensors", "validation.npz", "receipt.json"])
def test_a_crash_leaves_no_receipt_and_the_next_start_finishes_the_folder(
    tmp_path: Path, file: str
) -> None:
    to = str(tmp_path / "run")
    code = KILLED.format(root=str(ROOT), to=to, file=file)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (runs.folder(tmp_path / "run", 40) / "receipt.json").exists()
    model = runs.model(seed=7)
    again = runs.resumed(model, to, 40)
    model.learn(20, callback=again, reset_num_timesteps=False)
    found = list(verify_all([to]))
    assert [r.receipt["step"] for r in found] == [20, 40, 60]
    assert all(r.sound for r in found)


class _Refused(Journal):
    """Cannot publish, and only says so when it is told to go on."""

    def __init__(self, place: Destination):
        super().__init__(place, gates=(), key=None, materialize=False, background=True, log=None)
        self.go = threading.Event()

    def _checkpoint(self, measured: Any) -> None:
        assert self.go.wait(60)
        raise AlreadyExistsError("a receipt of that step is there")


def test_a_wait_that_was_interrupted_forgets_no_failure(tmp_path: Path) -> None:
    """Ctrl-C ends the wait for a receipt under way; what that one met is raised by the next."""
    journal = _Refused(Destination.open(str(tmp_path / "run"), None, None, None))
    journal.submit(None)  # type: ignore[arg-type]
    with interrupted(Journal.settle), pytest.raises(KeyboardInterrupt):
        journal.settle()
    journal.go.set()
    with pytest.raises(AlreadyExistsError, match="of that step"):
        journal.close()
    journal.settle()


def test_a_failure_to_publish_in_the_background_is_met_at_the_next_checkpoint(
    tmp_path: Path,
) -> None:
    """Somebody takes the folder's place after the checkpoint was measured."""

    class Take(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps == 1:
                made.journal.submit = occupied  # type: ignore[method-assign]
            return True

    def occupied(measured: Any) -> None:
        at = runs.folder(tmp_path / "run", measured.step)
        at.mkdir(parents=True)
        (at / "policy.safetensors").write_bytes(b"another's")
        submit(measured)

    made = runs.callback(tmp_path / "run")
    submit = made.journal.submit
    model = runs.model()
    with pytest.raises(AlreadyExistsError, match="policy.safetensors holds something else"):
        model.learn(60, callback=CallbackList([made, Take()]))
    assert model.num_timesteps == 40
    assert not (runs.folder(tmp_path / "run", 20) / "receipt.json").exists()
    assert (runs.folder(tmp_path / "run", 20) / "policy.safetensors").read_bytes() == b"another's"


def test_publishing_at_once_gives_the_same(tmp_path: Path) -> None:
    keys = ("checkpoint_sha256", "validation_sha256", "policy_digest", "returns", "seeds", "budget")
    both = [runs.run(tmp_path / str(b), 40, background=b).history for b in (True, False)]
    for ours, theirs in zip(*both, strict=True):
        assert all(ours[k] == theirs[k] for k in keys)


def test_a_buffer_that_cannot_be_kept_is_refused_before_training(tmp_path: Path) -> None:
    from stable_baselines3.common.buffers import ReplayBuffer

    class Hindsight(ReplayBuffer):
        pass

    model = runs.model(replay_buffer_class=Hindsight)
    with pytest.raises(InvalidInputError, match="a Hindsight cannot be stored"):
        model.learn(20, callback=runs.callback(tmp_path / "run", replay_buffer=True))
    assert model.num_timesteps == 0


# -- normalisation


def test_rc7_statistics_are_stored_hashed_and_needed(tmp_path: Path) -> None:
    model = runs.model(env=runs.normalized())
    made = runs.callback(tmp_path / "run")
    model.learn(40, callback=made)
    at = runs.folder(tmp_path / "run", 40)
    assert (at / "normalizer.safetensors").exists()
    assert verify_receipt(at).sound
    again = replay(at, environment=runs.pendulum)
    assert again.sound
    (at / "normalizer.safetensors").unlink()
    assert runs.problems(verify_receipt(at)) == {"normalizer": "missing"}
    with pytest.raises(ReceiptMismatchError, match="normalizer: missing"):
        replay(at, environment=runs.pendulum)


def test_rc7_a_receipt_lists_what_it_does_not_contain(made: Path, tmp_path: Path) -> None:
    whole = runs.read(runs.folder(made, 20))["not_contained"]
    assert "replay buffer" not in whole
    assert any("none" in text for text in whole), "that there was no normaliser is said"
    bare = runs.run(tmp_path / "run", 20, resumable=False).history[0]["not_contained"]
    assert "replay buffer" in bare
    assert any("optimizers" in text for text in bare)


def test_rc7_a_frame_stack_that_validation_lacks_is_refused(tmp_path: Path) -> None:
    env = VecFrameStack(DummyVecEnv([runs.pendulum]), 2)
    with pytest.raises(InvalidInputError, match="frame stack"):
        runs.model(env=env).learn(20, callback=runs.callback(tmp_path / "run"))


# -- final evaluation


def test_the_final_evaluation_runs_once_and_a_repetition_is_recorded(tmp_path: Path) -> None:
    """'Repeated checkpoint validation consumes feedback and must not be renamed final
    evaluation.'"""
    made = runs.callback(tmp_path / "run")
    model = runs.model()
    model.learn(20, callback=made)
    first = made.final_evaluation()
    assert (first["role"], first["run"]) == ("final", 1)
    assert set(first["returns"]) == {"900"}
    assert first["parent"]["relation"] == "evaluates"
    with pytest.raises(AlreadyExistsError, match="again=True"):
        made.final_evaluation()
    assert made.final_evaluation(again=True)["run"] == 2
    found = {r.location.rpartition("/")[2]: r for r in verify_all([tmp_path / "run"])}
    assert set(found) == {"step_0000020", "evaluation_0001", "evaluation_0002"}
    assert all(r.sound for r in found.values())
    assert found["evaluation_0001"]["parent"].verdict == "ok"


def test_a_final_evaluation_needs_seeds_and_the_receipts_policy(tmp_path: Path) -> None:
    without = runs.callback(tmp_path / "a", final_seeds=())
    model = runs.model()
    model.learn(20, callback=without)
    with pytest.raises(InvalidInputError, match="final_seeds"):
        without.final_evaluation()
    made = runs.callback(tmp_path / "b")
    with pytest.raises(InvalidInputError, match="no receipt"):
        made.final_evaluation()
    model = runs.model()
    model.learn(20, callback=made)
    with torch.no_grad():
        model.actor.mu[0].bias.add_(1.0)
    with pytest.raises(InvalidInputError, match="not the one of the last receipt"):
        made.final_evaluation()


def test_acceptance_gates_are_in_the_receipt(tmp_path: Path) -> None:
    gates = [Gate("balances", "mean_return", -1.0), Gate("trained", "updates", 1)]
    made = runs.run(tmp_path / "run", 40, gates=gates)
    assert [g["passed"] for g in made.history[0]["gates"]] == [False, False]
    assert [g["passed"] for g in made.history[1]["gates"]] == [False, True]
    found = verify_receipt(runs.folder(tmp_path / "run", 40))
    assert found.sound
    assert found.failed_gates == ["balances"]


def test_a_repository_of_the_team_serves_many_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASTORE_REPOSITORY", str(tmp_path / "store"))
    a, b = runs.run(tmp_path / "a", 20), runs.run(tmp_path / "b", 20)
    assert not (tmp_path / "a/.castore").exists()
    assert a.destination.namespace != b.destination.namespace
    assert len(list(verify_all([tmp_path / "store"]))) == 2
    assert a.history[0]["checkpoint_sha256"] == b.history[0]["checkpoint_sha256"]


def test_folders_may_be_left_out(tmp_path: Path) -> None:
    made = runs.callback(tmp_path / "run", materialize=False)
    model = runs.model()
    model.learn(20, callback=made)
    model.learn(20, callback=made, reset_num_timesteps=False)
    assert not (tmp_path / "run/checkpoints").exists()
    assert [r.sound for r in verify_all([made.destination.repository.url])] == [True, True]
