"""Check a repository, and copy it, with any executor of `concurrent.futures`.

Threads share this process; `castore.workers.Processes` starts processes and replaces those that
die. Whoever does the work, problems are the same and in the same order.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from castore import Repository
from castore.check import CheckReport, check
from castore.copy import copy
from castore.workers import Processes


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        run.mkdir()
        for step in range(5):
            (run / f"step_{step}.bin").write_bytes(os.urandom(100_000))
        store = Repository.init(Path(folder, "store"))
        store.commit([run], namespace="me")

        state, report = str(Path(folder, "check.state")), CheckReport()
        with Processes(1) as workers:
            found = list(check(store, read_data=True, state=state, report=report, executor=workers))
        assert found == []

        mirror = Repository.init(Path(folder, "mirror"))
        with ThreadPoolExecutor(4) as threads:
            copied = copy(store, mirror, executor=threads)
        assert (copied.snapshots, copied.objects) == (1, report.objects)

        victim = max(Path(folder, "store", "objects").rglob("*"), key=lambda p: p.stat().st_size)
        victim.unlink()
        with ThreadPoolExecutor(4) as threads:
            [problem] = check(store, executor=threads)
        assert (problem.kind, problem.object) == ("missing", victim.name)


if __name__ == "__main__":
    main()
