"""How long a data state takes to hash, beside the public tool's formula on the same machine.

    python benchmarks/experiments_hash.py [--samples 1000000] [--rounds 5]

Theirs is written from the description of scheme ``weightslab-2``: ids sorted by their text, one
line each, one SHA-256. It is given the state it wants (two dictionaries) ready made; ours is timed
from the data frame, and from a state that stands already. Rounds alternate; medians are shown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import pandas as pd

from castore_experiments.samples import DataState

Build = Callable[[int, np.random.Generator], list[Any]]


def theirs(state: dict[str, dict[Any, Any]]) -> str:
    tags = state["tag"]
    lines = []
    for uid in sorted(state["discarded"], key=str):
        value = state["discarded"][uid]
        out = 0 if value is None or value != value else int(bool(value))
        lines.append(f"{uid}:d{out}:t{','.join(sorted(tags.get(uid, ())))}")
    return sha256("|".join(lines).encode()).hexdigest()


def frame_of(ids: list[Any], random: np.random.Generator) -> pd.DataFrame:
    n = len(ids)
    return pd.DataFrame(
        {
            "sample_id": ids,
            "annotation_id": np.zeros(n, np.int64),
            "discarded": random.random(n) < 0.05,
            "tag:hard": random.random(n) < 0.1,
            "tag:easy": random.random(n) < 0.3,
        }
    ).set_index(["sample_id", "annotation_id"])


def state_of(frame: pd.DataFrame) -> dict[str, dict[Any, Any]]:
    ids = frame.index.get_level_values("sample_id").tolist()
    tags: dict[Any, list[str]] = {}
    for name in ("hard", "easy"):
        for i in np.flatnonzero(frame[f"tag:{name}"].to_numpy()):
            tags.setdefault(ids[i], []).append(name)
    return {"discarded": dict(zip(ids, frame["discarded"].tolist(), strict=True)), "tag": tags}


KINDS: dict[str, Build] = {
    "integers in order": lambda n, _: list(range(n)),
    "text in order": lambda n, _: [f"sample_{i:07d}" for i in range(n)],
    "text shuffled": lambda n, r: [f"sample_{i:07d}" for i in r.permutation(n)],
    "paths shuffled": lambda n, r: [f"train/class{i % 97}/{i}.png" for i in r.permutation(n)],
    "hexadecimal, 32": lambda n, r: [r.bytes(16).hex() for _ in range(n)],
}


def ours(frame: pd.DataFrame) -> str:
    return DataState.from_any(frame).digest()


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="hash a data state, beside the public formula")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print("| ids | theirs s | ours from frame s | ratio | ours from state s | ratio |")
    print("|---|---|---|---|---|---|")
    for kind, build in KINDS.items():
        frame = frame_of(
            build(arguments.samples, np.random.default_rng(1)), np.random.default_rng(2)
        )
        state, ready = state_of(frame), DataState.from_any(frame)
        works: list[Callable[[], object]] = [partial(theirs, state), partial(ours, frame)]
        works.append(ready.digest)
        rounds = [[seconds(work) for work in works] for _ in range(arguments.rounds + 1)][1:]
        their, whole, digest = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(
            f"| {kind} | {their:.3f} | {whole:.3f} | {their / whole:.1f} | {digest:.3f} | "
            f"{their / digest:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
