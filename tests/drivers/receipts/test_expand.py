"""Sensors are added without changing what is computed, at that instant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from stable_baselines3.common.vec_env import DummyVecEnv

from castore import InvalidInputError, ReceiptMismatchError
from castore_receipts import (
    expand_observation,
    expand_receipt,
    ledger,
    replay,
    verify_all,
    verify_expansion,
    verify_receipt,
)
from castore_receipts.arrays import Tensor, tensor
from castore_receipts.gates import Gate
from castore_receipts.sensors import ZeroSensors
from castore_receipts.tensors import state_of
from tests.drivers.receipts import runs


class Cheetah(gymnasium.Env[Any, Any]):
    """The shapes of HalfCheetah, without its physics: 17 observations, 6 actions."""

    observation_space = Box(-np.inf, np.inf, (17,), np.float64)
    action_space = Box(-1, 1, (6,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.np_random.normal(size=17), {}

    def step(self, action: Any) -> Any:
        return self.np_random.normal(size=17), float(np.sum(action)), False, False, {}


def cheetah() -> gymnasium.Env[Any, Any]:
    return gymnasium.wrappers.TimeLimit(Cheetah(), 10)


def wide() -> gymnasium.Env[Any, Any]:
    return ZeroSensors(cheetah(), 6)


FIRST = (
    "actor.latent_pi.0.weight",
    *(f"critic{t}.qf{i}.0.weight" for t in ("", "_target") for i in (0, 1)),
)


@pytest.fixture(scope="module")
def document() -> Any:
    """The document's policy: two layers of 256, gSDE with frequency 4, learned entropy."""
    model = runs.model(env=cheetah(), policy_kwargs={"net_arch": [256, 256]})
    model.learn(30)
    return model


@pytest.fixture(scope="module")
def old(document: Any) -> dict[str, Tensor]:
    return state_of(document.policy.state_dict())


def test_the_ledger_of_the_document(old: dict[str, Tensor]) -> None:
    """'Expansion adds 1,536 input weights to actor and each critic first layer;
    policy-distribution parameters, both critics and target critics must also be counted.'"""
    before, after = ledger(old), ledger(expand_observation(old, 6))
    assert after.added_to(before) == dict.fromkeys(FIRST, 1536)
    assert after.total - before.total == 7680
    branches = before.by_branch()
    assert branches["policy distribution"] == 256 * 6 + 6 + 256 * 6  # mean, and gSDE's log_std
    assert branches["actor"] == 17 * 256 + 256 + 256 * 256 + 256
    assert branches["critic"] == branches["critic target"] == 2 * (24 * 256 + 256 * 257 + 257)
    assert before.total == sum(branches.values()) == 362_250
    distribution = {r.name for r in before.rows if r.branch == "policy distribution"}
    assert distribution == {"actor.log_std", "actor.mu.0.weight", "actor.mu.0.bias"}


def test_the_ledger_leaves_out_buffers_and_optimizer_state(old: dict[str, Tensor]) -> None:
    """'They exclude optimizer state and nontrainable buffers.'"""
    extra = {
        "critic.qf0.1.running_mean": tensor(np.zeros(256), "x"),
        "critic.qf0.1.num_batches_tracked": tensor(np.zeros(1, np.int64), "x"),
    }
    assert ledger({**old, **extra}).total == ledger(old).total


def test_columns_go_where_the_document_says(old: dict[str, Tensor]) -> None:
    """'W_actor+ = [W_actor 0], W_critic+ = [W_obs 0 W_action]'"""
    new = expand_observation(old, 6)
    actor = new[FIRST[0]].numpy()
    assert np.array_equal(actor[:, :17], old[FIRST[0]].numpy())
    assert not actor[:, 17:].any()
    for name in FIRST[1:]:
        was, now = old[name].numpy(), new[name].numpy()
        assert was.shape == (256, 23) == actor.shape, "an old critic is as wide as the new actor"
        assert np.array_equal(now[:, :17], was[:, :17])
        assert not now[:, 17:23].any()
        assert np.array_equal(now[:, 23:], was[:, 17:])
    assert all(new[n] is old[n] for n in old if n not in FIRST), "log_std among them"


def test_outputs_are_equal_bit_by_bit(document: Any, old: dict[str, Tensor]) -> None:
    """'Compare old and expanded actor outputs with added sensors set to zero. Repeat for critics
    using arbitrary actions, then nonzero added sensors: initial equality should still hold because
    those columns are zero.'"""
    new = expand_observation(document, 6)
    found = verify_expansion(document, new)
    assert found.sound
    names = {link.name for link in found.links}
    assert {"actor, zero sensors", "critic.qf0, zero sensors"} <= names
    assert {"critic_target.qf1, nonzero sensors", "actor, nonzero sensors"} <= names
    assert all("largest difference 0" in link.detail for link in found.links if "," in link.name)
    observations = np.random.default_rng(0).normal(size=(9, 17)).astype(np.float32)
    sensors = np.random.default_rng(1).normal(size=(9, 6)).astype(np.float32)
    was, _ = document.predict(observations, deterministic=True)
    now, _ = new.predict(np.concatenate([observations, sensors], 1), deterministic=True)
    np.testing.assert_allclose(now, was, atol=1e-6)


def append(t: Tensor) -> Tensor:
    return tensor(np.concatenate([t.numpy(), np.zeros((256, 6), np.float32)], 1), "x")


WRONG: dict[str, Any] = {
    "appended to a critic": lambda old, new: {n: append(old[n]) for n in FIRST[1:3]},
    "appended to a target": lambda old, new: {FIRST[4]: append(old[FIRST[4]])},
    "new columns first in the actor": lambda old, new: {
        FIRST[0]: tensor(np.roll(new[FIRST[0]].numpy(), 6, axis=1), "x")
    },
    "a new column that is not zero": lambda old, new: {
        FIRST[1]: tensor(new[FIRST[1]].numpy() + 1e-3 * (np.arange(29) == 20), "x")
    },
    "another layer changed": lambda old, new: {
        "actor.log_std": tensor(old["actor.log_std"].numpy() * 1.01, "x")
    },
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_expansion_is_caught(old: dict[str, Tensor], wrong: Any) -> None:
    """'simply appending zeros would mix sensor and action meaning'"""
    new = expand_observation(old, 6)
    changed = {n: tensor(t.numpy().astype(np.float32), n) for n, t in wrong(old, new).items()}
    assert not verify_expansion(old, {**new, **changed}).sound


def test_a_difference_of_one_tensor_or_width_is_caught(old: dict[str, Tensor]) -> None:
    new = expand_observation(old, 6)
    assert verify_expansion(old, old)["widths"].verdict == "mismatch"
    less = {n: t for n, t in new.items() if n != "actor.log_std"}
    assert verify_expansion(old, less)["tensors"].verdict == "missing"


def test_new_columns_move_at_the_first_update(document: Any) -> None:
    """'New sensor columns start with zero influence, yet can acquire gradients from the first
    update.' Preservation is claimed for the instant of expansion only."""

    class Noisy(gymnasium.ObservationWrapper[Any, Any, Any]):
        def observation(self, observation: Any) -> Any:
            return np.concatenate([observation[:17], np.ones(6)])

    new = expand_observation(document, 6, env=DummyVecEnv([lambda: Noisy(wide())]))
    assert verify_expansion(document, new).sound
    new.learning_starts = new.num_timesteps + 5
    new.learn(6, reset_num_timesteps=False)
    after = state_of(new.policy.state_dict())
    for name in FIRST:
        assert after[name].numpy()[:, 17:23].any(), name


@pytest.mark.parametrize("moments", ["map", "reset"])
def test_optimizer_moments_move_as_the_weights_do(document: Any, moments: str) -> None:
    """'Optimizer state and target-network mapping must be reconciled independently of parameter
    shape.'"""
    new = expand_observation(document, 6, moments=moments)
    for was, now in ((document.actor, new.actor), (document.critic, new.critic)):
        held, got = was.optimizer.state_dict()["state"], now.optimizer.state_dict()["state"]
        if moments == "reset":
            assert not got
            continue
        for index, (name, _) in enumerate(now.named_parameters()):
            old_, new_ = (s[index]["exp_avg_sq"].numpy() for s in (held, got))
            if not name.endswith("0.weight") or old_.shape == new_.shape:
                assert np.array_equal(old_, new_)
                continue
            assert np.array_equal(new_[:, :17], old_[:, :17])
            assert not new_[:, 17:23].any()
            assert np.array_equal(new_[:, 23:], old_[:, 17:])
    assert torch.equal(document.log_ent_coef, new.log_ent_coef)


def test_the_given_model_is_not_touched(document: Any) -> None:
    before = runs.weights(document)
    stream = document.action_space.np_random.bit_generator.state
    np.random.seed(1)
    torch.manual_seed(1)
    expected = (np.random.RandomState(1).random_sample(), torch.rand(1).item())
    np.random.seed(1)
    torch.manual_seed(1)
    expand_observation(document, 6)
    assert (np.random.random_sample(), torch.rand(1).item()) == expected
    assert document.action_space.np_random.bit_generator.state == stream
    assert document.observation_space.shape == (17,)
    assert all(torch.equal(t, before[n]) for n, t in runs.weights(document).items())


def test_the_observation_space_is_rebuilt(document: Any) -> None:
    assert expand_observation(document, 6).observation_space.shape == (23,)
    env = DummyVecEnv([wide])
    assert expand_observation(document, 6, env=env).observation_space == env.observation_space
    with pytest.raises(InvalidInputError, match="23 numbers"):
        expand_observation(document, 6, env=DummyVecEnv([cheetah]))


def test_what_cannot_be_expanded_is_refused(old: dict[str, Tensor]) -> None:
    for wrong in (0, -1):
        with pytest.raises(InvalidInputError, match="at least one"):
            expand_observation(old, wrong)
    flat = runs.model(policy_kwargs={"net_arch": []})
    with pytest.raises(InvalidInputError, match="hidden layer"):
        expand_observation(flat, 6)
    odd = {**old, FIRST[1]: old[FIRST[0]]}
    with pytest.raises(InvalidInputError, match="critic.qf0.0.weight takes 17"):
        expand_observation(odd, 6)
    with pytest.raises(InvalidInputError, match="SAC actor"):
        expand_observation({"a": old[FIRST[0]]}, 6)
    with pytest.raises(InvalidInputError, match="moments"):
        expand_observation(runs.model(), 6, moments="halve")


# -- receipts


def test_an_expanded_checkpoint_is_a_receipt_whose_parent_is_the_old_one(
    made: Path, tmp_path: Path
) -> None:
    receipt, found = expand_receipt(made, 40, tmp_path / "wide", added=6, environment=zeroed)
    assert found.sound
    old = runs.read(runs.folder(made, 40))
    assert receipt["parent"] == {
        "relation": "expanded",
        "step": 40,
        "receipt_sha256": old["receipt_sha256"],
    }
    assert receipt["expansion"]["observation"] == {"before": 3, "after": 9}
    assert receipt["expansion"]["grown"]["critic.qf0.0.weight"] == 6 * 16
    assert receipt["returns"] == pytest.approx(old["returns"], rel=1e-6), "sensors show zero"
    assert receipt["seeds"]["consumed"] == {"101": 3, "102": 3}
    both = list(verify_all([made, tmp_path / "wide"]))
    assert all(r.sound for r in both)
    assert both[-1]["parent"].verdict == "ok"
    assert verify_receipt(runs.folder(tmp_path / "wide", 40))["parent"].verdict == "not-checked"
    assert replay(runs.folder(tmp_path / "wide", 40), environment=zeroed).sound


def zeroed() -> gymnasium.Env[Any, Any]:
    return ZeroSensors(runs.pendulum(), 6)


def test_the_environment_with_zero_sensors_is_made_from_the_receipt(
    made: Path, tmp_path: Path
) -> None:
    receipt, _ = expand_receipt(made, 20, tmp_path / "wide", added=2)
    assert receipt["environment"]["wrappers"] == ["ZeroSensors"]
    assert replay(runs.folder(tmp_path / "wide", 20)).sound


def test_training_goes_on_from_an_expanded_receipt(made: Path, tmp_path: Path) -> None:
    receipt, _ = expand_receipt(made, 40, tmp_path / "wide", added=6)
    model = runs.model(env=zeroed())
    again = runs.resumed(model, tmp_path / "wide", 40, watched={})
    assert torch.count_nonzero(model.actor.latent_pi[0].weight[:, 3:]) == 0
    model.learn(20, callback=again, reset_num_timesteps=False)
    assert again.history[-1]["parent"]["receipt_sha256"] == receipt["receipt_sha256"]
    assert all(r.sound for r in verify_all([made, tmp_path / "wide"]))


def test_what_follows_an_expansion_is_replayed_and_expanded_again(
    made: Path, tmp_path: Path
) -> None:
    """The wrapper's width is told by the receipt's shapes: later receipts tell of no expansion."""
    expand_receipt(made, 40, tmp_path / "wide", added=6)
    model = runs.model(env=zeroed())
    again = runs.resumed(model, tmp_path / "wide", 40, watched={})
    model.learn(20, callback=again, reset_num_timesteps=False)
    assert "expansion" not in again.history[-1]
    assert replay(runs.folder(tmp_path / "wide", 60)).sound
    receipt, found = expand_receipt(tmp_path / "wide", 60, tmp_path / "wider", added=2)
    assert found.sound
    assert receipt["environment"]["wrappers"] == ["ZeroSensors"] * 2
    assert replay(runs.folder(tmp_path / "wider", 60)).sound


@pytest.mark.parametrize("width", [0, 3, 1 << 40])
def test_a_forged_width_makes_no_environment(made: Path, tmp_path: Path, width: int) -> None:
    expand_receipt(made, 20, tmp_path / "wide", added=2)
    at = runs.folder(tmp_path / "wide", 20)
    runs.forge(at, lambda r: r["environment"].update(observation_shape=[width]))
    with pytest.raises(InvalidInputError, match=f"tells of {width} observations"):
        replay(at)


def test_statistics_of_observations_grow_too(tmp_path: Path) -> None:
    model = runs.model(env=runs.normalized())
    model.learn(20, callback=runs.callback(tmp_path / "run"))
    receipt, _ = expand_receipt(tmp_path / "run", 20, tmp_path / "wide", environment=zeroed)
    old = runs.read(runs.folder(tmp_path / "run", 20))["returns"]
    assert receipt["returns"] == pytest.approx(old, rel=1e-6)
    assert verify_receipt(runs.folder(tmp_path / "wide", 20)).sound


def test_neither_expansion_nor_verification_passes_a_failed_gate(tmp_path: Path) -> None:
    """'The simulation study's failed acceptance gates remain failures even if this checkpoint
    transformation is algebraically correct.'"""
    runs.run(tmp_path / "run", 20, gates=[Gate("balances", "mean_return", -1.0)])
    receipt, found = expand_receipt(tmp_path / "run", 20, tmp_path / "wide")
    assert found.sound
    assert receipt["gates"][0]["passed"] is False
    assert verify_receipt(runs.folder(tmp_path / "wide", 20)).failed_gates == ["balances"]

    def passed(receipt: dict[str, Any]) -> None:
        receipt["gates"][0] |= {"passed": True, "value": 0.0}

    runs.forge(runs.folder(tmp_path / "wide", 20), passed)
    last = list(verify_all([tmp_path / "run", tmp_path / "wide"]))[-1]
    assert runs.problems(last) == {"gates": "mismatch"}


def test_an_expansion_that_changes_the_function_is_not_published(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from castore_receipts import expansion

    def appended(tensors: Any, added: int) -> Any:
        new = expand_observation(tensors, added)
        wrong = np.concatenate([tensors[FIRST[1]].numpy(), np.zeros((16, added))], 1)
        return {**new, FIRST[1]: tensor(wrong.astype(np.float32), "x")}

    monkeypatch.setattr(expansion, "expand_tensors", appended)
    with pytest.raises(ReceiptMismatchError, match="critic.qf0"):
        expand_receipt(made, 20, tmp_path / "wide")
    assert not (tmp_path / "wide/checkpoints").exists()


def test_an_environment_of_another_width_is_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"shows \(3,\), the policy takes \(9,\)"):
        expand_receipt(made, 20, tmp_path / "wide", environment=runs.pendulum)


def test_expansion_needs_no_torch(made: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys\n"
        "for n in ('torch', 'stable_baselines3'): sys.modules[n] = None\n"
        "from castore_receipts import expand_receipt\n"
        f"print(expand_receipt({str(made)!r}, 20, {str(tmp_path / 'wide')!r})[1].sound)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "True\n", done.stderr
