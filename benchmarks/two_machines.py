"""Two machines on one root for a while, one with a clock ten minutes fast; what came of it.

    python benchmarks/two_machines.py URL [--seconds 60] [--work DIR]

URL is a fresh root, local or on S3; ``seaweedfs`` starts a server of its own in DIR. Prints how
much was done, then every broken promise; ends with 1 if there is one. The work and the judgement
are those of ``tests/drivers/experiments/machines.py``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from castore.testing.s3server import S3Server

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.drivers.experiments import machines


def measured(url: str, seconds: float) -> int:
    """Run it and print the figures; the number of broken promises."""
    base = machines.start(url)
    answers = machines.run(url, seconds)
    problems = list(machines.judge(url, base, answers))
    for name, count in machines.counts(answers).items():
        print(f"{name:24} {count}")
    print(f"{'broken promises':24} {len(problems)}")
    for problem in problems:
        print(f"  {problem}")
    return len(problems)


def main() -> None:
    parser = argparse.ArgumentParser(description="two machines on one root")
    parser.add_argument("url", help="a fresh root, or 'seaweedfs'")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--work", type=Path, default=Path("/tmp/castore-machines"))
    arguments = parser.parse_args()
    os.environ.setdefault("XDG_STATE_HOME", str(arguments.work / "state"))
    if arguments.url != "seaweedfs":
        sys.exit(min(1, measured(arguments.url, arguments.seconds)))
    with S3Server(dir=arguments.work / "server", bucket="machines") as server:
        os.environ.update(server.env())
        sys.exit(min(1, measured("s3://machines/root", arguments.seconds)))


if __name__ == "__main__":
    main()
