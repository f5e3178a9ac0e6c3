"""What a call of `CheckpointManager` stands for: watched objects, or those given instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from castore import InvalidInputError
from castore_experiments.components import Content
from castore_experiments.session import Session
from castore_experiments.states import same


def content(session: Session, model: Any, config: Any, data: Any) -> Content:
    """What counts now; -1 leaves a component as it is."""
    watched = session.watched
    return session.tracker.rule.content(
        _chosen(config, lambda: watched.hyperparameters),
        _chosen(model, lambda: watched.model),
        _chosen(data, watched.frame),
    )


def _chosen(given: Any, watched: Callable[[], Any]) -> Any:
    if isinstance(given, int) and given == -1:
        return None
    return watched() if given is None else given


def numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics as plain numbers; `InvalidInputError` names one that is none."""
    found = {}
    for name, value in mapping("metrics", metrics).items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError) as e:
            raise InvalidInputError(f"metrics[{name!r}]: {value!r} is no number: {e}") from e
    return found


def mapping(name: str, given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """``given``, an empty one for None; `InvalidInputError` for anything else."""
    if given is not None and not isinstance(given, Mapping):
        raise InvalidInputError(
            f"{name}: expected a mapping from names, found {type(given).__qualname__}"
        )
    return given or {}


def metadata(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """``given``, if a weight file can keep it; `InvalidInputError` names what it cannot."""
    found = mapping("metadata", given)
    for name, value in found.items():
        from castore_experiments.tensors import take_apart

        if take_apart({"metadata": {name: value}}).stored:
            raise InvalidInputError(
                f"/metadata/{name}: holds a tensor, and metadata are plain values: take .item() or"
                " .tolist() of it"
            )
    return found


def refuse_other_config(session: Session, config: Any, name: str) -> None:
    """Refuse a configuration, or a name of its file, that is not that of the current hash."""
    if name != "config":
        raise InvalidInputError(f"config_name {name!r}: the documented file is called 'config'")
    hash, rule = session.place and session.tracker.hash, session.tracker.rule
    if config is None or hash is None:
        return
    if not same(rule.hp(rule.config(config)), session.tracker.digests.hp):
        raise InvalidInputError(
            f"config: not the configuration of {hash}, under whose name it would stand: give it to"
            " update_experiment_hash(hp_snapshot=...) first"
        )


def refuse_false(**flags: bool) -> None:
    for name, value in flags.items():
        if not value:
            raise InvalidInputError(
                f"{name}=False: weights without the state and the manifest entry of their hash"
                " could not be resumed; leave the parameter out"
            )
