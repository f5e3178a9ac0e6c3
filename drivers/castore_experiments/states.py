"""The facts of an experiment hash and of its weight files, as snapshots keep them. Pure; no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

from castore import FormatError, InvalidInputError, SnapshotName
from castore_experiments.layout import COMPONENTS

MISSING = ""
"""The digest of a component that there is none of; its label is ``00000000``."""


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of the three components of a state: 64 hex characters, or `MISSING`.

    A root that the public tool wrote tells no more than the first 8 characters: those stand for
    every digest that begins with them.
    """

    hp: str = MISSING
    model: str = MISSING
    data: str = MISSING

    def changed(self, other: Digests) -> set[str]:
        """The components, of ``hp``, ``model`` and ``data``, in which the two differ."""
        return {n for n in COMPONENTS if not same(getattr(self, n), getattr(other, n))}

    def facts(self) -> dict[str, str]:
        """As the facts of snapshots hold them."""
        return {n: getattr(self, n) for n in COMPONENTS}


def same(a: str, b: str) -> bool:
    """Whether two digests stand for one content, as far as the shorter tells."""
    return a == b or (a != MISSING != b and 8 in (len(a), len(b)) and a[:8] == b[:8])


@dataclass(frozen=True, slots=True)
class State:
    """The facts of one experiment hash.

    ``init_step`` is the step its model was initialised at; ``parent`` and ``step`` say which hash
    it descends from and at which step; ``run`` is the run that made it; ``created`` (local ISO
    time) when. ``scheme`` names the rule its digests follow.
    """

    hash: str
    digests: Digests
    scheme: str
    init_step: int = 0
    parent: str | None = None
    step: int | None = None
    run: str | None = None
    changed: tuple[str, ...] = ()
    experiment_name: str | None = None
    created: str = ""

    def facts(self) -> dict[str, Any]:
        """What the snapshot keeps; `state_of` reads it."""
        return {
            "hash": self.hash,
            "digests": self.digests.facts(),
            "scheme": self.scheme,
            "init_step": self.init_step,
            "parent": self.parent,
            "step": self.step,
            "run": self.run,
            "changed": list(self.changed),
            "experiment_name": self.experiment_name,
            "created": self.created,
        }


def state_of(facts: Mapping[str, Any], where: str) -> State:
    """The state that a snapshot's facts tell; `FormatError` if they do not."""
    try:
        digests = Digests(*(str(facts["digests"][n]) for n in COMPONENTS))
        return State(
            str(facts["hash"]),
            digests,
            str(facts["scheme"]),
            int(facts["init_step"]),
            facts["parent"],
            facts["step"],
            facts["run"],
            tuple(facts["changed"]),
            facts["experiment_name"],
            str(facts["created"]),
        )
    except (KeyError, TypeError, ValueError) as e:
        raise FormatError(f"{where}: not the facts of a state: {e!r}") from e


@dataclass(frozen=True, slots=True)
class Weights:
    """One saved weight file: the same step may be saved several times.

    ``path`` is relative to ``checkpoints/``; ``time`` says when it was saved, microseconds since
    the epoch; ``snapshot`` is None for a file that is in no repository.
    """

    hash: str
    step: int
    path: str
    time: int
    snapshot: SnapshotName | None = None


class Archive(Protocol):
    """What a root holds, read from its repository or, before that is made, from its files."""

    def refresh(self) -> None:
        """Look again: what others wrote or forgot meanwhile."""

    def hashes(self) -> list[str]:
        """Every hash that has a state, the most recently used first."""

    def latest(self) -> str | None:
        """The hash that was current at the last write."""

    def state(self, hash: str) -> State:
        """The facts of a hash; `SnapshotNotFoundError` if there is no such hash."""

    def with_label(self, component: str, label: str) -> Iterator[str]:
        """The hashes whose segment ``component`` is ``label``, the first written first."""

    def weights(self, hash: str) -> Sequence[Weights]:
        """The weight files of a hash, last saved first."""

    def document(self, hash: str, path: str) -> bytes | None:
        """One other file of a hash, relative to ``checkpoints/``, verified; None if it has none."""

    def weight_file(self, weights: Weights) -> bytes:
        """The bytes of a weight file, verified."""

    def __contains__(self, hash: str) -> bool: ...


def weights_facts(
    state: State,
    step: int,
    saved: str,
    metrics: Mapping[str, float],
    run: str | None,
    imported: bool = False,
) -> dict[str, Any]:
    """What the snapshot of a weight file keeps: whose it is, and the metrics saved with it.

    A metric that is not finite is kept as text, since JSON has no number for it.
    """
    facts = {
        "hash": state.hash,
        "step": step,
        "digests": state.digests.facts(),
        "metrics": {k: v if math.isfinite(v) else str(v) for k, v in metrics.items()},
        "run": run,
        "saved": saved,
    }
    return {**facts, "imported": True} if imported else facts


def pick(found: Sequence[Weights], target_step: int | None) -> Weights | None:
    """The last saved of ``found`` (last saved first), or that nearest to ``target_step``.

    Ties go to the higher step; of a step that was saved several times, the last save.
    `InvalidInputError` for a target that is no number.
    """
    if target_step is not None and not _is_number(target_step):
        raise InvalidInputError(f"target_step {target_step!r}: expected a step, a whole number")
    if not found or target_step is None:
        return found[0] if found else None
    nearest = min({w.step for w in found}, key=lambda s: (abs(s - target_step), -s))
    return next(w for w in found if w.step == nearest)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not math.isnan(value)
