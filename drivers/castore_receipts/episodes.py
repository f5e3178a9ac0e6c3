"""Episodes of a frozen adapter in an environment of its own, one a seed, recorded step by step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from castore import InvalidInputError
from castore_receipts.arrays import Array
from castore_receipts.policy import Adapter
from castore_receipts.traces import trace_name

if TYPE_CHECKING:
    import gymnasium

Environment: TypeAlias = "str | Callable[[], gymnasium.Env[Any, Any]]"
"""A registered id, or what makes a fresh environment; never the one in training."""

MAX_STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class Episode:
    """One row a step: the observation acted on, the action, the reward; float64."""

    trace: Array
    terminated: bool
    truncated: bool

    @property
    def total(self) -> float:
        """The return: the exactly rounded sum of rewards, so that it can be recomputed."""
        return math.fsum(self.trace[:, -1])


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Episodes by seed; ``observation`` and ``action`` are the columns of each."""

    episodes: Mapping[int, Episode]
    observation: int
    action: int

    @property
    def returns(self) -> dict[int, float]:
        return {seed: e.total for seed, e in self.episodes.items()}

    @property
    def mean_return(self) -> float:
        return mean(list(self.returns.values()))

    def traces(self) -> dict[str, Array]:
        return {trace_name(seed): e.trace for seed, e in self.episodes.items()}


def mean(values: Sequence[float]) -> float:
    """The exactly rounded sum over the count."""
    return math.fsum(values) / len(values)


def make(environment: Environment) -> gymnasium.Env[Any, Any]:
    """A fresh environment, checked to have flat observations and actions.

    Raises
    ------
    InvalidInputError
        Observations or actions are not arrays of numbers (a dict, say).
    """
    import gymnasium

    env = gymnasium.make(environment) if isinstance(environment, str) else environment()
    for what, space in (("observation", env.observation_space), ("action", env.action_space)):
        if not isinstance(space, gymnasium.spaces.Box):
            raise InvalidInputError(
                f"the {what} space is {space}: traces hold arrays of numbers; wrap the environment"
                " (gymnasium.wrappers.FlattenObservation)"
            )
    return env


def evaluate(adapter: Adapter, env: gymnasium.Env[Any, Any], seeds: Sequence[int]) -> Evaluation:
    """One episode a seed, deterministic in adapter, environment and seed.

    The global streams of NumPy and `random` are seeded alike before each episode (environments
    draw from them) and are afterwards as they were before.
    """
    with kept_streams():
        episodes = {seed: _episode(adapter, env, seed) for seed in seeds}
    shapes = (env.observation_space.shape, env.action_space.shape)
    sizes = [math.prod(shape or ()) for shape in shapes]
    return Evaluation(episodes, sizes[0], sizes[1])


def _episode(adapter: Adapter, env: gymnasium.Env[Any, Any], seed: int) -> Episode:
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    observation, _ = env.reset(seed=seed)
    rows: list[Array] = []
    for _ in range(MAX_STEPS):
        action = adapter.act(np.asarray(observation))
        following, reward, terminated, truncated, _ = env.step(action)
        rows.append(np.concatenate([np.ravel(observation), np.ravel(action), [float(reward)]]))
        observation = following
        if terminated or truncated:
            trace = np.array(rows, np.float64)
            return Episode(trace, bool(terminated), bool(truncated))
    raise InvalidInputError(
        f"the episode of seed {seed} did not end within {MAX_STEPS} steps: limit it"
        " (gymnasium.wrappers.TimeLimit)"
    )


@contextmanager
def kept_streams() -> Iterator[None]:
    """The global random streams of NumPy, `random` and torch (where loaded) stay as they are."""
    import sys

    legacy, python = np.random.get_state(), random.getstate()
    torch = sys.modules.get("torch")
    state = torch.get_rng_state() if torch is not None else None
    try:
        yield
    finally:
        np.random.set_state(legacy)
        random.setstate(python)
        if torch is not None:
            torch.set_rng_state(state)
