"""Parameters counted layer by layer, from real tensors only: no optimizer state, no buffers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from castore_receipts.arrays import Tensor

_BUFFER = re.compile(r".*\.(running_mean|running_var|num_batches_tracked)")
_BRANCHES = (
    ("policy distribution", re.compile(r"actor\.(mu|log_std)(\.|$)")),
    ("actor", re.compile(r"actor\.")),
    ("critic target", re.compile(r"critic_target\.")),
    ("critic", re.compile(r"critic\.")),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor: its branch, shape and number of elements."""

    name: str
    branch: str
    shape: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """All parameters of a checkpoint, by name."""

    rows: tuple[Row, ...]

    @property
    def total(self) -> int:
        return sum(row.count for row in self.rows)

    def by_branch(self) -> dict[str, int]:
        """Elements of each branch, targets apart from critics."""
        found: dict[str, int] = {}
        for row in self.rows:
            found[row.branch] = found.get(row.branch, 0) + row.count
        return found

    def added_to(self, before: Ledger) -> dict[str, int]:
        """By how much each tensor has grown since ``before``; those that did not are left out."""
        old = {row.name: row.count for row in before.rows}
        grown = {row.name: row.count - old.get(row.name, 0) for row in self.rows}
        return {name: n for name, n in grown.items() if n}

    def record(self) -> dict[str, Any]:
        """As plain JSON."""
        return {"total": self.total, "branches": self.by_branch()}


def ledger(tensors: Mapping[str, Tensor]) -> Ledger:
    """The ledger of a checkpoint's tensors."""
    names = [n for n in sorted(tensors) if not _BUFFER.fullmatch(n)]
    return Ledger(tuple(_row(n, tensors[n]) for n in names))


def _row(name: str, t: Tensor) -> Row:
    branch = next((b for b, pattern in _BRANCHES if pattern.match(name)), "other")
    return Row(name, branch, t.shape, t.count)
