"""Receipts of a real run: SAC on HalfCheetah-v5, twenty checkpoints, to a local root and to S3.

    python benchmarks/receipts.py [--only local|waiting|resume|s3] [--steps 4000]

Prints one JSON line a finding: the callback's time beside evaluation and `safetensors.save_file`,
what the repository takes beside the plain folders, whether a resumed run is the same bits, and the
expansion from 17 to 23 observations. Begins with one batch, one update, one CPU worker.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from safetensors.torch import save_file
from stable_baselines3 import SAC

from castore import Draft, Repository, disk_file
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
        """Waiting for the publication before is part of what a checkpoint takes."""
        before = self.timings.seconds["evaluation"] or 0.0
        began = time.perf_counter()
        super()._take(phase)
        whole = time.perf_counter() - began
        evaluation = (self.timings.seconds["evaluation"] or 0.0) - before
        self.rows.append((whole, evaluation, self._plain()))

    def _plain(self) -> float:
        """What the document's own line takes: contiguous CPU tensors into one file."""
        with tempfile.TemporaryDirectory(dir=".") as at:
            began = time.perf_counter()
            state = self.model.policy.state_dict()
            tensors = {k: v.detach().cpu().contiguous() for k, v in state.items()}
            save_file(tensors, os.path.join(at, "policy.safetensors"))
            return time.perf_counter() - began


def train(
    place: str, options: Any, steps: int, background: bool = True, replay: bool = False
) -> tuple[SAC, Timed, float]:
    """Twenty receipts of one run, and how long the run took."""
    made = Timed(
        place,
        cheetah,
        every=steps // RECEIPTS,
        validation_seeds=SEEDS,
        final_seeds=FINAL,
        storage_options=options,
        replay_buffer=replay,
        background=background,
        log=io.StringIO(),
    )
    agent = model(1)
    began = time.perf_counter()
    agent.learn(steps, callback=made)
    return agent, made, time.perf_counter() - began


def overhead(made: Timed, where: str, run: float) -> None:
    """Beyond evaluation and save_file, as a share of those two."""
    rows = made.rows[1:]  # the first one pays for what is loaded once
    shares = [(whole - inner - plain) / (inner + plain) for whole, inner, plain in rows]
    tell(
        "callback",
        where=where,
        checkpoints=len(made.rows),
        seconds=round(statistics.median(r[0] for r in rows), 4),
        evaluation=round(statistics.median(r[1] for r in rows), 4),
        save_file=round(statistics.median(r[2] for r in rows), 4),
        beyond=round(statistics.median(shares), 4),
        worst=round(max(shares), 4),
        run=round(run, 2),
    )


def space(place: str, made: Timed, root: str) -> None:
    """The three documented files of each receipt: in a repository, and as plain folders.

    ``trained`` counts those after the warm-up alone, whose weights all differ.
    """
    folders = sorted(Path(place, "checkpoints").iterdir())
    trained = [f for f in folders if int(f.name[5:]) > SETTINGS["learning_starts"]]
    for what, some in (("all", folders), ("trained", trained)):
        plain = sum(f.stat().st_size for at in some for f in at.iterdir())
        weights = sum((at / "policy.safetensors").stat().st_size for at in some)
        kept = stored(committed(some, f"{root}/lean-{what}"))
        share = round(kept / plain, 4)
        tell("space", of=what, receipts=len(some), plain=plain, weights=weights, share=share)
    state = sum(s["bytes"] for r in made.history for s in r["state"].values())
    tell("space with training state", state=state, repository=stored(f"{place}/.castore"))


def committed(folders: list[Path], url: str) -> str:
    """A repository of these folders and nothing else."""
    lean = Repository.init(url)
    earlier: tuple[str, str] | None = None
    for at in folders:
        entries = {f"checkpoints/{at.name}/{f.name}": disk_file(f) for f in at.iterdir()}
        base = {p: f"{earlier[0]}:{p.replace(at.name, earlier[1])}" for p in entries if earlier}
        done = lean.commit(Draft(entries, driver="receipts", base=base), namespace="x")
        earlier = (str(done.name), at.name)
    return url


def stored(url: str) -> int:
    return sum(f.stat().st_size for f in Path(url).rglob("*") if f.is_file())


def equal(a: SAC, b: SAC) -> bool:
    ours, theirs = a.policy.state_dict(), b.policy.state_dict()
    return all(torch.equal(ours[n], theirs[n]) for n in ours)


def start() -> None:
    """One batch, one update."""
    agent = model(1)
    agent.learn(SETTINGS["learning_starts"] + 1)
    tell("start", batch=SETTINGS["batch_size"], updates=agent._n_updates, threads=1)


def go_on(steps: int, root: str) -> None:
    """Resume from the middle, to the same bits as the run that never stopped."""
    place, middle = os.path.join(root, "kept"), steps // 2
    whole, _, _ = train(place, None, steps, replay=True)
    agent = model(77)
    into = os.path.join(root, "resumed")
    made = resume(agent, place, middle, environment=cheetah, into=into, log=io.StringIO())
    agent.learn(steps - middle, callback=made, reset_num_timesteps=False)
    tell(
        "resumed",
        at=middle,
        to=agent.num_timesteps,
        same_bits=equal(whole, agent),
        receipts=len(made.history),
        replay_bytes=sum(r["state"]["replay.safetensors"]["bytes"] for r in made.history),
        repository=stored(f"{place}/.castore"),
    )


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


def local(steps: int, root: str) -> None:
    place = os.path.join(root, "run")
    _, made, run = train(place, None, steps)
    overhead(made, "local", run)
    audit(place, None)
    space(place, made, root)
    sensors(place, None, steps, root)


def waiting(steps: int, root: str) -> None:
    _, plain, run = train(os.path.join(root, "waiting"), None, steps, background=False)
    overhead(plain, "local, background=False", run)


def far(steps: int) -> None:
    from castore.testing.s3server import S3Server

    running = S3Server(bucket="bench", backend="seaweedfs")
    running.start()
    try:
        place, options = "s3://bench/run", running.fsspec_options()
        _, made, run = train(place, options, steps)
        overhead(made, "s3", run)
        audit(place, options)
        audit(f"{place}/.castore", options)
    finally:
        running.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--only", choices=["local", "waiting", "resume", "s3"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="receipts-") as root:
        os.chdir(root)
        start()
        if options.only in (None, "local"):
            local(options.steps, root)
        if options.only in (None, "waiting"):
            waiting(options.steps, root)
        if options.only in (None, "resume"):
            go_on(options.steps, root)
        if options.only in (None, "s3"):
            far(options.steps)
        os.chdir("/")


def audit(place: str, options: Any) -> None:
    began = time.perf_counter()
    found = list(verify_all([place], storage_options=options))
    seconds = time.perf_counter() - began
    tell("audit", receipts=len(found), sound=all(r.sound for r in found), seconds=round(seconds, 2))


if __name__ == "__main__":
    main()
