"""Evaluate a stored policy again on its validation seeds and compare the trajectories.

Needs gymnasium and the environment's code, no torch and no Stable-Baselines3. On the machine that
wrote the receipt the traces are equal bit by bit; on another one floating-point sums may differ,
and a chaotic environment makes of that what it will: both platforms are in the report.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from castore import InvalidInputError, ReceiptMismatchError, Repository
from castore_receipts import normalize
from castore_receipts.destination import NORMALIZER
from castore_receipts.episodes import Environment, evaluate, make
from castore_receipts.links import MISMATCH, MISSING, OK, Link, Report
from castore_receipts.policy import ArrayPolicy, array_policy
from castore_receipts.provenance import machine, versions
from castore_receipts.rebuild import environment_from
from castore_receipts.sources import sources
from castore_receipts.subject import Family, Subject
from castore_receipts.traces import trace_name
from castore_receipts.verify import report

TOLERANCE = 0.0


@dataclass(frozen=True, slots=True)
class Platforms:
    """Where the receipt was written and where it was replayed, as far as it may matter."""

    written: Mapping[str, Any]
    here: Mapping[str, Any]

    @property
    def same(self) -> bool:
        return self.written == self.here


def replay(
    location: str | os.PathLike[str],
    *,
    environment: Environment | None = None,
    tolerance: float = TOLERANCE,
    repository: Repository | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Report:
    """One link a validation seed: `ok` where no number differs by more than ``tolerance``.

    The receipt is verified first. The report's receipt tells tolerance, platforms and the largest
    difference.

    Raises
    ------
    ReceiptMismatchError
        A link does not hold (a normaliser's statistics that are missing, say): nothing was run.
    InvalidInputError
        Another program's receipt, an adapter of another kind, or an environment not to be made
        from the receipt alone.
    """
    found, _ = sources(location, repository, storage_options)
    if len(found) != 1:
        raise InvalidInputError(f"{os.fspath(location)} holds {len(found)} receipts: name one")
    subject = Subject.read(found[0])
    subject.family = Family([subject.receipt])
    policy = stored_policy(subject)
    env = make(environment if environment is not None else environment_from(subject.receipt))
    seeds = [int(s) for s in subject.receipt["traces"]]
    try:
        again = evaluate(policy, env, seeds).traces()
    finally:
        env.close()
    recorded = subject.traces()
    names = [trace_name(s) for s in seeds]
    links = [_compare(n, recorded.get(n), again[n], tolerance) for n in names]
    platforms = Platforms(_platform(subject.receipt), _platform(_here()))
    told = {
        "tolerance": tolerance,
        "same_platform": platforms.same,
        "written": dict(platforms.written),
        "here": dict(platforms.here),
    }
    return Report(subject.source.name, tuple(links), told)


def stored_policy(subject: Subject) -> ArrayPolicy:
    """The adapter, built from a verified receipt's files alone."""
    verified = report(subject)
    if not verified.sound:
        some = "; ".join(f"{p.name}: {p.verdict}: {p.detail}" for p in verified.problems[:5])
        raise ReceiptMismatchError(f"{verified.location} is not what its receipt says: {some}")
    if not subject.ours or subject.final:
        raise InvalidInputError(f"{verified.location}: only castore's own checkpoints are replayed")
    statistics = None
    if subject.receipt["normalizer"] is not None:
        statistics = subject.file(NORMALIZER)
    scaled = normalize.frozen(statistics, NORMALIZER)
    return array_policy(subject.tensors(), subject.receipt["adapter"], scaled)


def _compare(name: str, recorded: Any, again: Any, tolerance: float) -> Link:
    if recorded is None:
        return Link(name, MISSING, "there is no such trace")
    if recorded.shape != again.shape:
        return Link(name, MISMATCH, f"{again.shape} again, {recorded.shape} recorded")
    difference = np.abs(recorded - again)
    largest = float(difference.max(initial=0.0))
    if largest <= tolerance:
        return Link(name, OK, f"largest difference {largest:.6g}")
    row = int(np.flatnonzero((difference > tolerance).any(axis=1))[0])
    return Link(name, MISMATCH, f"differs from step {row} on, by {largest:.6g} at most")


def _platform(said: Mapping[str, Any]) -> dict[str, Any]:
    held = {n: said["versions"].get(n) for n in ("python", "numpy", "gymnasium", "mujoco")}
    return {**held, **said["machine"]}


def _here() -> dict[str, Any]:
    return {"versions": versions(), "machine": machine()}
