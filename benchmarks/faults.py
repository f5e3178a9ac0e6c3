"""Faults for as long as you like: a storm on a real S3 server, and power cuts on a disk.

    python -m benchmarks.faults --seconds 600 --seed 1
    python -m benchmarks.faults --power-cuts 20

Each operation is judged (`tests/storm.py`, `tests/test_disk_faults.py`); the first loss ends it
with a traceback. At the end it prints what was injected, run and verified.
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from castore.testing.proxy import FaultProxy, Weather
from castore.testing.s3server import S3Server
from tests.power_cut import lay_state
from tests.storm import KINDS, Storm
from tests.test_disk_faults import judge, power_cuts

_ROUND = 60.0  # seconds: a fresh repository from time to time, so that each stays quick to verify


def storms(seconds: float, seed: int, rate: float) -> None:
    """Storm after storm until the time is over."""
    injected, operations, errors = Counter[str](), Counter[str](), Counter[str]()
    verified = requests = 0
    end = time.monotonic() + seconds
    with S3Server(bucket="test") as server:
        options = server.fsspec_options()
        while time.monotonic() < end:
            seed += 1
            with FaultProxy(server.ports[0]) as proxy, TemporaryDirectory() as folder:
                weather = Weather(seed, rate, KINDS)
                storm = Storm(f"s3://test/{seed}", options, proxy, weather, Path(folder), seed)
                stop = min(end, time.monotonic() + _ROUND)
                while time.monotonic() < stop:
                    storm.step()
                storm.end()
                injected += proxy.injected
                operations, errors = operations + storm.operations, errors + storm.errors
                verified, requests = verified + storm.verified, requests + len(proxy.log)
            print(
                f"seed {seed}: {injected.total()} faults in {requests} requests,"
                f" {operations.total()} operations, {errors.total()} errors told,"
                f" {verified} bytes verified, 0 lost",
                flush=True,
            )
    print(f"injected   {dict(injected)}\noperations {dict(operations)}\nerrors     {dict(errors)}")


def cuts(rounds: int, seed: int) -> None:
    """Every state that was found, of many runs."""
    judged = 0
    for i in range(seed, seed + rounds):
        with TemporaryDirectory(dir="/dev/shm") as folder:
            root = Path(folder)
            for state, promised in power_cuts(root / "store", random.Random(i)).states:
                judge(lay_state(state, root / "cut"), promised)
                shutil.rmtree(root / "cut")
                judged += 1
        print(f"seed {i}: {judged} states of a disk after a power cut, 0 lost", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=0.08, help="share of requests that break")
    parser.add_argument("--power-cuts", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    if a.seconds:
        storms(a.seconds, a.seed, a.rate)
    if a.power_cuts:
        cuts(a.power_cuts, a.seed)


if __name__ == "__main__":
    main()
