"""Peak resident memory above import, for large files of random floats.

    python benchmarks/memory.py [--gib 4] [--files 1] [--work DIR]

``--files N`` shares the bytes among N files of a series, each a small step from the one before, so
that all but the first become deltas.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

MAKE = """
import sys, numpy as np
folder, mib, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
g = np.random.default_rng(0)
files = [open(f"{folder}/x_{i}.bin", "wb") for i in range(count)]
for _ in range(mib // count // 16):
    a = g.standard_normal(4 << 20, dtype=np.float32)
    for f in files:
        f.write(a.tobytes())
        a *= 1 + np.float32(1e-4) * g.standard_normal(4 << 20, dtype=np.float32)
"""


def resident() -> float:
    """MB, from /proc (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise SystemExit("no VmRSS in /proc/self/status")


def peak_of(work: Callable[[], object]) -> float:
    """The largest resident size while ``work`` runs, sampled every 20 ms."""
    seen, stop = [resident()], threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            seen.append(resident())

    thread = threading.Thread(target=watch)
    thread.start()
    work()
    stop.set()
    thread.join()
    return max(seen)


def main() -> None:
    parser = argparse.ArgumentParser(description="peak memory of the four commands")
    parser.add_argument("--gib", type=int, default=4)
    parser.add_argument("--files", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("/tmp/castore-memory"))
    arguments = parser.parse_args()
    work = arguments.work / str(os.getpid())
    (work / "source").mkdir(parents=True)
    sizes = [str(arguments.gib << 10), str(arguments.files)]
    subprocess.run([sys.executable, "-c", MAKE, str(work / "source"), *sizes], check=True)
    from castore.check import check
    from castore.copy import copy
    from castore.repository import Repository

    try:
        store, other = Repository.init(work / "store"), Repository.init(work / "other")
        base = resident()
        what = f"{arguments.gib} GiB in {arguments.files}"
        print(f"| command on {what} | peak MB above import | s |\n|---|---|---|")
        steps: dict[str, Callable[[], object]] = {
            "commit": lambda: store.commit([work / "source"]),
            "checkout": lambda: store.checkout("latest", work / "out"),
            "check --read-data": lambda: list(check(store, read_data=True)),
            "copy": lambda: copy(store, other),
        }
        for name, step in steps.items():
            start = time.perf_counter()
            peak = peak_of(step)
            print(f"| {name} | {peak - base:.0f} | {time.perf_counter() - start:.1f} |")
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
