"""Runs: one attempt at training each, and what the newest one descends from. Pure.

A run begins when a training starts, resumes, rewinds or branches. It names its parent and the
step it forked at; its curve is the parent's up to and including that step, then its own rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from castore import FormatError


@dataclass(frozen=True, slots=True)
class Run:
    """One attempt.

    ``id`` is ``<writer>.<n>``; ``parent`` another run or None; ``fork_step`` the last step of the
    parent that counts (None: all of it); ``started`` microseconds by the store's clock, 0 for
    rows of another program, whose runs are not known.
    """

    id: str
    parent: str | None
    fork_step: int | None
    started: int

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "parent": self.parent,
            "fork_step": self.fork_step,
            "started": self.started,
        }

    @staticmethod
    def from_json(body: Any, where: str) -> Run:
        """The run in ``body``, or `FormatError` that names ``where``."""
        try:
            run = Run(body["id"], body["parent"], body["fork_step"], body["started"])
        except (TypeError, KeyError) as e:
            raise FormatError(f"{where}: a run lacks {e}") from e
        if not isinstance(run.id, str) or type(run.started) is not int:
            raise FormatError(f"{where}: {body!r} is no run")
        return run


@dataclass(frozen=True, slots=True)
class Share:
    """How much of a run counts: steps up to ``last`` (None: all); a higher ``rank`` wins."""

    rank: int
    last: int | None


def newest(runs: Iterable[Run]) -> Run | None:
    """The run that started last; None of none."""
    return max(runs, key=lambda r: (r.started, *_order(r.id)), default=None)


def within_second(store: float, local: float) -> float:
    """The time by the store's clock, finer than it tells it; seconds since the epoch.

    S3 tells whole seconds, so that runs of two roots which begin in one second would have no
    order. A local clock that agrees with the store's to a second says where in the second it is;
    another is not believed. Never outside of the second that the store told.
    """
    if not store.is_integer() or not -1 < local - store < 2:
        return store
    return min(max(local, store), store + 1 - 1e-6)


def ancestry(run: str, runs: Mapping[str, Run]) -> dict[str, Share]:
    """What counts of each run on the way from ``run`` back to its first ancestor.

    The limit of an ancestor is the lowest fork step on the way. Ends at a parent that is not in
    ``runs`` and never goes round in a circle.
    """
    shares: dict[str, Share] = {}
    at: str | None = run
    last: int | None = None
    while at is not None and at not in shares:
        shares[at] = Share(-len(shares), last)
        known = runs.get(at)
        at = known.parent if known else None
        if known and known.fork_step is not None:
            last = known.fork_step if last is None else min(last, known.fork_step)
    return shares


def _order(id: str) -> tuple[int, str]:
    """Runs of one writer that began within a microsecond: by their number."""
    number = id.rpartition(".")[2]
    return (int(number) if number.isdecimal() else 0, id)
