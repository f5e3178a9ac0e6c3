"""Adapters of one's own: another algorithm's receipts verify and resume like SAC's."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3 import PPO

from castore import InvalidInputError
from castore_receipts import verify_all, verify_receipt
from castore_receipts.adapters import sac_actor
from castore_receipts.arrays import Array, Tensor
from tests.drivers.receipts import runs


class PPOActor:
    """PPO's deterministic actor, from the three methods that the guide asks for."""

    def __init__(self, model: Any, tensors: Mapping[str, Tensor], _: object):
        own = ("mlp_extractor.policy_net", "action_net")
        self._held = {n: t for n, t in tensors.items() if n.startswith(own)}
        self._space = model.action_space

    def act(self, observation: Array) -> Array:
        x = np.asarray(observation, np.float32)
        for layer in ("mlp_extractor.policy_net.0", "mlp_extractor.policy_net.2", "action_net"):
            weight, bias = (self._held[f"{layer}.{p}"].numpy() for p in ("weight", "bias"))
            x = x @ weight.T + bias
            x = x if layer == "action_net" else np.tanh(x)
        action: Array = np.clip(x, self._space.low, self._space.high)
        return action

    def tensors(self) -> Mapping[str, Tensor]:
        return self._held

    def describe(self) -> dict[str, Any]:
        return {"kind": "ppo-actor/1"}


def ppo(seed: int) -> PPO:
    torch.set_num_threads(1)
    given: dict[str, Any] = {"n_steps": 16, "batch_size": 8, "n_epochs": 2, "device": "cpu"}
    return PPO("MlpPolicy", runs.pendulum(), seed=seed, **given)


def test_ppo_with_an_adapter_is_verified_and_resumed_to_the_same_bits(tmp_path: Path) -> None:
    whole = ppo(1)
    first = runs.callback(tmp_path / "run", adapter=PPOActor)
    whole.learn(64, callback=first)
    assert [r["step"] for r in first.history] == [32, 48, 64]
    assert first.history[0]["adapter"]["arrays"] == sorted(
        n for n in whole.policy.state_dict() if n.startswith(("mlp_extractor.policy", "action_n"))
    )
    for step in (32, 48):
        again, into = ppo(9), tmp_path / f"from_{step}"
        more: dict[str, Any] = {"environment": runs.pendulum, "into": into, "adapter": PPOActor}
        callback = runs.resumed(again, tmp_path / "run", step, **more)
        again.learn(64 - step, callback=callback, reset_num_timesteps=False)
        theirs, ours = runs.weights(whole), runs.weights(again)
        assert all(torch.equal(theirs[n], ours[n]) for n in theirs)
    assert all(r.sound for r in verify_all([tmp_path / "run", tmp_path / "from_32"]))


class Renamed:
    """An adapter whose arrays are not the stored ones: their digest could not be recomputed."""

    def __init__(self, model: Any, tensors: Mapping[str, Tensor], normalizer: Any):
        self._inner = sac_actor(model, tensors, normalizer)

    def act(self, observation: Array) -> Array:
        return self._inner.act(observation)

    def tensors(self) -> Mapping[str, Tensor]:
        return {f"half.{n}": t for n, t in self._inner.tensors().items()}

    def describe(self) -> dict[str, Any]:
        return {"kind": "renamed/1"}


class Changed(Renamed):
    def tensors(self) -> Mapping[str, Tensor]:
        held = self._inner.tensors()
        return {n: Tensor(t.dtype, t.shape, bytes(t.nbytes)) for n, t in held.items()}


@pytest.mark.parametrize("adapter", [Renamed, Changed])
def test_an_adapter_of_arrays_that_are_not_stored_is_refused_before_training(
    tmp_path: Path, adapter: Any
) -> None:
    with pytest.raises(InvalidInputError, match="is not one of the policy's tensors"):
        runs.model().learn(40, callback=runs.callback(tmp_path / "run", adapter=adapter))
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_second_failure_at_one_step_is_recorded_and_the_run_goes_on(tmp_path: Path) -> None:
    """After a resumption the same step may fail in another way; the first file stays."""
    log = io.StringIO()
    made = runs.run(tmp_path / "run", 20, log=log)
    for text in ("a tensor", "another tensor"):
        made.journal.fail(40, InvalidInputError(text))
    assert [f["error"] for f in made.journal.failures] == ["a tensor", "another tensor"]
    assert '"a tensor"' in (tmp_path / "run/failures/step_0000040.json").read_text()
    kept = [n.key for n in made.destination.snapshots("failed.")]
    assert kept == ["failed.step_0000040"] * 2
    assert "another tensor" in log.getvalue()
    assert verify_receipt(runs.folder(tmp_path / "run", 20)).sound
