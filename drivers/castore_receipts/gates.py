"""Acceptance gates: a field of the receipt and the least it must be, decided once.

Neither expansion nor verification ever turns a failed gate into a passed one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from castore import InvalidInputError


@dataclass(frozen=True, slots=True)
class Gate:
    """Passed where the number under ``field`` is at least ``minimum``."""

    name: str
    field: str
    minimum: float

    def decide(self, receipt: Mapping[str, Any]) -> dict[str, Any]:
        """The gate as it stands in a receipt; `InvalidInputError` if there is no such number."""
        value = receipt.get(self.field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidInputError(f"gate {self.name!r}: {self.field!r} is no number: {value!r}")
        return {
            "name": self.name,
            "field": self.field,
            "minimum": self.minimum,
            "value": value,
            "passed": value >= self.minimum,
        }


def gates_of(receipt: Mapping[str, Any]) -> list[Gate]:
    """The gates of a sound receipt, to be decided anew by the receipts that follow."""
    return [Gate(g["name"], g["field"], g["minimum"]) for g in _gates(receipt)]


def failed(receipt: Mapping[str, Any]) -> list[str]:
    """Names of the gates that a receipt says failed, whatever else it says."""
    return [
        _name(g) for g in _gates(receipt) if isinstance(g, Mapping) and g.get("passed") is False
    ]


def defects(receipt: Mapping[str, Any], parent: Mapping[str, Any] | None) -> list[str]:
    """What is wrong with the gates: not what their numbers say, or a parent's failure gone.

    Within one run the gates are the same ones from receipt to receipt.
    """
    found = [d for g in _gates(receipt) for d in _defect(receipt, g)]
    if parent is not None and relation_of(receipt) == "previous":
        was, now = _definitions(parent), _definitions(receipt)
        found += [f"{n!r:.80} is not the gate that the parent has" for n in sorted(was ^ now)]
    inherited = failed(parent) if parent is not None and _expanded(receipt) else []
    kept = failed(receipt)
    return found + [f"{n!r} failed in the parent, not here" for n in inherited if n not in kept]


def relation_of(receipt: Mapping[str, Any]) -> Any:
    """How a receipt says it follows its parent; None for the first of a chain."""
    parent = receipt.get("parent")
    return parent.get("relation") if isinstance(parent, Mapping) else None


def _expanded(receipt: Mapping[str, Any]) -> bool:
    return bool(relation_of(receipt) == "expanded")


def _definitions(receipt: Mapping[str, Any]) -> set[str]:
    """Each gate without its value and what came of it."""
    told = (g for g in _gates(receipt) if isinstance(g, Mapping))
    return {repr([g.get(n) for n in ("name", "field", "minimum")]) for g in told}


def _gates(receipt: Mapping[str, Any]) -> Sequence[Any]:
    gates = receipt.get("gates")
    return gates if isinstance(gates, list) else []


def _name(gate: Mapping[str, Any]) -> str:
    return str(gate.get("name"))[:80]


def _defect(receipt: Mapping[str, Any], gate: Any) -> list[str]:
    if not isinstance(gate, Mapping) or not isinstance(gate.get("passed"), bool):
        return ["a gate does not say whether it passed"]
    value, minimum = gate.get("value"), gate.get("minimum")
    if not isinstance(value, int | float) or not isinstance(minimum, int | float):
        return [f"{_name(gate)!r} has no value or minimum"]
    wrong = (
        [] if gate["passed"] == (value >= minimum) else [f"{_name(gate)!r}: {value} >= {minimum}?"]
    )
    inherited = gate.get("inherited") is True and _expanded(receipt)
    field = gate.get("field")
    if not inherited and isinstance(field, str) and receipt.get(field) != value:
        wrong.append(f"{_name(gate)!r}: {field} is {receipt.get(field)!r}, the gate says {value!r}")
    return wrong
