"""Everything beside the policy that training needs to go on bit-identically, and putting it back.

Kept as one safetensors file (arrays) whose metadata holds the rest as JSON. The replay buffer is
a file of its own (`castore_receipts.buffer`).
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from castore import InvalidInputError
from castore_receipts.arrays import Tensor, read_safetensors, tensor, write_safetensors
from castore_receipts.buffer import FORMAT, state_in
from castore_receipts.streams import (
    Pack,
    attributes,
    generator,
    get,
    global_streams,
    set_attributes,
    set_global_streams,
)
from castore_receipts.tensors import from_torch, to_torch

if TYPE_CHECKING:
    import torch
    from stable_baselines3.common.base_class import BaseAlgorithm

_COUNTERS = ("num_timesteps", "_n_updates", "_episode_num", "_total_timesteps")
FRESH = "fresh"
"""The phase of a state without environments: training goes on from their first observation."""

_LAST = ("_last_obs", "_last_original_obs", "_last_episode_starts")
_NOISE = ("exploration_mat", "exploration_matrices")


def optimizers(model: BaseAlgorithm) -> dict[str, torch.optim.Optimizer]:
    """Every optimizer of the algorithm by name: actor's, critic's and entropy's for SAC."""
    found = {
        "policy": getattr(model.policy, "optimizer", None),
        "actor": getattr(getattr(model.policy, "actor", None), "optimizer", None),
        "critic": getattr(getattr(model.policy, "critic", None), "optimizer", None),
        "ent_coef": getattr(model, "ent_coef_optimizer", None),
    }
    return {name: o for name, o in found.items() if o is not None}


# -- capture


def capture(model: BaseAlgorithm, phase: str) -> bytes:
    """The training state as bytes; ``phase`` says where in the loop it was taken.

    ``rollout`` at the start of a rollout, ``end`` after training, `FRESH` where another callback
    ended it within a step: the observation and the environments are then a step apart, and
    training goes on with new episodes. Nothing of the model changes.
    """
    pack = Pack()
    last = {n: None if phase == FRESH else getattr(model, n, None) for n in _LAST}
    state = {
        "format": FORMAT,
        "algorithm": type(model).__name__,
        "phase": phase,
        "counters": {n: getattr(model, n, None) for n in _COUNTERS},
        "progress": float(getattr(model, "_current_progress_remaining", 1.0)),
        "optimizers": {
            n: {**_optimizer(o, n, pack), "parameters": _names(model, o)}
            for n, o in optimizers(model).items()
        },
        "streams": global_streams(pack),
        "spaces": _spaces(model, pack),
        "last": {n: pack.put(_plain_copy(v), f"last/{n}") for n, v in last.items()},
        "episodes": [_episode(e, pack) for e in model.ep_info_buffer or ()],
        "environment": {} if phase == FRESH else _environment(model, pack),
        "noise": _noise(model, pack),
    }
    log_ent_coef = getattr(model, "log_ent_coef", None)
    if log_ent_coef is not None:
        pack.tensors["log_ent_coef"] = from_torch(log_ent_coef, "log_ent_coef")
    return write_safetensors(pack.tensors, json.dumps(state, sort_keys=True, allow_nan=False))


def _plain_copy(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _episode(info: Mapping[str, Any], pack: Pack) -> dict[str, Any]:
    """Numbers of one episode; a return may be no finite one, whatever the policy is."""
    numbers = {k: v for k, v in info.items() if isinstance(v, int | float | np.number)}
    return {k: pack.put(float(v), f"episode/{k}") for k, v in numbers.items()}


def _optimizer(optimizer: torch.optim.Optimizer, name: str, pack: Pack) -> dict[str, Any]:
    import torch

    held = optimizer.state_dict()
    slots: dict[str, dict[str, Any]] = {}
    for index, entries in held["state"].items():
        slots[str(index)] = {}
        for key, value in entries.items():
            at = f"optimizer/{name}/{index}/{key}"
            if isinstance(value, torch.Tensor):
                pack.tensors[at] = from_torch(value, at)
                slots[str(index)][key] = {"tensor": at}
            else:
                slots[str(index)][key] = pack.put(value, at)
    groups = [
        {k: pack.put(v, f"optimizer/{name}/group/{i}/{k}") for k, v in group.items()}
        for i, group in enumerate(held["param_groups"])
    ]
    return {"state": slots, "groups": groups}


def _names(model: BaseAlgorithm, optimizer: torch.optim.Optimizer) -> list[str | None]:
    """The names of an optimizer's parameters in the policy, in its order."""
    names = {id(p): n for n, p in model.policy.named_parameters()}
    return [names.get(id(p)) for group in optimizer.param_groups for p in group["params"]]


def _spaces(model: BaseAlgorithm, pack: Pack) -> dict[str, Any]:
    found = {}
    for name in ("action_space", "observation_space"):
        stream = getattr(getattr(model, name), "_np_random", None)
        found[name] = None if stream is None else pack.put(stream, name)
    return found


def _noise(model: BaseAlgorithm, pack: Pack) -> dict[str, Any]:
    """gSDE's exploration matrices and the state of action noise."""
    import torch

    found: dict[str, Any] = {"gsde": []}
    for name in _NOISE:
        value = getattr(_distribution(model), name, None)
        if isinstance(value, torch.Tensor):
            pack.tensors[f"gsde/{name}"] = from_torch(value, name)
            found["gsde"].append(name)
    noise = getattr(model, "action_noise", None)
    found["action"] = None if noise is None else attributes(noise, pack, "action_noise")
    return found


def _distribution(model: BaseAlgorithm) -> Any:
    actor = getattr(model.policy, "actor", model.policy)
    return getattr(actor, "action_dist", None)


def _layers(model: BaseAlgorithm) -> Iterator[tuple[str, Any]]:
    """Every object between the algorithm and the environments themselves, outermost first.

    Environments of other processes (``SubprocVecEnv``) cannot be reached.
    """
    layer: Any = model.env
    depth = 0
    while layer is not None:
        yield f"environment/vector/{depth}", layer
        inner = getattr(layer, "venv", None)
        if inner is None:
            break
        layer, depth = inner, depth + 1
    for i, env in enumerate(getattr(layer, "envs", ())):
        wrapped: Any = env
        level = 0
        while wrapped is not None:
            yield f"environment/{i}/{level}", wrapped
            wrapped, level = vars(wrapped).get("env"), level + 1


def reachable(model: BaseAlgorithm) -> bool:
    """Whether the training environments live in this process, so that their state can be kept."""
    return any(name.startswith("environment/0/") for name, _ in _layers(model))


def kept(model: BaseAlgorithm, phase: str) -> bool:
    """Whether a state taken at ``phase`` holds that of the environments."""
    return phase != FRESH and reachable(model)


def _environment(model: BaseAlgorithm, pack: Pack) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, layer in _layers(model):
        found[name] = {
            "class": type(layer).__qualname__,
            "attributes": attributes(layer, pack, name),
            "physics": _physics(layer, pack, name),
        }
    return found


def _physics(layer: Any, pack: Pack, name: str) -> bool:
    """MuJoCo's integration state: time, positions, velocities, controls, warm start."""
    model, data = vars(layer).get("model"), vars(layer).get("data")
    if not type(data).__module__.startswith("mujoco"):
        return False
    mujoco = import_module("mujoco")
    spec = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(model, spec))
    mujoco.mj_getState(model, data, state, spec)
    pack.tensors[f"{name}/physics"] = tensor(state, name)
    return True


# -- restore


class TrainingState:
    """What `capture` gave, read and ready to be put back into a model made alike."""

    def __init__(self, data: bytes):
        self._file = read_safetensors(data, "training state")
        self._held = state_in(self._file, "training state")

    def apply(self, model: BaseAlgorithm) -> None:
        """Optimizers, entropy coefficient, counters and last observations.

        Raises
        ------
        InvalidInputError
            The model is another algorithm, or its optimizers have other parameters.
        """
        held, tensors = self._held, self._file.tensors
        if held["algorithm"] != type(model).__name__:
            raise InvalidInputError(
                f"the state is of {held['algorithm']}, the model is a {type(model).__name__}"
            )
        own = optimizers(model)
        if own.keys() != held["optimizers"].keys():
            raise InvalidInputError(
                f"optimizers {sorted(own)}, the state has {sorted(held['optimizers'])}: make the"
                " model with the same settings"
            )
        if "log_ent_coef" in tensors:
            _copy_into(getattr(model, "log_ent_coef", None), tensors["log_ent_coef"])
        for name, optimizer in own.items():
            self._apply_optimizer(optimizer, held["optimizers"][name], name)
        for name, value in held["counters"].items():
            if value is not None:
                setattr(model, name, value)
        model._current_progress_remaining = held["progress"]
        for name in _LAST:
            if hasattr(model, name):
                setattr(model, name, get(held["last"][name], tensors))
        self._episodes(model)

    def _episodes(self, model: BaseAlgorithm) -> None:
        episodes = [{k: get(v, {}) for k, v in e.items()} for e in self._held["episodes"]]
        model.ep_info_buffer = deque(episodes, maxlen=model._stats_window_size)
        if model.ep_success_buffer is None:
            model.ep_success_buffer = deque(maxlen=model._stats_window_size)

    def _apply_optimizer(self, optimizer: torch.optim.Optimizer, held: Any, name: str) -> None:
        tensors = self._file.tensors
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state: dict[int, dict[str, Any]] = {}
        for index, entries in held["state"].items():
            state[int(index)] = {
                k: to_torch(tensors[v["tensor"]])
                if isinstance(v, dict) and "tensor" in v
                else get(v, tensors)
                for k, v in entries.items()
            }
            _check_moments(parameters[int(index)], state[int(index)], f"{name}/{index}")
        groups = [{k: get(v, tensors) for k, v in g.items()} for g in held["groups"]]
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    def reapply(self, model: BaseAlgorithm) -> None:
        """Streams, noise and the environment's own state, at the start of the first rollout.

        `learn` draws from the streams and resets noise before that, so it is done last.
        """
        held, tensors = self._held, self._file.tensors
        if held["phase"] == FRESH:
            set_global_streams(held["streams"], tensors)
            return
        self._reapply_environment(model)
        for name, stream in held["spaces"].items():
            if stream is not None:
                space: Any = getattr(model, name)
                state = get(stream, tensors)
                space._np_random = generator(state, getattr(space, "_np_random", None))
        noise: Any = getattr(model, "action_noise", None)
        if noise is not None and held["noise"]["action"] is not None:
            set_attributes(noise, held["noise"]["action"], tensors)
        for name in held["noise"]["gsde"]:
            device = getattr(_distribution(model), name).device
            setattr(_distribution(model), name, to_torch(tensors[f"gsde/{name}"]).to(device))
        set_global_streams(held["streams"], tensors)
        if held["phase"] == "end" and getattr(model, "use_sde", False):
            actor: Any = getattr(model.policy, "actor", model.policy)
            assert model.env is not None
            actor.reset_noise(model.env.num_envs)

    @staticmethod
    def _last(model: BaseAlgorithm, observation: Any) -> None:
        """Begin with the first observation of environments whose state cannot be put back."""
        assert model.env is not None
        model._last_obs = observation
        model._last_episode_starts = np.ones((model.env.num_envs,), dtype=bool)
        statistics = model.get_vec_normalize_env()
        if statistics is not None:
            model._last_original_obs = statistics.get_original_obs()

    def _reapply_environment(self, model: BaseAlgorithm) -> None:
        held, tensors = self._held["environment"], self._file.tensors
        assert model.env is not None
        fresh = model.env.reset()  # makes what is then overwritten
        if not reachable(model):
            self._last(model, fresh)
            return
        for name, layer in _layers(model):
            kept = held.get(name)
            if kept is None or kept["class"] != type(layer).__qualname__:
                raise InvalidInputError(
                    f"{name} is a {type(layer).__qualname__}, the state has"
                    f" {kept['class'] if kept else 'nothing'}: wrap the environment as before"
                )
            set_attributes(layer, kept["attributes"], tensors)
            if kept["physics"]:
                _set_physics(layer, tensors[f"{name}/physics"])


def _set_physics(layer: Any, held: Tensor) -> None:
    mujoco = import_module("mujoco")
    spec = mujoco.mjtState.mjSTATE_INTEGRATION
    if held.count != mujoco.mj_stateSize(layer.model, spec):
        raise InvalidInputError("the physics state is of another MuJoCo model or version")
    mujoco.mj_setState(layer.model, layer.data, held.numpy().copy(), spec)


def _copy_into(target: torch.Tensor | None, held: Tensor) -> None:
    import torch

    if target is None or tuple(target.shape) != held.shape:
        raise InvalidInputError("the model has no learned entropy coefficient of that shape")
    with torch.no_grad():
        target.copy_(to_torch(held))


def _check_moments(parameter: torch.Tensor, entries: Mapping[str, Any], where: str) -> None:
    for key, value in entries.items():
        shape = tuple(getattr(value, "shape", ()))
        if math.prod(shape) > 1 and shape != tuple(parameter.shape):
            raise InvalidInputError(
                f"optimizer {where}: {key} has shape {shape}, its parameter"
                f" {tuple(parameter.shape)}: make the model with the same networks"
            )
