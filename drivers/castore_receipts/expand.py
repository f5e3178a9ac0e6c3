"""Function-preserving expansion of a SAC policy's observations by added sensors.

    actor   W+ = [W 0]                 critics   W+ = [W_obs 0 W_action]

A critic's action columns move past the new observation columns. Layers are told by their names:
an old critic and a new actor may be equally wide. What is preserved is the function at the instant
of expansion; new columns may move at the first update.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from castore import InvalidInputError
from castore_receipts.arrays import Array, Tensor, read_safetensors, tensor, write_safetensors
from castore_receipts.buffer import state_in
from castore_receipts.policy import actor_names
from castore_receipts.training import FRESH

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm
    from stable_baselines3.common.vec_env import VecEnv

_CRITIC = re.compile(r"(critic|critic_target)\.qf\d+\.0\.weight")


@dataclass(frozen=True, slots=True)
class Widths:
    """What the layers say: observations, actions, and the names of the first layers."""

    observation: int
    action: int
    actor: str
    critics: tuple[str, ...]


def widths(tensors: Mapping[str, Tensor]) -> Widths:
    """The widths of a SAC policy.

    Raises
    ------
    InvalidInputError
        Not a fully connected SAC policy with hidden layers, or layers that do not fit together.
    """
    hidden, mean = actor_names(list(tensors))
    critics = tuple(sorted(n for n in tensors if _CRITIC.fullmatch(n)))
    if not hidden or not critics:
        raise InvalidInputError(
            "expansion needs a SAC actor and critics with a hidden layer each: found"
            f" {len(hidden)} hidden layers of the actor and {len(critics)} critics"
        )
    actor = f"{hidden[0]}.weight"
    observation, action = tensors[actor].shape[-1], tensors[f"{mean}.weight"].shape[0]
    for name in critics:
        if tensors[name].shape[-1] != observation + action:
            raise InvalidInputError(
                f"{name} takes {tensors[name].shape[-1]} numbers, expected {observation}"
                f" observations and {action} actions"
            )
    return Widths(observation, action, actor, critics)


def expand_tensors(tensors: Mapping[str, Tensor], added: int) -> dict[str, Tensor]:
    """The tensors for ``added`` more observations, new columns zero; the rest is the same."""
    if added < 1:
        raise InvalidInputError(f"added={added}: expected at least one sensor")
    w = widths(tensors)
    first = {w.actor, *w.critics}
    return {n: _widened(t, w, added) if n in first else t for n, t in tensors.items()}


def _widened(t: Tensor, w: Widths, added: int) -> Tensor:
    """Zeros after the observation columns, before any action columns."""
    array = t.numpy()
    zeros = np.zeros((array.shape[0], added), array.dtype)
    parts = [array[:, : w.observation], zeros, array[:, w.observation :]]
    return tensor(np.concatenate(parts, axis=1), "first layer")


def expand_training(data: bytes, w: Widths, added: int, moments: str) -> bytes:
    """The training state for the expanded policy; environments and observations are left out.

    Parameters
    ----------
    moments : {"map", "reset"}
        Optimizer moments move as the weights do, new columns zero; or all of them are forgotten.
    """
    if moments not in ("map", "reset"):
        raise InvalidInputError(f"moments={moments!r}: expected 'map' or 'reset'")
    file = read_safetensors(data, "training state")
    state = state_in(file, "training state")
    gone = ("environment/", "last/", "gsde/", "action_noise/")
    tensors = {n: t for n, t in file.tensors.items() if not n.startswith(gone)}
    first = {w.actor, *w.critics}
    for name, optimizer in state["optimizers"].items():
        if moments == "reset":
            optimizer["state"] = {}
            tensors = {n: t for n, t in tensors.items() if not n.startswith(f"optimizer/{name}/")}
            continue
        for index, entries in optimizer["state"].items():
            if optimizer["parameters"][int(index)] in first:
                tensors |= _moments(entries, tensors, w, added)
    state |= {"phase": FRESH, "environment": {}, "noise": {"gsde": [], "action": None}}
    state["last"] = dict.fromkeys(state["last"])
    return write_safetensors(tensors, json.dumps(state, sort_keys=True, allow_nan=False))


def _moments(
    entries: Mapping[str, Any], tensors: Mapping[str, Tensor], w: Widths, added: int
) -> dict[str, Tensor]:
    held = [v["tensor"] for v in entries.values() if isinstance(v, dict) and "tensor" in v]
    return {n: _widened(tensors[n], w, added) for n in held if len(tensors[n].shape) == 2}


def expand_normalizer(data: bytes, added: int) -> bytes:
    """A normaliser's statistics with mean 0 and variance 1 for the new sensors."""
    file = read_safetensors(data, "normalizer")
    tensors = dict(file.tensors)
    for name, fill in (("obs_mean", 0.0), ("obs_var", 1.0)):
        if name in tensors:
            old: Array = tensors[name].numpy()
            tensors[name] = tensor(np.concatenate([old, np.full(added, fill)]), name)
    return write_safetensors(tensors, file.metadata.get("castore"))


@overload
def expand_observation(
    model_or_tensors: Mapping[str, Tensor],
    added: int = 6,
    *,
    moments: str = "map",
    env: None = None,
) -> dict[str, Tensor]: ...


@overload
def expand_observation(
    model_or_tensors: BaseAlgorithm,
    added: int = 6,
    *,
    moments: str = "map",
    env: VecEnv | None = None,
) -> BaseAlgorithm: ...


def expand_observation(
    model_or_tensors: Mapping[str, Tensor] | BaseAlgorithm,
    added: int = 6,
    *,
    moments: str = "map",
    env: VecEnv | None = None,
) -> dict[str, Tensor] | BaseAlgorithm:
    """A SAC policy that sees ``added`` more sensors and computes the same, at this instant.

    Parameters
    ----------
    model_or_tensors : model, or mapping of name to Tensor
        What is given is not changed. A model comes back as a new model with a rebuilt observation
        space, an empty replay buffer, and the environment ``env``, if any.
    moments : {"map", "reset"}
        What becomes of optimizer moments (of a model).

    Raises
    ------
    InvalidInputError
        No fully connected SAC policy, or an environment of another width.
    """
    if isinstance(model_or_tensors, Mapping):
        return expand_tensors(model_or_tensors, added)
    from castore_receipts.grow import grown

    return grown(model_or_tensors, added, moments, env)
