"""From a policy in training to the frozen adapter that is evaluated in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from castore import InvalidInputError
from castore_receipts.arrays import Tensor
from castore_receipts.policy import Adapter, Normalizer, array_policy

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm

MakeAdapter: TypeAlias = Callable[
    ["BaseAlgorithm", Mapping[str, Tensor], "Normalizer | None"], Adapter
]

_ACTIVATIONS = {"ReLU": "relu", "Tanh": "tanh"}


def sac_actor(
    model: BaseAlgorithm, tensors: Mapping[str, Tensor], normalizer: Normalizer | None
) -> Adapter:
    """The default adapter: SAC's deterministic actor as NumPy arrays.

    Raises
    ------
    InvalidInputError
        The policy is no fully connected SAC actor with ReLU or tanh layers.
    """
    actor: Any = getattr(model.policy, "actor", None)
    activation = _ACTIVATIONS.get(getattr(getattr(actor, "activation_fn", None), "__name__", ""))
    space: Any = model.action_space
    if actor is None or activation is None or not hasattr(actor, "latent_pi"):
        raise InvalidInputError(
            f"{type(model.policy).__name__} has no SAC actor with ReLU or tanh layers: give the"
            " callback an adapter= of your own"
        )
    clipped = actor.use_sde and actor.clip_mean > 0
    described = {
        "kind": "sac-actor/1",
        "activation": activation,
        "clip_mean": float(actor.clip_mean) if clipped else 0.0,
        "action_low": space.low,
        "action_high": space.high,
    }
    return array_policy(tensors, described, normalizer)
