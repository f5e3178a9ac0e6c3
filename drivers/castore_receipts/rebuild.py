"""A receipt's environment, made again from what the receipt says, without running what it names.

Only ids that are registered already are made, with numbers as arguments: a receipt can name no
module to import and no file to open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from castore import InvalidInputError
from castore_receipts.episodes import Environment, make

if TYPE_CHECKING:
    import gymnasium

_ZEROS = "ZeroSensors"
_MOST_ADDED = 1 << 16


def environment_from(said: Mapping[str, Any]) -> Environment:
    """What makes the environment of a receipt; `InvalidInputError` that says why it cannot be."""
    told = said["environment"]
    id, wrappers = told["id"], told.get("wrappers", [])
    if not _plain(told) or any(w != _ZEROS for w in wrappers):
        raise InvalidInputError(
            f"the receipt's environment ({told.get('class')}) is not a registered id with numbers"
            " for arguments: give what makes it (environment=, or --environment MODULE:CALLABLE)"
        )
    base = partial(_registered, id, told.get("max_episode_steps"), dict(told.get("arguments", {})))
    return partial(_as_wide, base, told["observation_shape"][0]) if wrappers else base


def with_zeros(said: Mapping[str, Any], added: int) -> Environment:
    """The environment of a receipt, with ``added`` sensors that show zero."""
    base = environment_from(said)
    assert not isinstance(base, str)
    return partial(_with_zeros, base, added)


def _plain(told: Mapping[str, Any]) -> bool:
    arguments = told.get("arguments", {})
    numbers = isinstance(arguments, Mapping) and all(
        isinstance(v, bool | int | float) for v in arguments.values()
    )
    return numbers and isinstance(told["id"], str) and ":" not in told["id"]


def _registered(
    id: str, limit: int | None, arguments: Mapping[str, Any]
) -> gymnasium.Env[Any, Any]:
    import gymnasium

    if id not in gymnasium.registry:
        raise InvalidInputError(
            f"no environment {id!r} is registered here: import what registers it, or give it"
        )
    return gymnasium.make(id, max_episode_steps=limit, **arguments)


def _with_zeros(base: Callable[[], Any], added: int) -> gymnasium.Env[Any, Any]:
    from castore_receipts.sensors import ZeroSensors

    return ZeroSensors(make(base), added)


def _as_wide(base: Callable[[], Any], width: int) -> gymnasium.Env[Any, Any]:
    """The environment of an expanded policy, or of one that was trained on or expanded again."""
    from castore_receipts.sensors import ZeroSensors

    env = make(base)
    added = width - (env.observation_space.shape or (0,))[0]
    if not 0 < added <= _MOST_ADDED:
        env.close()
        raise InvalidInputError(
            f"the receipt tells of {width} observations, its environment shows"
            f" {env.observation_space.shape}: give what makes it (environment=)"
        )
    return ZeroSensors(env, added)


def named(text: str) -> Environment:
    """A registered id, or the callable that ``MODULE:CALLABLE`` names; the caller trusts it."""
    module, colon, attribute = text.partition(":")
    if not colon:
        return text
    from importlib import import_module

    try:
        found: Any = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise InvalidInputError(f"--environment {text}: {e}") from e
    if not callable(found):
        raise InvalidInputError(f"--environment {text}: {attribute} is not callable")
    environment: Environment = found
    return environment
