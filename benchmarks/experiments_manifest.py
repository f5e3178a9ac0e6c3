"""One update of a manifest of many hashes: ours beside reading and dumping it with PyYAML.

    python benchmarks/experiments_manifest.py [--hashes 10 300 1000 5000] [--rounds 9] [--root DIR]

``yaml`` is what a program does that loads the whole with ``yaml.safe_load``, changes an entry and
writes it back with ``yaml.dump``, in place and not synced; ``yaml-c`` the same with libyaml.
``warm`` is an update of ours in a process that made the last one (durable: lock, exclusive create,
fsync, rename), ``cold`` the first update in a process, ``read`` the reading alone, ``render``
reading and a text from scratch. Medians, milliseconds; rounds are interleaved.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from castore_experiments.files import open_files
from castore_experiments.manifest import Change, Manifest, entry_of, parse, render
from castore_experiments.manifest_file import ManifestFile

TIME = "2026-11-30T03:11:40.130644"


def hash_of(i: int) -> str:
    return f"{i * 2654435761 % 2**32:08x}{i // 7:08x}{i % 3:08x}"


def manifest_of(count: int) -> Manifest:
    """A manifest as training leaves it: every hash with weights, parent and full digests."""
    digests = {"hp": "a" * 64, "model": "b" * 64, "data": "c" * 64}
    entries = {
        (h := hash_of(i)): entry_of(
            h,
            created=TIME,
            last_used=TIME,
            experiment_name="fixture",
            weights=f"{h}_step_{i:06d}.pt",
            step=i,
            castore={"parent": hash_of(i - 1), "digests": digests, "held": True},
        )
        for i in range(1, count + 1)
    }
    return Manifest(entries, hash_of(count), TIME)


def with_yaml(path: Path, loader: Any, dumper: Any) -> Callable[[int], None]:
    def update(i: int) -> None:
        document = yaml.load(path.read_text(), loader)
        document["experiments"][hash_of(i)] = entry_of(hash_of(i), created=TIME, last_used=TIME)
        path.write_text(yaml.dump(document, Dumper=dumper, sort_keys=False))

    return update


def with_castore(root: str, warm: ManifestFile | None) -> Callable[[int], None]:
    def update(i: int) -> None:
        file = warm or opened(root)
        file.update(Change({hash_of(i): entry_of(hash_of(i), created=TIME, last_used=TIME)}))

    return update


def opened(root: str) -> ManifestFile:
    return ManifestFile(open_files(root), Manifest, report=print, clock=time.time)


def systems(count: int, folder: Path) -> dict[str, Callable[[int], None]]:
    data = render(manifest_of(count))
    for name in ("yaml", "yaml-c"):
        (folder / f"{name}.yaml").write_bytes(data)
    for name in ("warm", "cold"):
        (folder / name / "checkpoints").mkdir(parents=True)
        (folder / name / "checkpoints/manifest.yaml").write_bytes(data)
    return {
        "yaml": with_yaml(folder / "yaml.yaml", yaml.SafeLoader, yaml.SafeDumper),
        "yaml-c": with_yaml(folder / "yaml-c.yaml", yaml.CSafeLoader, yaml.CSafeDumper),
        "warm": with_castore(str(folder / "warm"), opened(str(folder / "warm"))),
        "cold": with_castore(str(folder / "cold"), None),
        "read": lambda i: void(parse(data, "x")),
        "render": lambda i: void(render(manifest_of_texts(parse(data, "x")))),
    }


def manifest_of_texts(manifest: Manifest) -> Manifest:
    return Manifest(manifest.entries, manifest.latest_hash, manifest.last_updated)


def void(_: object) -> None:
    """Take a result that nobody needs."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--hashes", type=int, nargs="+", default=[10, 300, 1000, 5000])
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--root", default=None, help="a folder on the disk to measure")
    options = arguments.parse_args()
    for count in options.hashes:
        with tempfile.TemporaryDirectory(dir=options.root) as folder:
            times: dict[str, list[float]] = {}
            todo = systems(count, Path(folder))
            for round in range(options.rounds + 1):
                for name, update in todo.items():
                    began = time.perf_counter()
                    update(count + 1 + round)
                    if round:  # the first warms up
                        times.setdefault(name, []).append(time.perf_counter() - began)
        figures = "  ".join(f"{n} {statistics.median(t) * 1e3:8.2f}" for n, t in times.items())
        print(f"{count:6} hashes: {figures}", flush=True)


if __name__ == "__main__":
    main()
