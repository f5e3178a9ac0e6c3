"""A model made again with a wider observation space, around expanded tensors."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from castore import InvalidInputError
from castore_receipts.episodes import kept_streams
from castore_receipts.expand import expand_tensors, expand_training, widths
from castore_receipts.resuming import load_policy
from castore_receipts.sensors import widened_space
from castore_receipts.tensors import state_of
from castore_receipts.training import TrainingState, capture

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm
    from stable_baselines3.common.vec_env import VecEnv

_MADE_ANEW = (
    *("policy", "device", "env", "replay_buffer", "rollout_buffer", "actor", "critic"),
    *("critic_target", "_vec_normalize_env", "_logger", "log_ent_coef", "ent_coef_optimizer"),
    *("ent_coef_tensor", "batch_norm_stats", "batch_norm_stats_target", "_last_obs"),
    *("_last_original_obs", "_last_episode_starts", "observation_space", "_custom_logger"),
)


def grown(model: BaseAlgorithm, added: int, moments: str, env: VecEnv | None) -> BaseAlgorithm:
    """See `castore_receipts.expand.expand_observation`."""
    tensors = state_of(model.policy.state_dict())
    wider = expand_tensors(tensors, added)
    space = widened_space(model.observation_space, added) if env is None else env.observation_space
    if space.shape != (widths(wider).observation,):
        raise InvalidInputError(
            f"the environment shows {space.shape}, the expanded policy takes"
            f" {widths(wider).observation} numbers"
        )
    state = expand_training(capture(model, "rollout"), widths(tensors), added, moments)
    with kept_streams():
        made = _made(model, space)
    load_policy(made, wider)
    TrainingState(state).apply(made)
    if env is not None:
        made.set_env(env)
    return made


def _made(model: BaseAlgorithm, space: Any) -> BaseAlgorithm:
    """The same algorithm with the same settings; `_setup_model` is how SB3 itself loads one."""
    kind: Any = type(model)
    made: Any = kind(model.policy_class, None, device=model.device, _init_setup_model=False)
    kept = {k: v for k, v in vars(model).items() if k not in _MADE_ANEW}
    vars(made).update(kept)
    made.observation_space = space
    made.action_space = deepcopy(model.action_space)  # it is seeded anew below
    made._last_obs = None
    made._setup_model()
    algorithm: BaseAlgorithm = made
    return algorithm
