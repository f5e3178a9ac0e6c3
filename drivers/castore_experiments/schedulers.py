"""Tell a saved learning-rate scheduler from one of another kind.

Torch takes any state into any scheduler, without a word: the settings of one are then attributes of
the other that nobody reads. A saved state has no name of its class; its settings tell it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

_OF_ALL = {
    *("base_lrs", "last_epoch", "verbose", "_step_count", "_last_lr", "_is_initial"),
    "_get_lr_called_within_step",
}
"""What every scheduler of torch keeps, in one version or another."""

_NOT_KEPT = {"self", "optimizer", "last_epoch", "verbose"}


def other_scheduler(scheduler: Any | None, state: Mapping[str, Any] | None) -> str:
    """What tells that a saved scheduler is of another kind than ``scheduler``; empty if nothing.

    Both kinds are named, with their settings. Of schedulers that are not torch's own only settings
    that each side has alone tell it, since their authors may add one. Two kinds with the same
    settings cannot be told apart: ``LambdaLR`` and ``MultiplicativeLR``.
    """
    if scheduler is None or state is None:
        return ""
    here, there = ({str(k) for k in s} - _OF_ALL for s in (scheduler.state_dict(), state))
    if here == there:
        return ""
    known, kinds = _name(there), {c.__name__ for c in type(scheduler).__mro__}
    named = _is_torchs(type(scheduler)) and known is not None and known not in kinds
    if not named and (here <= there or there <= here):
        return ""
    own = _spelled(type(scheduler).__name__, here)
    return f"{_spelled(known or 'one', there)} saved; {own} here"


def _name(settings: set[str]) -> str | None:
    """The scheduler of torch that has most of ``settings`` as its arguments, if one has."""
    from torch.optim import lr_scheduler

    fitting: dict[str, int] = {}
    for name, kind in vars(lr_scheduler).items():
        if not name.startswith("_") and inspect.isclass(kind) and _is_torchs(kind):
            wanted = {*inspect.signature(kind).parameters} - _NOT_KEPT
            if wanted and wanted <= settings:
                fitting[kind.__name__] = len(wanted)
    most = [n for n, count in fitting.items() if count == max(fitting.values())]
    return most[0] if len(most) == 1 else None


def _is_torchs(kind: type) -> bool:
    return kind.__module__ == "torch.optim.lr_scheduler"


def _spelled(name: str, settings: Iterable[str]) -> str:
    return f"{name} ({', '.join(sorted(settings)) or 'no settings'})"
