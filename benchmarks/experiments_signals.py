"""Curves: how fast rows go in, how long a call blocks, how long a curve takes to read.

    python benchmarks/experiments_signals.py [ROWS] [FOLDER]

ROWS of `signals` (10 000 000 by default) in 1 000 curves of ROWS / 1 000 points, flushed in
64 snapshots. Prints one line a figure. "block" is the longest time one call of `Log.log` took.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from castore import Repository
from castore_experiments.signals import Curves, Database, Log, Source

HASH = "0123456789abcdef01234567"
CURVES = 1000
FLUSHES = 64


def say(what: str, value: float, unit: str) -> None:
    print(f"{what:52} {value:14,.1f} {unit}", flush=True)


@contextmanager
def timed(what: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    say(what, (time.perf_counter() - wall) * 1e3, "ms")
    say(f"  {what}, CPU", (time.process_time() - cpu) * 1e3, "ms")


def scalars(repository: Repository, folder: Path, rows: int) -> None:
    """Single values, as a loop logs them."""
    took = np.empty(rows)
    with Log(repository, "scalars", folder) as log:
        begun = time.perf_counter()
        for i in range(rows):
            at = time.perf_counter()
            log.log("loss", 0.5, i, HASH)
            took[i] = time.perf_counter() - at
        log.flush()
        say("scalars, in the repository", rows / (time.perf_counter() - begun), "rows/s")
    say("  median call", float(np.median(took)) * 1e6, "us")
    say("  99.9 % of calls below", float(np.quantile(took, 0.999)) * 1e6, "us")
    say("  longest call (block)", float(took.max()) * 1e3, "ms")


def samples(repository: Repository, folder: Path, steps: int, batch: int, *, columns: bool) -> None:
    """Values of ``batch`` samples a step, as a mapping or as two columns."""
    ids = [f"sample-{i}" for i in range(batch)]
    values = np.random.default_rng(0).standard_normal(batch)
    given = (np.arange(batch), values) if columns else dict(zip(ids, values.tolist(), strict=True))
    kind = "columns" if columns else "mapping"
    took = []
    with Log(repository, f"samples-{kind}", folder) as log:
        begun = time.perf_counter()
        for step in range(steps):
            at = time.perf_counter()
            log.log("loss", 0.5, step, HASH, per_sample=given)
            took.append(time.perf_counter() - at)
        log.flush()
        rate = steps * batch / (time.perf_counter() - begun)
    say(f"per_sample {kind} of {batch}, in the repository", rate, "rows/s")
    say("  median call", float(np.median(took)) * 1e3, "ms")


def history(repository: Repository, folder: Path, rows: int) -> None:
    """A long training: every metric at every step, flushed as it goes."""
    points = rows // CURVES
    names = [f"metric/{i:04d}" for i in range(CURVES)]
    with Log(repository, "history", folder) as log, timed(f"log and flush {rows:,} rows"):
        for step in range(points):
            for name in names:
                log.log(name, step * 1e-3, step, HASH)
            if step % max(points // FLUSHES, 1) == 0:
                log.flush()


def reading(repository: Repository, rows: int) -> None:
    """One curve, by a new reader and again."""
    gc.collect()
    say("snapshots of the history", len(list(repository.snapshots("history.signals"))), "")
    curves = Curves([Source(repository, "history")])
    with timed(f"first curve of {rows // CURVES:,} points of {rows:,} rows"):
        frame = curves.signals("metric/0500", HASH)
    assert len(frame) == rows // CURVES
    for name in ("metric/0500", "metric/0100"):
        with timed(f"then {name}"):
            curves.signals(name, HASH)


def database(repository: Repository, folder: Path) -> None:
    """``loggers.duckdb``: from nothing, and one checkpoint later."""
    curves = Curves([Source(repository, "history")])
    found = Database(folder / "loggers.duckdb", folder / "state.json")
    with timed("loggers.duckdb from nothing"):
        found.update(curves)
    with Log(repository, "history", folder / "wal") as log:
        log.log("loss", 1.0, 1, HASH)
        log.flush()
        with timed("loggers.duckdb one checkpoint later"):
            found.update(curves)
    say("  its size", found.path.stat().st_size / 1e6, "MB")


def main(rows: int, folder: Path) -> None:
    repository = Repository.init(folder / "store")
    wal = folder / "wal"
    scalars(repository, wal, 300_000)
    samples(repository, wal, 200, 10_000, columns=False)
    samples(repository, wal, 200, 10_000, columns=True)
    history(repository, wal, rows)
    reading(repository, rows)
    database(repository, folder)


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as place:
        main(count, Path(place))
