"""Small real runs: Stable-Baselines3's SAC on gymnasium's Pendulum, episodes of 20 steps."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from castore_receipts import documents
from castore_receipts.callback import ReceiptCallback
from castore_receipts.destination import RECEIPT

SEEDS, FINAL = [101, 102], [900]


def pendulum() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("Pendulum-v1", max_episode_steps=20)


def model(seed: int = 1, env: Any = None, **settings: Any) -> SAC:
    """A small SAC with everything the document names turned on: gSDE, warm-up, learned entropy."""
    torch.set_num_threads(1)
    given: dict[str, Any] = {
        "learning_starts": 20,
        "batch_size": 8,
        "buffer_size": 500,
        "use_sde": True,
        "sde_sample_freq": 4,
        "use_sde_at_warmup": True,
        "ent_coef": "auto_0.01",
        "policy_kwargs": {"net_arch": [16, 16]},
        "device": "cpu",
        **settings,
    }
    return SAC("MlpPolicy", env if env is not None else pendulum(), seed=seed, **given)


def normalized() -> VecNormalize:
    return VecNormalize(DummyVecEnv([pendulum]))


def callback(destination: Path | str, **more: Any) -> ReceiptCallback:
    given: dict[str, Any] = {
        "every": 20,
        "validation_seeds": SEEDS,
        "final_seeds": FINAL,
        "log": io.StringIO(),
        **more,
    }
    return ReceiptCallback(destination, given.pop("environment", pendulum), **given)


def run(destination: Path | str, steps: int = 60, seed: int = 1, **more: Any) -> ReceiptCallback:
    """Train, with receipts at 20, 40, ... steps."""
    made = callback(destination, **more)
    model(seed).learn(steps, callback=made)
    return made


def weights(policy: Any) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in policy.policy.state_dict().items()}


def equal(a: Any, b: Any) -> bool:
    """Whether two models hold the same bits: policy, targets, optimizers, entropy coefficient."""
    ours, theirs = weights(a), weights(b)
    same = ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    for x, y in ((a.actor, b.actor), (a.critic, b.critic)):
        same = same and _equal_optimizers(x.optimizer, y.optimizer)
    same = same and _equal_optimizers(a.ent_coef_optimizer, b.ent_coef_optimizer)
    return bool(same and torch.equal(a.log_ent_coef, b.log_ent_coef))


def _equal_optimizers(a: Any, b: Any) -> bool:
    x, y = a.state_dict()["state"], b.state_dict()["state"]
    return x.keys() == y.keys() and all(
        torch.equal(x[i][k], y[i][k]) for i in x for k in ("step", "exp_avg", "exp_avg_sq")
    )


def folder(root: Path, step: int) -> Path:
    return root / "checkpoints" / f"step_{step:07d}"


def read(at: Path) -> dict[str, Any]:
    receipt: dict[str, Any] = json.loads((at / RECEIPT).read_bytes())
    return receipt


def forge(at: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a receipt and seal it again, as somebody would who knows the layout."""
    receipt = read(at)
    change(receipt)
    body = {k: v for k, v in receipt.items() if k not in documents.SEALS}
    (at / RECEIPT).write_bytes(documents.encode(documents.seal(body)))


def foreign(at: Path, source: Path, **more: Any) -> Path:
    """The folder of another program after the same document: its fields and no other."""
    shutil.copytree(source, at)
    ours = read(source)
    names = ("step", "updates", "seconds", "policy_array_bytes", "checkpoint_sha256")
    receipt = {n: ours[n] for n in (*names, "mean_return")}
    receipt |= {"policy_digest": "sha1:0123", "world_model_immutable": True}
    receipt |= {"mps_driver_bytes": 123456, **more}
    (at / RECEIPT).write_text(json.dumps(receipt, indent=2))
    return at


def problems(report: Any) -> Mapping[str, str]:
    return {link.name: link.verdict for link in report.problems}


def resumed(onto: Any, destination: Path | str, step: int, **more: Any) -> ReceiptCallback:
    """A callback that goes on from a receipt, quietly."""
    from castore_receipts.resuming import resume

    return resume(onto, destination, step, log=io.StringIO(), **more)
