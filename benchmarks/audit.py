"""How long, how large and how dear an audit is: a synthetic repository, checked by real code.

python benchmarks/audit.py [--objects 10000 100000 1000000] [--workers 0 1 2] [--parts 1 16]

Makes a repository of that many raw objects of a few bytes (objects and trees written as the local
backend names them, snapshots by the real code), checks it (structure; ``--read-data``) in this
process (0) and by local worker processes, and removes it. Each measurement runs in a process of
its own; memory is its peak above what it had when everything was imported. With ``--parts N``
(several may be given) only part 1 of N is checked, the one that also looks for names that are in
nobody's folder; figures "an object" are then for an object of the part.

Then projects an audit of ``--projected`` objects on S3, as one and in parts: memory of a caller,
requests, hours and money, from the requests that a check makes for an object, and the assumptions
that the options name. Objects are taken as stored without bases. Prices are list prices of S3
Standard in us-east-1, as of 2026-11.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

PRICE_GET = 0.40e-6  # US dollars a GET or HEAD request
PRICE_LIST = 5.00e-6  # US dollars a LIST request, 1000 names each
PRICE_OUT = 0.09  # US dollars a GB that leaves the region; nothing within it

TREE = 2_000  # objects a tree names
ENTRIES = 75_000  # of a tree that are decoded a CPU second, as measured on the reference machine


class Counting:
    """A backend that counts requests and bytes as S3 would be asked for them."""

    def __init__(self, inner: Any):
        self._inner, self.counts = inner, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        data: bytes = self._inner.get(name, start, stop)
        self.counts["get"] += 1
        self.counts["bytes"] += len(data)
        return data

    def list(self, prefix: str, after: str | None = None, limit: int | None = None) -> Any:
        self.counts["list"] += 1
        for i, stat in enumerate(self._inner.list(prefix, after, limit), 1):
            self.counts["list"] += i % 1000 == 0
            yield stat


def make(root: Path, objects: int) -> None:
    """A repository of ``objects`` objects, trees included, each tree with a snapshot."""
    from castore import Repository, Snapshot
    from castore.digest import digest_of
    from castore.objects import object_name
    from castore.snapshot import name_of
    from castore.tree import File, Slice, Tree

    repository = Repository.init(root)
    for i in range(256):
        (root / "objects" / f"{i:02x}").mkdir(parents=True)
    number = 0
    while number < objects:
        files = {}
        for _ in range(min(TREE, objects - number - 1)):
            content = number.to_bytes(8, "little")
            digest = _put(root, content)
            files[f"f{number:09d}"] = File(8, "0" * 64, False, (Slice(digest, 0, 8),))
            number += 1
        tree = Tree(files).encode()
        number += 1
        data = Snapshot(_put(root, tree), number, "main", files=len(files)).encode()
        repository.backend.create(name_of(data, "main", "snapshot", number).path, data)
    assert object_name(digest_of(b"")).startswith("objects/")


def _put(root: Path, content: bytes) -> str:
    """Neither synced nor made all at once: nobody reads it before it is whole."""
    from castore import frame
    from castore.digest import digest_of
    from castore.objects import object_name

    digest = digest_of(content)
    with open(root / object_name(digest), "wb") as file:
        file.writelines(frame.raw(content, 1))
    return digest


def _memory(pid: int, field: str) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(x.split()[1]) / 1024 for x in lines if x.startswith(field)), 0.0)


def _children() -> list[int]:
    own = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(pid) for pid in own.split()]


def _cpu() -> float:
    """Seconds of this process and of those it has waited for."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(resource.getrusage(k).ru_utime + resource.getrusage(k).ru_stime for k in kinds)


def measure(root: Path, workers: int, read_data: bool, parts: int) -> dict[str, float]:
    """One check, in this process; what it took."""
    from castore import Repository
    from castore.check import CheckReport, check
    from castore.workers import opened

    repository = Repository.open(root)
    counting = Counting(repository.backend)
    if not workers:
        repository = Repository(counting, repository.id)
    before, largest, stop = _memory(os.getpid(), "VmRSS"), [0.0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.2):
            largest.append(max((_memory(pid, "VmHWM") for pid in _children()), default=0.0))

    watcher = threading.Thread(target=watch)
    watcher.start()
    report, began, cpu = CheckReport(), time.monotonic(), _cpu()
    with opened(workers or None) as executor:
        found = check(
            repository, read_data=read_data, part=(1, parts), report=report, executor=executor
        )
        problems = list(found)
    seconds = time.monotonic() - began
    stop.set()
    watcher.join()
    assert not problems, problems[:3]
    return {
        "objects": report.objects,
        "seconds": seconds,
        "cpu": _cpu() - cpu,
        "memory": _memory(os.getpid(), "VmHWM") - before,
        "worker": max(largest),
        **{k: counting.counts[k] for k in ("get", "list", "bytes")},
    }


def measured(
    root: Path, whats: Sequence[str], workers: Sequence[int], parts: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Every way to check the repository, each in a fresh process."""
    for what, of in product(whats, parts):
        read_data = what == "read-data"
        for count in workers:
            words = [str(root), "--measure", str(count), *(["--read-data"] if read_data else [])]
            words += ["--parts", str(of)]
            done = subprocess.run(
                [sys.executable, __file__, "--work", *words], capture_output=True, text=True
            )
            if done.returncode:
                raise SystemExit(done.stderr)
            found = json.loads(done.stdout)
            yield {"what": what, "part": f"1/{of}", "workers": count, **found}


def show(found: dict[str, Any]) -> None:
    n = found["objects"]
    kept = f"{found['memory']:9.0f} {found['memory'] * 1e6 / n:8.0f} {found['worker']:9.0f}"
    requests = f"{found['get'] / n:5.2f} {found['list'] / n:7.4f} {found['bytes'] / n:6.0f}"
    print(
        f"{n:>9} {found['what']:<10} {found['part']:>6} {found['workers']:>7}"
        f" {found['seconds']:8.1f}"
        f" {n / found['seconds']:9.0f} {found['cpu'] * 1e6 / n:8.0f} {kept}"
        f" {requests if not found['workers'] else '':>20}",
        flush=True,
    )


def project(options: argparse.Namespace, parts: int) -> None:
    """Memory, requests, hours and money of an audit on S3, all parts together."""
    n, size, rate = options.projected, options.bytes_per_object, options.gets_per_second
    lists, trees = n / 1000, parts * n * options.bytes_per_entry
    memory, listing = n / parts * options.memory_per_object, lists / options.lists_per_second
    print(
        f"{parts} part{'s' * (parts > 1)}: {memory / 1e9:.3g} GB a caller, lists for"
        f" {listing / parts / 3600:.3g} h; {trees / 1e12:.3g} TB of trees"
    )
    for what, gets, data in (("structure", n, 64 * n), ("read-data", 2 * n, n * (64 + size))):
        moved, gets = trees + data, gets + parts * n / TREE
        money = gets * PRICE_GET + lists * PRICE_LIST
        out = moved / 1e9 * PRICE_OUT
        print(
            f"    {what}: {gets:.2e} GET, {lists:.1e} LIST, {moved / 1e12:.4g} TB: {money:,.0f} USD"
            f" within the region ({out:,.0f} more from outside)"
        )
        work = max(gets / rate, moved / 1e6 / options.mb_per_second)
        work += parts * n / options.entries_per_second
        for workers in options.projected_workers:
            if workers >= parts:
                hours = (listing / parts + work / workers) / 3600
                print(f"        {workers:>5} workers: {hours:10.1f} h")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--objects", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    ways = ["structure", "read-data"]
    parser.add_argument("--what", nargs="+", choices=ways, default=ways)
    parser.add_argument("--parts", type=int, nargs="+", default=[1])
    parser.add_argument("--work", type=Path, default=Path("/tmp/castore-audit"))
    parser.add_argument("--projected", type=float, default=1e9)
    parser.add_argument("--bytes-per-object", type=float, default=1e6)
    parser.add_argument("--gets-per-second", type=float, default=500, help="of one worker")
    parser.add_argument("--mb-per-second", type=float, default=400, help="of one worker")
    parser.add_argument("--lists-per-second", type=float, default=10, help="of a caller")
    parser.add_argument("--entries-per-second", type=float, default=ENTRIES, help="of one worker")
    parser.add_argument("--bytes-per-entry", type=float, default=229, help="of a tree")
    parser.add_argument("--memory-per-object", type=float, default=280, help="bytes of a caller")
    parser.add_argument("--projected-parts", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--projected-workers", type=int, nargs="+", default=[1, 16, 100, 1000])
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--read-data", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        [parts] = options.parts
        print(json.dumps(measure(options.work, options.measure, options.read_data, parts)))
        return
    print(
        "  objects what         part workers  seconds objects/s CPU us/o memory MB B/object",
        "worker MB an object: GET LIST bytes",
    )
    for count in options.objects:
        root = options.work / f"{os.getpid()}-{count}"
        try:
            make(root, count)
            for found in measured(root, options.what, options.workers, options.parts):
                show(found)
        finally:
            shutil.rmtree(root, ignore_errors=True)
    n, size = options.projected, options.bytes_per_object
    rates = f"{options.gets_per_second:g} GETs, {options.mb_per_second:g} MB and"
    print(f"\n{n:.0e} objects of {size / 1e6:g} MB on S3; a worker: {rates}", end=" ")
    print(f"{options.entries_per_second:g} entries of trees a second")
    for parts in options.projected_parts:
        project(options, parts)


if __name__ == "__main__":
    main()
