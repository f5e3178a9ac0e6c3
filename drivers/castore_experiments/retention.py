"""Which weight checkpoints of one hash the ``keep`` option lets go. Pure; no I/O."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from castore_experiments.options import Best, Keep


@dataclass(frozen=True, slots=True)
class Saved:
    """A weight checkpoint as retention sees it: its id, step, and the metrics saved with it."""

    id: str
    step: int
    metrics: dict[str, float]


def to_forget(saved: Sequence[Saved], keep: Keep, pinned: Collection[int] = ()) -> list[Saved]:
    """What of ``saved`` (newest first by the store's order) goes.

    Never the newest, and never a step in ``pinned`` (branch points). A step that was saved again
    counts once, by its newest save; older saves of a step go with it only when it goes.
    With an empty ``keep`` nothing goes.
    """
    if not saved or keep == Keep():
        return []
    newest = list({s.step: s for s in reversed(saved)}.values())[::-1]
    order = sorted(newest, key=saved.index)
    stay = {order[0].step, *pinned}
    if keep.last is not None:
        stay.update(s.step for s in order[: keep.last])
    if keep.every is not None:
        stay.update(s.step for s in order if s.step % keep.every == 0)
    if keep.best is not None:
        stay.update(s.step for s in best(order, keep.best))
    return [s for s in saved if s.step not in stay]


def best(saved: Sequence[Saved], rule: Best) -> list[Saved]:
    """The ``n`` of ``saved`` with the best finite metric; of equal ones the higher step."""
    sign = 1.0 if rule.mode == "max" else -1.0
    scored = [s for s in saved if math.isfinite(s.metrics.get(rule.metric, math.nan))]
    return sorted(scored, key=lambda s: (sign * s.metrics[rule.metric], s.step))[::-1][: rule.n]
