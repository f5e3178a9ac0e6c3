"""Audit checkpoint receipts: many folders, destinations or repositories, in one report.

    python scripts/audit_receipts.py runs/a s3://bucket/run --json --plot returns.png

Exit codes: 0 all sound; 3 where a link does not hold or a place could not be looked at; 1 where
the picture cannot be drawn or a file of keys holds none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from _report import Item, Link, exit_code, plot, show

from castore import CastoreError
from castore_receipts.links import Report
from castore_receipts.verify import verify_all

COLUMNS = ("step", "mean_return", "role", "failed_gates")


def item(found: Report) -> Item:
    """One receipt's report in the words of the shared table."""
    receipt = found.receipt
    facts = {
        "step": receipt.get("step"),
        "mean_return": receipt.get("mean_return"),
        "role": "foreign" if found.foreign else receipt.get("role"),
        "failed_gates": ", ".join(found.failed_gates) or None,
        "unknown_fields": list(found.unknown),
    }
    links = tuple(Link(n.name, n.verdict, n.detail) for n in found.links)
    return Item(found.location, links, facts)


def points(items: Sequence[Item]) -> dict[str, list[tuple[float, float]]]:
    """Returns over steps, one series a run: what lies in one folder or namespace."""
    series: dict[str, list[tuple[float, float]]] = {}
    for one in items:
        point = _point(one)
        if point is not None and one.facts["role"] != "final":
            series.setdefault(_run(one.name), []).append(point)
    return {name: sorted(found) for name, found in series.items()}


def _point(one: Item) -> tuple[float, float] | None:
    step, value = one.facts["step"], one.facts["mean_return"]
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (step, value))
    try:
        return (float(step), float(value)) if numbers else None
    except OverflowError:  # an integer that no float holds cannot be drawn
        return None


def _run(name: str) -> str:
    """What comes before the checkpoint: a destination, or the namespace of a snapshot."""
    return name.partition("@" if "@" in name else "/checkpoints/")[0]


def main(words: Sequence[str] | None = None) -> int:
    """Audit everything named; gives the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("places", nargs="+", metavar="ROOT_OR_REPOSITORY")
    parser.add_argument("--json", action="store_true", help="one JSON document a line")
    parser.add_argument("--plot", metavar="PNG", help="draw returns over steps")
    parser.add_argument("--trust", action="append", default=[], metavar="KEYFILE")
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args(words)
    if options.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'castore[receipts]'")
    try:
        found = verify_all(options.places, trust=options.trust, workers=options.workers)
        items = [item(one) for one in found]
    except CastoreError as e:  # keys that are none: what places hold is in the report
        print(f"audit_receipts: {e}", file=sys.stderr)
        return e.exit_code
    show(items, COLUMNS, options.json)
    return exit_code(items) if not options.plot or draw(items, options.plot) else 1


def draw(items: Sequence[Item], path: str) -> bool:
    """The picture; False, and why, where it cannot be written."""
    marked = [p for p in map(_point, (one for one in items if one.problems)) if p is not None]
    try:
        plot(path, points(items), "environment steps", "mean validation return", marked)
    except (OSError, ValueError) as e:
        print(f"audit_receipts: {path} cannot be drawn: {e}", file=sys.stderr)
        return False
    print(f"drawn: {path}", file=sys.stderr)
    return True


if __name__ == "__main__":
    sys.exit(main())
