"""What a chain costs on reading: each file of a pool as a snapshot, the newest alone checked out.

    python benchmarks/chains.py FOLDER [--depths 0,1,4,8] [--rounds 5]

FOLDER holds files of one series (``collect_000.pth`` ...). For each depth all are committed, each
as a snapshot, with ``max_chain`` of that depth; then the newest of those whose chain is that deep
is checked out alone, beside a plain durable copy of it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from castore.commit import Options
from castore.frame import Header
from castore.repository import Repository


def plain(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    fd = os.open(target, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def depth_of(repository: Repository, snapshot: str) -> int:
    """How many further objects the deepest blob of the snapshot needs."""
    headers: dict[str, Header | None] = {}
    blobs = repository.tree(snapshot).blobs()
    return max(len(repository.store.chain(b, headers) or ()) - 1 for b in blobs)


def main() -> None:
    parser = argparse.ArgumentParser(description="what a chain costs on reading")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--depths", default="0,1,4,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("/tmp/castore-chains"))
    arguments = parser.parse_args()
    files = sorted(p for p in arguments.folder.rglob("*.pth") if "collect" in p.name)
    base = arguments.work / str(os.getpid())
    base.mkdir(parents=True)
    print("| depth | checkout s | plain copy s | ratio | stored/logical of the snapshots |")
    print("|---|---|---|---|---|")
    try:
        for depth in map(int, arguments.depths.split(",")):
            repository = Repository.init(base / f"depth{depth}")
            added = logical = 0
            deepest: tuple[int, Path, str] = (0, files[0], "")
            for path in files:
                done = repository.commit([path], options=Options(max_chain=depth))
                added, logical = added + done.added, logical + done.snapshot.size
                deepest = max(deepest, (depth_of(repository, str(done.name)), path, str(done.name)))
            at, newest, name = deepest
            ours, theirs = [], []
            for n in range(arguments.rounds + 1):
                out = base / f"out{depth}-{n}"
                ours.append(seconds(partial(repository.checkout, name, out)))
                theirs.append(seconds(partial(plain, newest, out / "copy")))
                print(n, ours[-1], theirs[-1], file=sys.stderr)
                shutil.rmtree(out)
            a, b = statistics.median(ours[1:]), statistics.median(theirs[1:])
            ratio = statistics.median(x / y for x, y in zip(ours[1:], theirs[1:], strict=True))
            print(f"| {at} | {a:.3f} | {b:.3f} | {ratio:.2f} | {added / logical:.4f} |")
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
