"""Observation spaces and environments with sensor channels added at the end."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

from castore import InvalidInputError


def widened_space(space: Any, added: int) -> Box:
    """The observation space with ``added`` unbounded numbers at its end."""
    if not isinstance(space, Box) or len(space.shape) != 1:
        raise InvalidInputError(f"observations {space}: expected a flat Box")
    low = np.concatenate([space.low, np.full(added, -np.inf)]).astype(space.low.dtype)
    high = np.concatenate([space.high, np.full(added, np.inf)]).astype(space.high.dtype)
    dtype: Any = space.dtype
    return Box(low, high, dtype=dtype)


class ZeroSensors(gymnasium.ObservationWrapper[Any, Any, Any]):
    """``added`` zeros at the end of each flat observation: sensors that show nothing yet."""

    def __init__(self, env: gymnasium.Env[Any, Any], added: int):
        super().__init__(env)
        self.observation_space = widened_space(env.observation_space, added)
        self._zeros = np.zeros(added, self.observation_space.dtype)

    def observation(self, observation: Any) -> Any:
        return np.concatenate([observation, self._zeros])
