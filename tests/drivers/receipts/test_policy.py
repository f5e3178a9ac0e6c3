"""The frozen adapter computes what SB3's deterministic actor computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from stable_baselines3 import PPO, SAC

from castore import FormatError, InvalidInputError
from castore_receipts import normalize, policy
from castore_receipts.adapters import sac_actor
from castore_receipts.tensors import state_of
from tests.drivers.receipts import runs


class Wide(gymnasium.Env[Any, Any]):
    """Five numbers in, three out with odd bounds."""

    observation_space = Box(-np.inf, np.inf, (5,), np.float32)
    action_space = Box(np.array([-1, 0, -7], np.float32), np.array([1, 3, -2], np.float32))

    def reset(self, **_: Any) -> Any:
        return np.zeros(5, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(5, np.float32), 0.0, False, True, {}


SETTINGS: list[dict[str, Any]] = [
    {"use_sde": True},
    {"use_sde": False},
    {"use_sde": True, "policy_kwargs": {"net_arch": [16], "activation_fn": torch.nn.Tanh}},
    {"use_sde": True, "policy_kwargs": {"net_arch": [16, 8, 4], "clip_mean": 0.0}},
    {"use_sde": True, "policy_kwargs": {"net_arch": [16], "clip_mean": 0.01}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_actions_agree_with_the_deterministic_ones_of_sb3(settings: dict[str, Any]) -> None:
    model = runs.model(env=Wide(), **settings)
    with torch.no_grad():
        for parameter in model.policy.actor.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    adapter = sac_actor(model, state_of(model.policy.state_dict()), None)
    observations = np.random.default_rng(0).normal(0, 3, (40, 5)).astype(np.float32)
    expected, _ = model.predict(observations, deterministic=True)
    np.testing.assert_allclose(adapter.act(observations), expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(adapter.act(observations[0]), expected[0], rtol=2e-6, atol=2e-6)


def test_numeric_size_is_that_of_the_inference_arrays() -> None:
    """'It also records the numeric size of the inference adapter. That size excludes Python
    runtime, training replay and device allocator overhead.'"""
    model = runs.model(env=Wide())
    adapter = sac_actor(model, state_of(model.policy.state_dict()), None)
    numbers = (5 * 16 + 16) + (16 * 16 + 16) + (16 * 3 + 3)
    assert policy.numeric_bytes(adapter) == 4 * numbers
    assert set(adapter.describe()["arrays"]) == set(adapter.tensors())


def test_normalised_observations_agree_with_vecnormalize() -> None:
    env = runs.normalized()
    model = runs.model(env=env, learning_starts=10)
    model.learn(30)
    statistics = normalize.capture(env)
    assert statistics is not None
    scaled = normalize.frozen(statistics, "x")
    raw = np.random.default_rng(1).normal(0, 4, (20, 3)).astype(np.float32)
    assert scaled is not None
    np.testing.assert_allclose(scaled(raw), env.normalize_obs(raw), rtol=1e-6)
    adapter = sac_actor(model, state_of(model.policy.state_dict()), scaled)
    expected, _ = model.predict(env.normalize_obs(raw), deterministic=True)
    np.testing.assert_allclose(adapter.act(raw), expected, rtol=2e-6, atol=2e-6)


def test_another_algorithm_is_told_to_bring_its_adapter() -> None:
    model = PPO("MlpPolicy", runs.pendulum(), device="cpu")
    with pytest.raises(InvalidInputError, match="adapter="):
        sac_actor(model, state_of(model.policy.state_dict()), None)


def test_an_activation_that_is_not_known_is_refused() -> None:
    model = SAC(
        "MlpPolicy",
        runs.pendulum(),
        policy_kwargs={"net_arch": [4], "activation_fn": torch.nn.ELU},
        device="cpu",
    )
    with pytest.raises(InvalidInputError, match="adapter="):
        sac_actor(model, state_of(model.policy.state_dict()), None)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "other/1"},
        {"activation": "exec"},
        {"action_low": [1.0, 2.0]},
        {"action_high": None},
        {"clip_mean": "x"},
    ],
    ids=str,
)
def test_a_description_that_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    model = runs.model()
    tensors = state_of(model.policy.state_dict())
    said = sac_actor(model, tensors, None).describe()
    with pytest.raises(FormatError):
        policy.array_policy(tensors, {**said, **change}, None)


def test_layers_that_do_not_fit_together_are_refused() -> None:
    model = runs.model()
    tensors = state_of(model.policy.state_dict())
    said = sac_actor(model, tensors, None).describe()
    swapped = {**tensors, "actor.latent_pi.2.weight": tensors["actor.latent_pi.0.weight"]}
    with pytest.raises(FormatError, match="do not fit"):
        policy.array_policy(swapped, said, None)
    with pytest.raises(FormatError, match="cannot be built"):
        policy.array_policy({n: t for n, t in tensors.items() if "bias" not in n}, said, None)


def test_the_adapter_and_the_verifier_need_neither_torch_nor_sb3(made: Path) -> None:
    code = (
        "import sys\n"
        "for n in ('torch', 'stable_baselines3', 'gymnasium', 'pickle5'): sys.modules[n] = None\n"
        "from castore_receipts import verify_all, ArrayPolicy\n"
        f"found = list(verify_all([{str(made)!r}, {str(made / '.castore')!r}]))\n"
        "assert len(found) == 8 and all(r.sound for r in found), found\n"
        "from castore_receipts.replaying import stored_policy\n"
        "from castore_receipts.sources import sources\n"
        "from castore_receipts.subject import Subject\n"
        f"s = Subject.read(sources({str(runs.folder(made, 20))!r})[0][0])\n"
        "print(stored_policy(s).act(__import__('numpy').zeros(3)).shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "(1,)\n", done.stderr


def test_importing_the_package_is_cheap() -> None:
    code = (
        "import sys, castore_receipts, castore_receipts.cli\n"
        "print(*{n.split('.')[0] for n in sys.modules})"
    )
    shown = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert not {"torch", "numpy", "stable_baselines3", "gymnasium", "matplotlib"} & set(shown)
