"""Many processes commit, forget and prune in one repository at once, without grace; then a check.

    python scripts/stress.py store --seconds 60 --processes 8
    python scripts/stress.py s3://bucket/store --seconds 60

The repository is made if it is not there. Every process keeps what it was told: each commit that
was answered as done must be listed, forgotten by somebody, or both readable in the end. Exit code
3 where anything is lost.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import castore
from castore.check import check
from castore.errors import BackendError, NotFoundError, RepositoryNotFoundError
from castore.prune import prune
from castore.publish import Patience
from castore.repository import Repository
from castore.snapshot import SnapshotName
from castore.source import Draft, MemoryFile

_BLOB = 100_000  # bytes: of its own, and worth a delta
_CONTENTS = 12
_SWEEP, _MARGIN, _OVERDUE = 8.0, 2.0, 3.0


@dataclass(slots=True)
class Told:
    """One process's story. ``committed`` and ``forgotten`` are names, as text."""

    done: Counter[str] = field(default_factory=Counter)
    committed: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def content(i: int) -> bytes:
    """Blobs that nothing packs and that are small differences to one another."""
    return i.to_bytes(8, "little") * 16 + random.Random(0).randbytes(_BLOB - 128)


def open_or_make(url: str) -> Repository:
    try:
        found = Repository.open(url)
    except RepositoryNotFoundError:
        found = Repository.init(url)
    return Repository(found.backend, found.id, Patience(time.sleep, _MARGIN, _OVERDUE, 0.1))


def work(url: str, seed: int, seconds: float, start: Barrier, out: Queue[Told]) -> None:
    """Random operations until the time is up."""
    repository, rng, told = open_or_make(url), random.Random(seed), Told()
    start.wait()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        act = rng.choices([_commit, _forget, _unforget, _prune], [6, 5, 1, 1])[0]
        try:
            act(repository, rng, told)
        except NotFoundError:
            told.done[f"{act.__name__[1:]} refused"] += 1
        except BackendError as e:
            told.errors.append(f"{act.__name__[1:]}: {e}")
    out.put(told)


def _commit(repository: Repository, rng: random.Random, told: Told) -> None:
    chosen = rng.sample(range(_CONTENTS), rng.randint(1, 3))
    draft = Draft({f"f{i}": MemoryFile(content(i)) for i in chosen}, key=f"k{rng.randrange(99)}")
    name = repository.commit(draft, namespace=rng.choice(["a", "b"])).name
    told.committed.append(name.path)
    told.done["commit"] += 1


def _any(rng: random.Random, names: list[SnapshotName]) -> SnapshotName:
    if not names:
        raise NotFoundError("nothing there yet")
    return rng.choice(names)


def _forget(repository: Repository, rng: random.Random, told: Told) -> None:
    name = _any(rng, list(repository.snapshots()))
    told.forgotten.append(name.path)
    repository.forget(name)
    told.done["forget"] += 1


def _unforget(repository: Repository, rng: random.Random, told: Told) -> None:
    told.committed.append(repository.unforget(_any(rng, list(repository.forgotten()))).path)
    told.done["unforget"] += 1


def _prune(repository: Repository, rng: random.Random, told: Told) -> None:
    told.done["objects deleted"] += prune(repository, grace=0.0, sweep=_SWEEP).objects
    told.done["prune"] += 1


def stress(url: str, seconds: float, processes: int, seed: int) -> dict[str, Any]:
    """What was done, what is lost, and the problems that a check of all data found."""
    repository = open_or_make(url)
    context = multiprocessing.get_context("spawn")
    out: Queue[Told] = context.Queue()
    start = context.Barrier(processes)
    running = [
        context.Process(target=work, args=(url, seed + i, seconds, start, out))
        for i in range(processes)
    ]
    for process in running:
        process.start()
    stories = [out.get(timeout=seconds + 240) for _ in running]
    for process in running:
        process.join()
    listed = {n.path for n in repository.snapshots()}
    forgotten = {n for s in stories for n in s.forgotten}
    told = {n for s in stories for n in s.committed}
    done = sum((s.done for s in stories), Counter[str]())
    problems = [str(p) for p in check(repository, read_data=True)]
    return {
        "castore": castore.__version__,
        "url": repository.url,
        "done": dict(sorted(done.items())),
        "snapshots": len(listed),
        "lost": sorted(told - listed - forgotten),
        "problems": problems,
        "errors": [e for s in stories for e in s.errors],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    url = args.url if "://" in args.url else str(Path(args.url).absolute())
    report = stress(url, args.seconds, args.processes, args.seed)
    print(json.dumps(report))
    return 3 if report["lost"] or report["problems"] or report["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
