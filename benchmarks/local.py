"""Side by side on one folder of checkpoints: `cp` + fsync, castore, and installed peers.

    python benchmarks/local.py FOLDER [--rounds 5] [--work DIR] [--peers cp,castore,restic]

Peers: cp, castore, castore-none (no compression), restic, borg, zipnn.

Every round runs every system once, in rotating order, each in a fresh store; the figures are
medians over the rounds, and the ratios medians of per-round ratios to `cp` + fsync of the same
round, over all rounds and over those in which `cp` took at most 0.9 CPU seconds a GB. What a
round wrote is deleted at the end, or a round later where room is short, with a pause after it
(file systems discard late, and ext4 without a journal passes by the inodes deleted in the last
six minutes, one by one); one warm-up round is not counted.

A virtual machine may give free memory back to its host, and pay seconds a GB when it touches it
again, at random to this system or that. So before each the page cache is filled, by reading a file
with holes, until almost no memory is free: what anyone needs is then memory the machine has.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

STEPS = ("put", "again", "restore", "verify")


@dataclass
class Figures:
    """Wall and CPU seconds of each step in one round, and stored bytes."""

    wall: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    stored: int = 0


def cpu_now() -> float:
    uses = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in uses)


def timed(figures: Figures, step: str, work: Callable[[], object]) -> None:
    cpu, wall = cpu_now(), time.perf_counter()
    work()
    figures.wall[step] = time.perf_counter() - wall
    figures.cpu[step] = cpu_now() - cpu


def free_memory() -> int:
    """Bytes that nobody uses, not even as cache (Linux)."""
    with open("/proc/meminfo", encoding="ascii") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("MemFree"))


def fill_cache(work: Path, leave: int = 1 << 30, patience: float = 60.0) -> None:
    """Fill the page cache with holes until ``leave`` bytes are free, or for so many seconds."""
    holes, chunk = work / "holes", bytearray(1 << 20)
    if not holes.exists():
        with open(holes, "wb") as f:
            f.truncate(64 << 30)
    end = time.monotonic() + patience
    with open(holes, "rb", buffering=0) as f:
        f.seek(random.randrange(64) << 30)
        while free_memory() > leave and time.monotonic() < end:
            for _ in range(64):
                if not f.readinto(chunk):
                    f.seek(0)


def sync_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def size_of(root: Path) -> int:
    return sum(p.lstat().st_size for p in root.rglob("*") if p.is_file())


def same(a: Path, b: Path) -> bool:
    for path in (p for p in a.rglob("*") if p.is_file()):
        if not filecmp.cmp(path, b / path.relative_to(a), shallow=False):
            return False
    return True


def run(command: str, **environment: str) -> None:
    subprocess.run(
        command,
        shell=True,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )


def cp(source: Path, work: Path) -> Figures:
    f = Figures()

    def copy(a: Path, b: Path) -> None:
        run(f"cp -r {a} {b}")
        sync_tree(b)

    work.mkdir()
    timed(f, "put", lambda: copy(source, work / "a"))
    timed(f, "again", lambda: copy(source, work / "b"))
    timed(f, "restore", lambda: copy(work / "a", work / "c"))
    timed(f, "verify", lambda: run(f"cd {work}/a && find . -type f -exec cat {{}} + | cksum"))
    f.stored = size_of(work / "a")
    return f


def castore(compression: str) -> Callable[[Path, Path], Figures]:
    def go(source: Path, work: Path) -> Figures:
        from castore.check import check
        from castore.commit import Options
        from castore.repository import Repository

        f = Figures()
        work.mkdir()
        repository = Repository.init(work / "store")
        options = Options(compression=compression)  # type: ignore[arg-type]
        timed(f, "put", lambda: repository.commit([source], options=options))
        f.stored = size_of(work / "store")
        timed(f, "again", lambda: repository.commit([source], options=options))
        timed(f, "restore", lambda: repository.checkout("latest", work / "out"))
        timed(f, "verify", lambda: assert_clean(list(check(repository, read_data=True))))
        if not same(source, work / "out"):
            raise SystemExit("castore gave other bytes back")
        return f

    return go


def assert_clean(problems: list[object]) -> None:
    if problems:
        raise SystemExit(f"castore check: {problems[0]}")


def restic(source: Path, work: Path) -> Figures:
    f = Figures()
    work.mkdir()
    env = {
        "RESTIC_REPOSITORY": f"{work}/store", "RESTIC_PASSWORD": "x",
        "XDG_CACHE_HOME": f"{work}/cache",
    }  # fmt: skip
    run("restic -q init", **env)
    copy = work / "copy"
    shutil.copytree(source, copy)
    timed(f, "put", lambda: run(f"restic -q backup {source}", **env))
    f.stored = size_of(work / "store")
    timed(f, "again", lambda: run(f"restic -q backup {copy}", **env))
    timed(
        f,
        "restore",
        lambda: run(f"restic -q restore latest --path {source} --target {work}/out", **env),
    )
    timed(f, "verify", lambda: run("restic -q check --read-data", **env))
    return f


def borg(source: Path, work: Path) -> Figures:
    f = Figures()
    work.mkdir()
    env = {
        "BORG_BASE_DIR": f"{work}/base", "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
        "BORG_RELOCATED_REPO_ACCESS_IS_OK": "yes",
    }  # fmt: skip
    store = work / "store"
    run(f"borg init -e none {store}", **env)
    copy = work / "copy"
    shutil.copytree(source, copy)
    (work / "out").mkdir()
    timed(f, "put", lambda: run(f"borg create -C zstd,3 {store}::a {source}", **env))
    f.stored = size_of(store)
    timed(f, "again", lambda: run(f"borg create -C zstd,3 {store}::b {copy}", **env))
    timed(f, "restore", lambda: run(f"cd {work}/out && borg extract {store}::a", **env))
    timed(f, "verify", lambda: run(f"borg check --verify-data {store}", **env))
    return f


def zipnn(source: Path, work: Path) -> Figures:
    import zipnn as library

    f = Figures()
    (work / "out").mkdir(parents=True)
    files = sorted(p for p in source.rglob("*") if p.is_file())
    kind = "bfloat16" if "bf16" in source.name else "float32"

    def put() -> None:
        for i, path in enumerate(files):
            packer = library.ZipNN(input_format="byte", bytearray_dtype=kind, threads=2)
            (work / f"{i}.znn").write_bytes(packer.compress(bytearray(path.read_bytes())))
        sync_tree(work)

    def restore() -> None:
        for i in range(len(files)):
            packer = library.ZipNN(input_format="byte", threads=2)
            (work / "out" / str(i)).write_bytes(packer.decompress((work / f"{i}.znn").read_bytes()))
        sync_tree(work / "out")

    timed(f, "put", put)
    f.stored = size_of(work)
    timed(f, "restore", restore)
    return f


SYSTEMS: dict[str, Callable[[Path, Path], Figures]] = {
    "cp": cp, "castore": castore("auto"), "castore-none": castore("none"), "restic": restic,
    "borg": borg, "zipnn": zipnn,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("/tmp/castore-bench"))
    parser.add_argument("--pause", type=float, default=40.0, help="seconds after deleting")
    parser.add_argument("--peers", default="cp,castore,castore-none")
    arguments = parser.parse_args()
    source = arguments.folder.resolve()
    logical = size_of(source)
    names = arguments.peers.split(",")
    base = arguments.work / str(os.getpid())
    base.mkdir(parents=True)
    rounds: list[dict[str, Figures]] = []
    room = shutil.disk_usage(base).free
    try:
        one_round(source, base, names, -1)
        needed = room - shutil.disk_usage(base).free
        for n in range(arguments.rounds):
            rounds.append(one_round(source, base, names, n))
            if shutil.disk_usage(base).free < 2 * needed:
                clear(base, names, n - 1, arguments.pause)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    report(source, logical, names, rounds)


def one_round(source: Path, base: Path, names: list[str], n: int) -> dict[str, Figures]:
    """Every system once, each round another first."""
    result = {}
    for name in names[n % len(names) :] + names[: n % len(names)]:
        fill_cache(base)
        os.sync()
        result[name] = SYSTEMS[name](source, base / f"{n}-{name}")
    line = {k: {s: round(w, 2) for s, w in f.wall.items()} for k, f in result.items()}
    print(f"round {n}: {json.dumps(line)}", file=sys.stderr, flush=True)
    return result


def clear(base: Path, names: list[str], n: int, pause: float) -> None:
    """Delete what round ``n`` wrote, and let the file system get over it."""
    for name in names:
        shutil.rmtree(base / f"{n}-{name}", ignore_errors=True)
    os.sync()
    time.sleep(pause)


def report(source: Path, logical: int, names: list[str], rounds: list[dict[str, Figures]]) -> None:
    """Medians over all rounds, then over those in which `cp` was at its best."""
    kept = [r for r in rounds if r["cp"].cpu["put"] <= 0.9 * logical / 1e9]
    print(f"\n`{source.name}`, {logical / 1e9:.2f} GB, {len(kept)} of {len(rounds)} rounds kept")
    for chosen, which in ((rounds, "all rounds"), (kept, "`cp` at its best")):
        if chosen:
            print(f"\n{which}:\n")
            table(logical, names, chosen)


def table(logical: int, names: list[str], kept: list[dict[str, Figures]]) -> None:
    print(
        "| system | stored/logical | " + " | ".join(f"{s} s (x cp) cpu s/GB" for s in STEPS) + " |"
    )
    print("|---|---|" + "---|" * len(STEPS))
    for name in names:
        cells = [f"{statistics.median(r[name].stored for r in kept) / logical:.4f}"]
        for step in STEPS:
            if step not in kept[0][name].wall:
                cells.append("-")
                continue
            wall = statistics.median(r[name].wall[step] for r in kept)
            base = "put" if step == "verify" else step
            ratio = statistics.median(r[name].wall[step] / r["cp"].wall[base] for r in kept)
            cpu = statistics.median(r[name].cpu[step] for r in kept) / (logical / 1e9)
            cells.append(f"{wall:.2f} ({ratio:.2f}) {cpu:.2f}")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
