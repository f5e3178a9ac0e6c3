"""Whether an expanded policy computes what the old one did, at the instant of expansion.

The first layer is summed column by column in one order, so that zero columns change no bit: what
is compared is the algebra, not how a library happens to block its sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from castore_receipts.arrays import Array, Tensor
from castore_receipts.expand import Widths, widths
from castore_receipts.links import MISMATCH, MISSING, OK, Link, Report
from castore_receipts.parameters import ledger
from castore_receipts.policy import actor_names

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm

SAMPLES = 64


def verify_expansion(
    old: Mapping[str, Tensor] | BaseAlgorithm,
    new: Mapping[str, Tensor] | BaseAlgorithm,
    *,
    seed: int = 0,
) -> Report:
    """Compare actor, critics and targets: added sensors zero, arbitrary actions, then nonzero.

    One link a question, `ok` where the outputs are equal bit by bit; the detail gives the largest
    difference. The report's receipt holds the ledgers and how much each tensor has grown. Holds
    for this instant only: the first update may move the new columns.

    Raises
    ------
    InvalidInputError
        One of the two is no fully connected SAC policy.
    """
    before, after = _tensors(old), _tensors(new)
    w_old, w_new = widths(before), widths(after)
    added = w_new.observation - w_old.observation
    links = [_widths(w_old, w_new), *_untouched(before, after, w_old)]
    if added > 0 and all(link.verdict == OK for link in links):
        links += _outputs(before, after, w_old, added, np.random.default_rng(seed))
    first, second = ledger(before), ledger(after)
    told = {
        "added": second.added_to(first),
        "before": first.record(),
        "after": second.record(),
    }
    return Report("expansion", tuple(links), told)


def _tensors(policy: Mapping[str, Tensor] | BaseAlgorithm) -> Mapping[str, Tensor]:
    if isinstance(policy, Mapping):
        return policy
    from castore_receipts.tensors import state_of

    return state_of(policy.policy.state_dict())


def _widths(old: Widths, new: Widths) -> Link:
    grown = new.observation > old.observation and new.action == old.action
    alike = (old.actor, old.critics) == (new.actor, new.critics)
    detail = f"{old.observation} -> {new.observation} observations, {new.action} actions"
    return Link("widths", OK if grown and alike else MISMATCH, detail)


def _untouched(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], w: Widths
) -> Iterator[Link]:
    """Every other tensor is the same bytes."""
    lost = sorted(before.keys() ^ after.keys())
    if lost:
        yield Link("tensors", MISSING, f"only in one of the two: {', '.join(lost[:5])}")
        return
    first = {w.actor, *w.critics}
    changed = [n for n in sorted(before) if n not in first and not _same(before[n], after[n])]
    detail = (
        f"changed: {', '.join(changed[:5])}" if changed else f"{len(before) - len(first)} equal"
    )
    yield Link("tensors", MISMATCH if changed else OK, detail)


def _same(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape, bytes(a.data)) == (b.dtype, b.shape, bytes(b.data))


def _outputs(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    w: Widths,
    added: int,
    random: np.random.Generator,
) -> Iterator[Link]:
    observations = random.standard_normal((SAMPLES, w.observation)).astype(np.float32)
    actions = random.uniform(-1, 1, (SAMPLES, w.action)).astype(np.float32)
    sensors = (10 * random.standard_normal((SAMPLES, added))).astype(np.float32)
    for case, shown in (("zero sensors", np.zeros_like(sensors)), ("nonzero sensors", sensors)):
        wide = np.concatenate([observations, shown], axis=1)
        yield _equal(f"actor, {case}", _actor(before, observations), _actor(after, wide))
        for name in w.critics:
            branch = name.removesuffix(".0.weight")
            was = _critic(before, branch, np.concatenate([observations, actions], axis=1))
            now = _critic(after, branch, np.concatenate([wide, actions], axis=1))
            yield _equal(f"{branch}, {case}", was, now)


def _equal(name: str, was: Array, now: Array) -> Link:
    largest = float(np.max(np.abs(was - now)))
    same = np.array_equal(was, now)
    return Link(name, OK if same else MISMATCH, f"largest difference {largest:.6g}")


def _actor(tensors: Mapping[str, Tensor], inputs: Array) -> Array:
    hidden, mean = actor_names(list(tensors))
    return _network(tensors, [*hidden, mean], inputs)


def _critic(tensors: Mapping[str, Tensor], branch: str, inputs: Array) -> Array:
    found = [n.removesuffix(".weight") for n in tensors if n.startswith(f"{branch}.")]
    numbers = {int(n.rpartition(".")[2]) for n in found if n.rpartition(".")[2].isdigit()}
    return _network(tensors, [f"{branch}.{n}" for n in sorted(numbers)], inputs)


def _network(tensors: Mapping[str, Tensor], layers: list[str], inputs: Array) -> Array:
    """ReLU layers and a linear one; the activation is the same for both, so any would do."""
    x = inputs
    for i, layer in enumerate(layers):
        weight, bias = (tensors[f"{layer}.{part}"].numpy() for part in ("weight", "bias"))
        x = (_by_columns(x, weight) if i == 0 else x @ weight.T) + bias
        x = np.maximum(x, 0) if i < len(layers) - 1 else x
    return x


def _by_columns(x: Array, weight: Array) -> Array:
    total = np.zeros((len(x), len(weight)), np.result_type(x, weight))
    for j in range(weight.shape[1]):
        total += x[:, j : j + 1] * weight[:, j]
    return total
