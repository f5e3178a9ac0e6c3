"""Check many repositories, store and layouts, and report in one table. For cron.

    python scripts/audit_repository.py /data/store s3://bucket/store --json

Exit codes: 0 all sound; 3 problems found; 13 (or another error's own code) when a repository could
not be looked at and no problem was found in the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from _report import safe

from castore import CastoreError, Repository
from castore.check import CheckReport, Problem, check

PROBLEMS = 3
KINDS = ("missing", "corrupt", "unreadable", "malformed", "layout")


@dataclass
class Audit:
    """What was found in one repository; ``error`` where it could not be looked at."""

    url: str
    report: CheckReport = field(default_factory=CheckReport)
    problems: list[Problem] = field(default_factory=list)
    error: CastoreError | None = None
    seconds: float = 0.0

    @property
    def status(self) -> str:
        """One word: sound, damaged or failed."""
        if self.error is not None:
            return "failed"
        return "damaged" if self.problems else "sound"


def audit(url: str, read_data: bool) -> Audit:
    """Check one repository; its errors are kept, so that the others get their turn."""
    result, began = Audit(url), time.monotonic()
    try:
        repository = Repository.open(url)
        for problem in check(repository, read_data=read_data, layout=True, report=result.report):
            result.problems.append(problem)
    except CastoreError as e:
        result.error = e
    except Exception as e:
        result.error = CastoreError(f"internal error: {type(e).__name__}: {e}")
    result.seconds = time.monotonic() - began
    return result


def show(audits: Sequence[Audit]) -> None:
    """One row a repository, then every problem with what needs it."""
    head = ["REPOSITORY", "STATUS", "SNAPSHOTS", "OBJECTS", "BYTES READ", *map(str.upper, KINDS)]
    rows = [head, *map(_row, audits)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    for one in audits:
        if one.error is not None:
            print("\n" + safe(f"{one.url}: {one.error}"))
        for problem in one.problems:
            print("\n" + safe(f"{one.url}: {problem.kind}: {problem.object}: {problem.detail}"))
            for snapshot, path in problem.needed_by:
                print(safe(f"  needed by {snapshot}{':' + path if path else ''}"))


def _row(one: Audit) -> list[str]:
    kinds = Counter(p.kind for p in one.problems)
    report = one.report
    counts = [report.snapshots, report.objects, report.bytes_read, *(kinds[k] for k in KINDS)]
    return [one.url, one.status, *map(str, counts)]


def document(one: Audit) -> str:
    """One line of JSON."""
    return json.dumps(
        {
            "type": "audit",
            "repository": one.url,
            "status": one.status,
            "snapshots": one.report.snapshots,
            "objects": one.report.objects,
            "bytes_read": one.report.bytes_read,
            "unreferenced": one.report.unreferenced,
            "unstable": one.report.unstable,
            "seconds": round(one.seconds, 3),
            "error": None if one.error is None else str(one.error),
            "problems": [
                {"kind": p.kind, "object": p.object, "detail": p.detail, "needed_by": p.needed_by}
                for p in one.problems
            ],
        }
    )


def main(words: Sequence[str] | None = None) -> int:
    """Audit every repository named; gives the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--read-data", action="store_true", help="read and hash every stored byte")
    parser.add_argument("--json", action="store_true", help="one JSON document a line")
    options = parser.parse_args(words)
    audits = []
    for url in options.urls:
        print(f"auditing {url}", file=sys.stderr)
        audits.append(audit(url, options.read_data))
        if options.json:
            print(document(audits[-1]), flush=True)
    if not options.json:
        show(audits)
    if any(one.problems for one in audits):
        return PROBLEMS
    return next((one.error.exit_code for one in audits if one.error is not None), 0)


if __name__ == "__main__":
    sys.exit(main())
