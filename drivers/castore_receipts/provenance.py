"""Where a run came from: versions, source revision, hyper-parameters, environment."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from castore import InvalidInputError

if TYPE_CHECKING:
    import gymnasium
    from stable_baselines3.common.base_class import BaseAlgorithm

_PACKAGES = ("castore", "numpy", "torch", "stable-baselines3", "gymnasium", "safetensors", "mujoco")
_SETTINGS = (
    *("learning_rate", "buffer_size", "learning_starts", "batch_size", "tau", "gamma"),
    *("gradient_steps", "ent_coef", "target_update_interval", "target_entropy", "use_sde"),
    *("sde_sample_freq", "use_sde_at_warmup", "n_steps", "n_epochs", "gae_lambda", "clip_range"),
    *("vf_coef", "max_grad_norm", "policy_delay", "optimize_memory_usage", "n_envs"),
)
_GIT_SECONDS = 20


def versions() -> dict[str, str | None]:
    """Resolved versions of Python and of the frameworks; None for one that is not installed."""
    return {"python": platform.python_version(), **{p: _version(p) for p in _PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine() -> dict[str, str]:
    """What decides how floating-point results may differ."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": platform.processor(),
        "byteorder": sys.byteorder,
    }


def source_revision(source: str | os.PathLike[str] | None) -> dict[str, Any]:
    """The git commit of the folder or file ``source`` and whether its tree is changed.

    Without git: a SHA-256 over its Python files. ``source`` defaults to the folder of the program
    that runs, or the current one.
    """
    place = Path(os.fspath(source)) if source is not None else _program()
    if not place.exists():
        raise InvalidInputError(f"source {place} is not there: name the run's program or folder")
    folder = place if place.is_dir() else place.parent
    commit = _git(folder, "rev-parse", "HEAD")
    status = _git(folder, "status", "--porcelain") if commit is not None else None
    if commit is not None and status is not None:
        return {"kind": "git", "commit": commit.strip(), "dirty": bool(status.strip())}
    return {"kind": "files", **_hash_files(place)}


def _program() -> Path:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(main) if main and Path(main).exists() else Path.cwd()


def _git(folder: Path, *words: str) -> str | None:
    """What git says, or None where it is not installed or this is no checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _hash_files(place: Path) -> dict[str, Any]:
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    sha = hashlib.sha256()
    for file in files:
        name = file.relative_to(place).as_posix() if file != place else file.name
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        sha.update(f"{name}\t{content}\n".encode(errors="surrogatepass"))
    return {"sha256": sha.hexdigest(), "files": len(files)}


def hyperparameters(model: Any) -> dict[str, Any]:
    """The algorithm's settings as plain JSON; a schedule or class stands by its name."""
    found = {name: getattr(model, name) for name in _SETTINGS if hasattr(model, name)}
    train_freq = getattr(model, "train_freq", None)
    if train_freq is not None:
        found["train_freq"] = _frequency(train_freq)
    found["policy_kwargs"] = dict(getattr(model, "policy_kwargs", None) or {})
    found["algorithm"] = type(model).__name__
    found["policy"] = type(model.policy).__name__
    return {name: told(value) for name, value in found.items()}


def _frequency(value: Any) -> Any:
    unit = getattr(value, "unit", None)
    return {"every": value.frequency, "unit": unit.value} if unit is not None else value


def told(value: Any) -> Any:
    """``value`` as JSON can say it; what it cannot by the name of its class or function."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if np.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): told(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [told(v) for v in value]
    name = value if hasattr(value, "__qualname__") else type(value)
    return f"{name.__module__}.{name.__qualname__}"


def environment_of(env: Any) -> dict[str, Any]:
    """The validation environment: registered id and arguments where there are, and shapes."""
    spec = env.spec
    return {
        "id": spec.id if spec is not None else None,
        "arguments": told(dict(spec.kwargs)) if spec is not None else {},
        "max_episode_steps": spec.max_episode_steps if spec is not None else None,
        "wrappers": [w.name for w in spec.additional_wrappers] if spec is not None else [],
        "class": told(env.unwrapped),
        "observation_shape": list(env.observation_space.shape),
        "action_shape": list(env.action_space.shape),
    }


def facts_of_run(
    model: BaseAlgorithm, env: gymnasium.Env[Any, Any], source: str | os.PathLike[str] | None
) -> dict[str, Any]:
    """What does not change during a run: versions, machine, settings, shapes, revision."""
    import torch

    first = next(iter(model.policy.parameters()))
    return {
        "versions": versions(),
        "machine": machine(),
        "backend": model.device.type,
        "threads": torch.get_num_threads(),
        "dtype": str(first.dtype).removeprefix("torch."),
        "seed": model.seed,
        "environment": environment_of(env),
        "environments": model.n_envs,
        "input_shapes": {
            "observation": list(model.observation_space.shape or ()),
            "action": list(model.action_space.shape or ()),
        },
        "batch_size": getattr(model, "batch_size", None),
        "source": source_revision(source),
        "hyperparameters": hyperparameters(model),
    }


def check_shapes(model: BaseAlgorithm, env: gymnasium.Env[Any, Any]) -> None:
    """`InvalidInputError` where validation would show the policy arrays of another shape."""
    for what in ("observation_space", "action_space"):
        own, given = getattr(model, what).shape, getattr(env, what).shape
        if own != given:
            raise InvalidInputError(
                f"the validation environment's {what} has shape {given}, the policy was made"
                f" for {own}: wrap it as the training environment (frame stack, say)"
            )
