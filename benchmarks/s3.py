"""castore on a real S3 server beside boto3's transfer manager and plain s3fs, in one run.

    python benchmarks/s3.py FOLDER [--rounds 5] [--work DIR]

The server (SeaweedFS) runs on this machine and shares its cores. boto3 moves the very frames
that castore stored. The small-object part is 1 000 files of 64 KiB beside s3fs `pipe` and `cat`.

Before each step on the large folder the page cache is filled, as `local.py` does and says why; a
round writes four times the folder's bytes, which are deleted at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from local import fill_cache

from castore.testing.s3server import S3Server


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def large(source: Path, work: Path, n: int) -> dict[str, float]:
    import boto3
    from s3transfer.manager import TransferManager

    from castore.copy import copy
    from castore.repository import Repository

    times: dict[str, float] = {}

    def timed(step: str, work_of_it: Callable[[], object]) -> None:
        fill_cache(work, patience=10)
        times[step] = seconds(work_of_it)

    remote = Repository.init(f"s3://test/r{n}")
    timed("commit", lambda: remote.commit([source]))
    timed("checkout", lambda: remote.checkout("latest", work / f"out{n}"))
    local = Repository.init(work / f"local{n}")
    timed("copy down", lambda: copy(remote, local))
    other = Repository.init(f"s3://test/q{n}")
    timed("copy up", lambda: copy(local, other))
    frames = [p for p in (work / f"local{n}" / "objects").rglob("*") if p.is_file()]
    client = boto3.client("s3")

    def up() -> None:
        with TransferManager(client) as manager:
            for f in [manager.upload(str(p), "test", f"b{n}/{p.name}") for p in frames]:
                f.result()

    def down() -> None:
        out = work / f"boto{n}"
        out.mkdir()
        with TransferManager(client) as manager:
            for f in [
                manager.download("test", f"b{n}/{p.name}", str(out / p.name)) for p in frames
            ]:
                f.result()

    timed("boto3 up", up)
    timed("boto3 down", down)
    return times


def small(work: Path, n: int) -> dict[str, float]:
    import s3fs

    from castore.commit import Options
    from castore.repository import Repository

    folder = work / f"small{n}"
    folder.mkdir()
    for i in range(1000):
        (folder / f"{i:04d}.bin").write_bytes(os.urandom(64 << 10))
    data = {f"test/p{n}/{p.name}": p.read_bytes() for p in folder.iterdir()}
    fs = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    remote = Repository.init(f"s3://test/s{n}")
    return {
        "small commit": seconds(
            lambda: remote.commit([folder], options=Options(compression="none"))
        ),
        "small checkout": seconds(lambda: remote.checkout("latest", work / f"smallout{n}")),
        "s3fs pipe": seconds(lambda: fs.pipe(data)),
        "s3fs cat": seconds(lambda: fs.cat(list(data))),
    }


PAIRS = [
    ("commit", "boto3 up"), ("checkout", "boto3 down"), ("copy down", "boto3 down"),
    ("copy up", "boto3 up"), ("small commit", "s3fs pipe"), ("small checkout", "s3fs cat"),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="castore on S3 beside boto3 and s3fs")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("/tmp/castore-s3"))
    arguments = parser.parse_args()
    work = arguments.work / str(os.getpid())
    work.mkdir(parents=True)
    rounds = []
    try:
        with S3Server(dir=work / "server", bucket="test") as server:
            os.environ.update(server.env())
            for n in range(arguments.rounds):
                rounds.append(large(arguments.folder, work, n) | small(work, n))
                print({k: round(v, 2) for k, v in rounds[-1].items()}, flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print("\n| castore | s | peer | s | ratio |\n|---|---|---|---|---|")
    for ours, theirs in PAIRS:
        a, b = (statistics.median(r[k] for r in rounds) for k in (ours, theirs))
        ratio = statistics.median(r[ours] / r[theirs] for r in rounds)
        print(f"| {ours} | {a:.2f} | {theirs} | {b:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
