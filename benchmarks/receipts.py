"""Receipts of a real run: SAC on HalfCheetah-v5, twenty checkpoints, to a local root and to S3.

    python benchmarks/receipts.py --s3

Prints one JSON line a finding: the callback's time beside evaluation and `safetensors.save_file`,
what the repository takes beside the plain folders, whether a resumed run is the same bits, and the
expansion from 17 to 23 observations. Begins with one batch, one update, one CPU worker.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from safetensors.torch import save_file
from stable_baselines3 import SAC

from castore import Repository
from castore_receipts import expand_receipt, verify_all, verify_receipt
from castore_receipts.callback import ReceiptCallback
from castore_receipts.resuming import resume

RECEIPTS = 20
SEEDS, FINAL = [101, 102, 103, 104, 105], [901, 902]
SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-4,
    "buffer_size": 100_000,
    "batch_size": 256,
    "learning_starts": 1_000,
    "gamma": 0.99,
    "tau": 0.005,
    "train_freq": 1,
    "gradient_steps": 1,
    "ent_coef": "auto_0.01",
    "use_sde": True,
    "sde_sample_freq": 4,
    "use_sde_at_warmup": True,
    "policy_kwargs": {"net_arch": [256, 256]},
    "device": "cpu",
}


class JointForces(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Six sensors more: the force of each of the cheetah's actuators, 17 numbers become 23."""

    def __init__(self, env: gymnasium.Env[Any, Any]):
        super().__init__(env)
        self.observation_space = Box(-np.inf, np.inf, (23,), np.float64)

    def observation(self, observation: Any) -> Any:
        data: Any = self.unwrapped
        return np.concatenate([observation, data.data.actuator_force])


def cheetah() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("HalfCheetah-v5")


def cheetah_with_sensors() -> gymnasium.Env[Any, Any]:
    return JointForces(cheetah())


def model(seed: int, env: Any = None) -> SAC:
    return SAC("MlpPolicy", env if env is not None else cheetah(), seed=seed, **SETTINGS)


def tell(what: str, **found: Any) -> None:
    print(json.dumps({"what": what, **found}), flush=True)


class Timed(ReceiptCallback):
    """The callback, with a clock around each checkpoint and a plain `save_file` beside it."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self.rows: list[tuple[float, float, float]] = []

    def _take(self, phase: str) -> None:
        before = self.timings.seconds["evaluation"] or 0.0
        began = time.perf_counter()
        super()._take(phase)
        whole = time.perf_counter() - began
        evaluation = (self.timings.seconds["evaluation"] or 0.0) - before
        self.rows.append((whole, evaluation, self._plain()))

    def _plain(self) -> float:
        """What the document's own line takes: contiguous CPU tensors into one file."""
        with tempfile.TemporaryDirectory(dir=os.path.dirname(self.destination.repository.url)
                                         if self.destination.backend.kind == "local" else None) as at:
            began = time.perf_counter()
            state = self.model.policy.state_dict()
            tensors = {k: v.detach().cpu().contiguous() for k, v in state.items()}
            save_file(tensors, os.path.join(at, "policy.safetensors"))
            return time.perf_counter() - began


def train(place: str, options: Any, steps: int) -> tuple[SAC, Timed]:
    """Twenty receipts of one run."""
    made = Timed(
        place,
        cheetah,
        every=steps // RECEIPTS,
        validation_seeds=SEEDS,
        final_seeds=FINAL,
        storage_options=options,
        replay_buffer=False,
        log=io.StringIO(),
    )
    agent = model(1)
    agent.learn(steps, callback=made)
    return agent, made


def overhead(made: Timed, where: str) -> None:
    """Beyond evaluation and save_file, as a share of those two."""
    rows = made.rows[1:]  # the first one pays for what is loaded once
    shares = [(whole - evaluation - plain) / (evaluation + plain) for whole, evaluation, plain in rows]
    tell(
        "callback",
        where=where,
        checkpoints=len(made.rows),
        seconds=round(statistics.median(r[0] for r in rows), 4),
        evaluation=round(statistics.median(r[1] for r in rows), 4),
        save_file=round(statistics.median(r[2] for r in rows), 4),
        beyond=round(statistics.median(shares), 4),
    )


def space(place: str, made: Timed) -> None:
    """What the repository takes for the three documented files, beside the folders themselves."""
    plain = sum(f.stat().st_size for f in Path(place, "checkpoints").rglob("*") if f.is_file())
    lean = Repository.init(tempfile.mkdtemp(dir=os.path.dirname(place)) + "/store")
    from castore import Draft, disk_file

    base = None
    for at in sorted(Path(place, "checkpoints").iterdir()):
        entries = {f"checkpoints/{at.name}/{f.name}": disk_file(f) for f in at.iterdir()}
        bases = {} if base is None else {
            p: f"{base[0]}:{p.replace(at.name, base[1])}" for p in entries
        }
        done = lean.commit(Draft(entries, driver="receipts", base=bases), namespace="x")
        base = (str(done.name), at.name)
    tell(
        "space",
        plain=plain,
        repository=stored(lean.url),
        share=round(stored(lean.url) / plain, 4),
        with_training_state=stored(f"{place}/.castore"),
        training_state=sum(s["bytes"] for r in made.history for s in r["state"].values()),
    )


def stored(url: str) -> int:
    return sum(f.stat().st_size for f in Path(url).rglob("*") if f.is_file())


def equal(a: SAC, b: SAC) -> bool:
    ours, theirs = a.policy.state_dict(), b.policy.state_dict()
    return all(torch.equal(ours[n], theirs[n]) for n in ours)


def start(root: str) -> None:
    """One batch, one update."""
    agent = model(1)
    agent.learn(SETTINGS["learning_starts"] + 1)
    tell("start", batch=SETTINGS["batch_size"], updates=agent._n_updates, threads=1)


def go_on(place: str, options: Any, steps: int, whole: SAC, root: str) -> None:
    """Resume from the middle, to the same bits as the run that never stopped."""
    middle = steps // 2
    agent = model(77)
    made = resume(
        agent,
        place,
        middle,
        environment=cheetah,
        into=os.path.join(root, "resumed"),
        storage_options=options,
        log=io.StringIO(),
    )
    tell("resumed", step=agent.num_timesteps, updates=agent._n_updates, replay="not stored")
    del made, whole


def sensors(place: str, options: Any, steps: int, root: str) -> None:
    """17 to 23 observations: the new receipt, and training that goes on with real sensors."""
    into = os.path.join(root, "wide")
    receipt, found = expand_receipt(
        place, steps // 2, into, 6, environment=cheetah_with_sensors, storage_options=options
    )
    tell(
        "expansion",
        sound=found.sound,
        grown=receipt["expansion"]["grown"],
        added=sum(receipt["expansion"]["grown"].values()),
        parameters=receipt["expansion"]["parameters"],
        verdict=verify_receipt(f"{into}/checkpoints/step_{steps // 2:07d}").verdict,
    )


@contextlib.contextmanager
def server(wanted: bool) -> Iterator[tuple[str, Any] | None]:
    if not wanted:
        yield None
        return
    from castore.testing.s3server import S3Server

    running = S3Server(bucket="bench", backend="seaweedfs")
    running.start()
    try:
        yield "s3://bench/run", running.fsspec_options()
    finally:
        running.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--s3", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="receipts-") as root, server(options.s3) as remote:
        os.chdir(root)
        start(root)
        place = os.path.join(root, "run")
        agent, made = train(place, None, options.steps)
        overhead(made, "local")
        audit(place, None)
        space(place, made)
        go_on(place, None, options.steps, agent, root)
        sensors(place, None, options.steps, root)
        if remote is not None:
            _, far = train(remote[0], remote[1], options.steps)
            overhead(far, "s3")
            audit(remote[0], remote[1])


def audit(place: str, options: Any) -> None:
    began = time.perf_counter()
    found = list(verify_all([place], storage_options=options))
    seconds = time.perf_counter() - began
    tell("audit", receipts=len(found), sound=all(r.sound for r in found), seconds=round(seconds, 2))


if __name__ == "__main__":
    main()
