"""Small timed probes of a model that leave nothing behind in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from castore_receipts.measure import Timings

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm


def forward(model: BaseAlgorithm) -> bool:
    """One batch through the actor's layers, which keep nothing of it; False if it has none."""
    import torch

    actor: Any = getattr(model.policy, "actor", None)
    if not hasattr(actor, "latent_pi"):
        return False
    shape = (getattr(model, "batch_size", 1), actor.features_dim)
    with torch.no_grad():
        actor.mu(actor.latent_pi(torch.zeros(shape, device=model.device)))
    return True


def warmed_forward(model: BaseAlgorithm, timings: Timings) -> None:
    """Time one batch forward, after one that is not timed."""
    if forward(model):
        with timings.measured("warmed_forward"):
            forward(model)


def data_preparation(model: BaseAlgorithm, timings: Timings) -> None:
    """Time one batch from the replay buffer; the stream it draws from is put back."""
    held: Any = getattr(model, "replay_buffer", None)
    if held is None or held.size() == 0:
        return
    stream = np.random.get_state()
    with timings.measured("data_preparation"):
        held.sample(getattr(model, "batch_size", 1), env=model.get_vec_normalize_env())
    np.random.set_state(stream)
