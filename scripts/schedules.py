"""Random schedules of castore's own commits, forgets, copies and prunes over a model of a store.

    python scripts/schedules.py --kind s3 --setting crowd --first 0 --count 100000

Prints counts, and each schedule that lost something with its seed; `--trace SEED` prints one
schedule call by call. Exit code 3 where anything was lost. Needs the ``greenlet`` package.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter

from castore.testing.inline import one_thread
from castore.testing.protocol import CROWD, FEW, Kind, Setting, run, run_many

SETTINGS = {"crowd": CROWD, "few": FEW}
_CHUNK = 5_000


def many(kind: Kind, setting: Setting, seeds: range) -> tuple[list[str], Counter[str]]:
    """What went wrong, and what was done, chunk by chunk: what is remembered is let go between."""
    wrong: list[str] = []
    done: Counter[str] = Counter()
    for first in range(seeds.start, seeds.stop, _CHUNK):
        with one_thread():
            part = range(first, min(first + _CHUNK, seeds.stop))
            bad, counts = run_many(part, kind, setting, stop=_CHUNK)
        wrong += [f"seed {o.seed}: {o.wrong}" for o in bad]
        done.update(counts)
        print(f"{first + len(part)}: {len(wrong)} wrong", file=sys.stderr, flush=True)
    return wrong, done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kind", choices=["s3", "local"], default="s3")
    parser.add_argument("--setting", choices=sorted(SETTINGS), default="crowd")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--trace", type=int)
    args = parser.parse_args()
    setting = SETTINGS[args.setting]
    if args.trace is not None:
        with one_thread():
            outcome = run(args.trace, args.kind, setting, trace=True)
        print("\n".join([*outcome.trace, *outcome.wrong]))
        return 3 if outcome.wrong else 0
    wrong, done = many(args.kind, setting, range(args.first, args.first + args.count))
    print(json.dumps({"kind": args.kind, "setting": args.setting, "wrong": wrong, **done}))
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
