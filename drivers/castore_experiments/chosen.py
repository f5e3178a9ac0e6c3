"""What a call of `CheckpointManager` stands for: watched objects, or those given instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from castore import InvalidInputError
from castore_experiments.components import Content
from castore_experiments.session import Session


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


def refuse_false(**flags: bool) -> None:
    for name, value in flags.items():
        if not value:
            raise InvalidInputError(
                f"{name}=False: weights without the state and the manifest entry of their hash"
                " could not be resumed; leave the parameter out"
            )
