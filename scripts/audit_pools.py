"""Audit one or several zoos of pool checkpoints: one report, a row a cell or lone base.

    python scripts/audit_pools.py zoo-folder s3://bucket/zoo --json
    CASTORE_REPOSITORY=store python scripts/audit_pools.py castore://agnews/latest

Each cell's links are what its layout promises (docs/layouts/pools.md): base, numbering, keys, pin,
finite values, digests, counts, statistics. With --metric MODULE:FUNCTION the logged metric of some
files is recomputed.

Exit codes: 0 all sound; 3 problems found, or a zoo that could not be read.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module

from _report import VERDICTS, Item, Link, audited, exit_code, show

from castore import CastoreError
from castore_pools.layout import CellFiles, survey
from castore_pools.places import Place, open_place
from castore_pools.verify import Finding, Metric, verify_base, verify_cell


def links(findings: Iterable[Finding]) -> tuple[Link, ...]:
    """One link a check: its worst verdict, and what is wrong with the first few files."""
    found: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        found[finding.check].append(finding)
    return tuple(_link(check, all_of) for check, all_of in found.items())


def _link(check: str, findings: Sequence[Finding]) -> Link:
    verdict = max((f.verdict for f in findings), key=VERDICTS.index)
    worst = [f for f in findings if f.verdict == verdict]
    if verdict == "ok":
        return Link(check, verdict)
    more = f" (and {len(worst) - 3} more files)" if len(worst) > 3 else ""
    told = "; ".join(f"{f.path.rpartition('/')[2]}: {f.detail}" for f in worst[:3])
    return Link(check, verdict, told + more)


def audit(
    options: argparse.Namespace, metric: Metric | None, thing: tuple[Place, CellFiles]
) -> Item:
    """The audit of one cell."""
    place, files = thing
    findings = list(
        verify_cell(
            place, files, metric=metric, sample=options.sample, require_pin=options.require_pin
        )
    )
    body = files.record.body if files.record is not None else {}
    facts = {
        "files": len(files.pool),
        "generated": body.get("generated_params"),
        "frozen": body.get("frozen_params"),
        "broken": sum(f.broken for f in findings),
    }
    return Item(_name(thing), links(findings), facts)


def audit_zoo(zoo: str, options: argparse.Namespace) -> list[Item]:
    """An item a cell; one that says why where there is no layout to be read."""
    try:
        place = open_place(zoo)
        found = survey(place)
    except CastoreError as e:
        return [Item(zoo, (Link("layout", "unreadable", str(e)),))]
    things = [(place, files) for files in found.cells]
    lone = [(place, path) for path in found.bases]
    items = list(audited(partial(audit, options, options.metric), things, _name, options.jobs))
    return items + list(audited(audit_base, lone, _name, options.jobs))


def audit_base(thing: tuple[Place, str]) -> Item:
    """The audit of a base that no pool was collected from."""
    return Item(_name(thing), links(verify_base(*thing)), {"files": 0})


def _name(thing: tuple[Place, CellFiles | str]) -> str:
    place, what = thing
    return f"{place.where}: {what if isinstance(what, str) else what.cell}"


def _metric(text: str) -> Callable[..., float]:
    module, _, name = text.partition(":")
    try:
        found: Callable[..., float] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be imported: {e}") from e
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Audit every zoo named; gives the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("zoos", nargs="+", metavar="ZOO")
    parser.add_argument("--metric", metavar="MODULE:FUNCTION", type=_metric)
    parser.add_argument("--sample", type=int, default=3, help="files a cell for --metric")
    parser.add_argument("--require-pin", action="store_true")
    parser.add_argument("--jobs", type=int, default=2, help="cells looked at at once")
    parser.add_argument("--json", action="store_true", help="one JSON document a line")
    options = parser.parse_args(words)
    items: list[Item] = []
    for zoo in options.zoos:
        items += audit_zoo(zoo, options)
    show(items, ("files", "generated", "frozen"), options.json)
    return exit_code(items)


if __name__ == "__main__":
    sys.exit(main())
