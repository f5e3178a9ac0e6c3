"""Write the golden repository of format 1, what is expected of it, and its damaged copies.

    python -m tests.golden.make

Run once, when format 1 was made final. NEVER run it again for format 1: what a release wrote must
stay readable by every later one, so the bytes beside this file are the test. A later format gets a
folder of its own (``format-2``) and what is here stays. Without ``--again`` it refuses to touch
what exists.

Beside this file:

- ``format-1/``: a local repository: raw, packed and delta frames, gathered small runs, links, an
  empty folder, an executable, odd names, two namespaces, a forgotten snapshot.
- ``expected.json``: SHA-256 and blobs of every file, codec and length of every object.
- ``damaged/<kind>/``, ``newer/<what>/``: files to lay over a copy of ``format-1`` and, in
  ``removed.txt``, names to take away: one for each kind of problem, and what a later format might
  look like. ``expected.json`` says which object must be named, and who needs it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from castore import frame
from castore.commit import Options
from castore.digest import digest_of
from castore.objects import object_name
from castore.repository import Repository
from castore.snapshot import Snapshot, SnapshotName, name_of
from castore.source import Draft, MemoryFile
from castore.tree import File, Folder, Link
from tests.helpers import draft, drift, encode_raw, headers, noise, safetensors, weights

HERE = Path(__file__).parent
GOLDEN, EXPECTED = HERE / "format-1", HERE / "expected.json"


def main() -> None:
    if GOLDEN.exists() and "--again" not in sys.argv:
        sys.exit(f"{GOLDEN} exists: it is never made again (read this file's first lines)")
    for folder in ("format-1", "damaged", "newer"):
        shutil.rmtree(HERE / folder, ignore_errors=True)
    names, forgotten = _write()
    repository = Repository.open(GOLDEN)
    expected = {
        "snapshots": {n.id: _snapshot(repository, n) for n in names},
        "forgotten": {n.id: n.namespace for n in forgotten},
        "objects": {
            d: {"codec": frame.CODECS[h.codec], "depth": h.depth, "length": h.content_length}
            for d, h in sorted(headers(repository).items())
        },
        "damaged": _damaged(repository, names),
        "newer": _newer(repository, names),
    }
    EXPECTED.write_text(json.dumps(expected, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def _write() -> tuple[list[SnapshotName], list[SnapshotName]]:
    repository = Repository.init(GOLDEN)
    steps = [weights(1500, seed=1)]
    for i in range(4):
        steps.append(drift(steps[-1], i))
    ramp = np.arange(16_384, dtype=np.float32)
    big = safetensors({"a": weights(30), "ramp": ramp, "b": weights(50), "steps": ramp * 2})
    options = Options(max_chain=2)
    first: dict[str, Any] = {
        "model.bin": steps[0].tobytes(),
        "weights.safetensors": big,
        "empty": b"",
        "run.sh": MemoryFile(b"#!/bin/sh\necho run\n", executable=True),
        "logs": Folder(),
        "latest": Link("model.bin"),
        "outside": Link("../../elsewhere"),
        "näme mit leerzeichen/日本語": "größer\n".encode(),
        "noise": noise(700),
    }
    names = [repository.commit(draft(first), namespace="team.a", options=options).name]
    for i, step in enumerate(steps[1:4]):
        content: Draft = draft(
            {"model.bin": step.tobytes(), "step": b"%d" % i},
            key=f"step.{i}",
            labels={"run": "größer", "step": str(i)},
            facts={"loss": 0.5 / (i + 1), "nested": {"list": [1, None, "x"]}},
            parents=(str(names[-1]),),
        )
        names.append(repository.commit(content, namespace="team.a", options=options).name)
    shared = {"copy/model.bin": steps[0].tobytes(), "own": b"b" * 400}
    names.append(repository.commit(draft(shared), namespace="b").name)
    gone = repository.commit(draft({"model.bin": steps[4].tobytes()}), namespace="team.a").name
    repository.forget(gone)
    repository.backend.create(name_of(b"", "b", "snapshot", names[-1].time - 5).path, b"")
    shutil.rmtree(GOLDEN / "tmp")
    for lock in GOLDEN.glob("lock*"):
        lock.unlink()
    return names, [gone]


def _snapshot(repository: Repository, name: SnapshotName) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for path, entry in repository.tree(name).entries.items():
        if isinstance(entry, File):
            data = b"".join(repository.read_file(entry))
            entries[path] = {
                "sha256": hashlib.sha256(data).hexdigest(),
                "size": len(data),
                "executable": entry.executable,
                "blobs": entry.blobs(),
                "slices": len(entry.slices),
            }
        else:
            entries[path] = entry.target if isinstance(entry, Link) else None
    snapshot = repository.snapshot(name)
    return {
        "name": name.path,
        "tree": snapshot.tree,
        "labels": dict(snapshot.labels),
        "facts": dict(snapshot.facts),
        "parents": list(snapshot.parents),
        "entries": entries,
    }


def _overlay(where: str, files: dict[str, bytes | Link], removed: tuple[str, ...] = ()) -> None:
    root = HERE / where
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(data, Link):
            os.symlink(data.target, root / name)
        else:
            (root / name).write_bytes(data)
    if removed:
        root.mkdir(parents=True, exist_ok=True)
        (root / "removed.txt").write_text("".join(f"{n}\n" for n in removed))


def _problem(kind: str, name: str, *needed: tuple[SnapshotName, str]) -> dict[str, Any]:
    return {"kind": kind, "object": name, "needed_by": sorted([str(n), p] for n, p in needed)}


def _sealed(data: bytes, at: int, value: int) -> bytes:
    changed = bytearray(data)
    changed[at] = value
    changed[56:64] = xxhash.xxh3_64_digest(bytes(changed[:56]))
    return bytes(changed)


def _blob(repository: Repository, name: SnapshotName, path: str) -> str:
    entry = repository.tree(name).entries[path]
    assert isinstance(entry, File)
    return entry.blobs()[0]


def _damaged(repository: Repository, names: list[SnapshotName]) -> dict[str, Any]:
    own = _blob(repository, names[4], "own")
    base = _blob(repository, names[0], "model.bin")
    chain = [(n, "model.bin") for n in names[:4]] + [(names[4], "copy/model.bin")]
    stored = repository.store.frame
    flipped = bytearray(stored(base))
    flipped[100] ^= 1
    _overlay("damaged/missing", {}, (object_name(own),))
    _overlay("damaged/corrupt", {object_name(base): bytes(flipped)})
    _overlay("damaged/unreadable", {object_name(own): Link("nowhere")})
    _overlay("damaged/malformed", {object_name(own): _sealed(stored(own), 4, 2)})
    tree = repository.store.read(repository.snapshot(names[4]).tree)
    sha256 = hashlib.sha256(b"b" * 400).hexdigest().encode()
    untrue = _published("damaged/layout", bytes(tree).replace(sha256, b"0" * 64), names[4])
    return {
        "missing": _problem("missing", own, (names[4], "own")),
        "corrupt": _problem("corrupt", base, *chain),
        "unreadable": _problem("unreadable", own, (names[4], "own")),
        "malformed": _problem("malformed", own, (names[4], "own")),
        "layout": _problem("layout", "own", (untrue, "own")),
    }


def _published(where: str, tree: bytes, like: SnapshotName, format: int = 1) -> SnapshotName:
    """Lay a snapshot of ``tree`` into ``where``: well named, whatever it says."""
    time = like.time - 9
    document = Snapshot(digest_of(tree), time, like.namespace).encode()
    document = document.replace(b'"format":1', b'"format":%d' % format)
    name = name_of(document, like.namespace, "snapshot", time)
    _overlay(where, {name.path: document, object_name(digest_of(tree)): encode_raw(tree)})
    return name


def _newer(repository: Repository, names: list[SnapshotName]) -> dict[str, Any]:
    """What is refused, by which snapshot it is met, and how the refusal must begin."""
    own = _blob(repository, names[4], "own")
    config = repository.backend.get("config.json")
    tree = bytes(repository.store.read(repository.snapshot(names[4]).tree))
    newer_tree = tree.replace(b'"format":1', b'"format":2')
    _overlay("newer/config", {"config.json": config.replace(b'"format":1', b'"format":2')})
    _overlay("newer/frame", {object_name(own): _sealed(repository.store.frame(own), 4, 2)})
    by_tree = _published("newer/tree", newer_tree, names[4])
    by_document = _published("newer/snapshot", tree, names[4], 2)
    return {
        "config": {"by": "", "says": "config.json: format 2 of 'config'"},
        "frame": {"by": str(names[4]), "says": f"object {own}: frame version 2"},
        "tree": {"by": str(by_tree), "says": f"tree {digest_of(newer_tree)}: format 2 of 'tree'"},
        "snapshot": {"by": str(by_document), "says": f"snapshot {by_document}: format 2"},
    }


if __name__ == "__main__":
    main()
