"""Room and time of a pool: castore beside plain files and other stores.

    python benchmarks/pools.py ZOO [--rounds 30] [--peers plain,castore,restic,borg,zipnn,hf-xet]
    python benchmarks/pools.py ZOO --s3

ZOO holds one cell (`benchmarks/pools_minilm.py` makes one). Room: stored over logical bytes of base
and pool files, and what storing the pool in *full* files costs beside it. Time: one whole model,
from the store to tensors, beside ``torch.load`` of the same model in one full plain file; every
round takes every way once, in rotating order, after a round to warm up. Of each way's times the
third is kept during which the rest of the machine used least CPU. ``--s3`` commits, verifies and
assembles on a local SeaweedFS.

A peer's way: get base and pool file out of its store, ``torch.load`` both, and join them; restic
and borg as programs, so that their start counts.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from castore import Repository
from castore.testing.s3server import S3Server
from castore_pools import assemble, import_zoo, open_checkpoint
from castore_pools.layout import CellFiles, survey
from castore_pools.output import encode_assembled
from castore_pools.places import FolderPlace, SnapshotPlace
from castore_pools.pool import KeptCheckpoint
from castore_pools.verify import verify_place

Way = Callable[[], object]


def size_of(*roots: Path) -> int:
    files = (p for r in roots for p in (r.rglob("*") if r.is_dir() else [r]))
    return sum(p.lstat().st_size for p in files if p.is_file())


def run(command: str, **environment: str) -> None:
    subprocess.run(
        command,
        shell=True,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )


def checkpoints(zoo: Path, work: Path, files: CellFiles) -> Path:
    """A folder of base and pool files alone, for the stores that take folders."""
    out = work / "checkpoints"
    for path in [files.cell.base_path, *files.pool.values()]:
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        os.link(zoo / path, out / path) if _same_disk(zoo, out) else shutil.copy(
            zoo / path, out / path
        )
    return out


def _same_disk(a: Path, b: Path) -> bool:
    return a.stat().st_dev == b.stat().st_dev


def full_zoo(zoo: Path, work: Path, files: CellFiles) -> Path:
    """The same layout with full pool files."""
    out = work / "full"
    for path in [files.cell.base_path, *files.configs]:
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(zoo / path, out / path)
    base = open_checkpoint(zoo / files.cell.base_path)
    for path in files.pool.values():
        member = open_checkpoint(zoo / path)
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_bytes(encode_assembled(assemble(base, member), member.fields))
    return out


# -- ways to one model


def join(base: Path, pool: Path) -> dict[str, Any]:
    """What the layout's own function does with two plain files."""
    a, b = (torch.load(p, weights_only=True) for p in (base, pool))
    state = dict(b["model_state_dict"])
    for key in b["frozen_keys"]:
        state[key] = a["model_state_dict"][key]
    return state


def castore_ways(zoo: Path, work: Path, files: CellFiles) -> dict[str, Way]:
    """From a repository, at each depth of a chain, and with the base in the process already."""
    ways: dict[str, Way] = {}
    flat = Repository.init(work / "flat")
    list(import_zoo(flat, zoo, max_chain=0))
    chained = Repository.open(work / "store")
    for depth, repository in [(0, flat), *((d, chained) for d in (1, 2, 3, 4))]:
        path = files.pool[max(0, depth - 1)]  # the first file is a delta to the base
        ways[f"castore, depth {depth}"] = lambda r=repository, p=path: from_store(r, files, p)
    kept = KeptCheckpoint(stored(chained, files, files.cell.base_path))
    kept.load([next(iter(kept.state))])
    ways["castore, depth 4, base kept"] = lambda: assemble(
        kept, stored(chained, files, files.pool[3])
    )
    return ways


def stored(repository: Repository, files: CellFiles, path: str) -> Any:
    place = SnapshotPlace(repository, [_newest(repository, files)])
    return open_checkpoint(place.source(path))


def _newest(repository: Repository, files: CellFiles) -> str:
    names = [n for n in repository.snapshots("main") if n.key.startswith("pool.")]
    return str(names[0])


def from_store(repository: Repository, files: CellFiles, path: str) -> object:
    place = SnapshotPlace(repository, [_newest(repository, files)])
    base, member = (open_checkpoint(place.source(p)) for p in (files.cell.base_path, path))
    return assemble(base, member)


def restic(work: Path, source: Path, files: CellFiles) -> tuple[int, Way]:
    env = {
        "RESTIC_REPOSITORY": f"{work}/restic", "RESTIC_PASSWORD": "x",
        "XDG_CACHE_HOME": f"{work}/restic-cache",
    }  # fmt: skip
    run("restic -q init", **env)
    run(f"restic -q backup {source}", **env)
    base, pool, out = files.cell.base_path, files.pool[3], work / "restic-out"

    def way() -> object:
        wanted = " ".join(f"--include {source / p}" for p in (base, pool))
        run(f"restic -q restore latest {wanted} --target {out}", **env)
        at = out / str(source).lstrip("/")
        return join(at / base, at / pool), shutil.rmtree(out)

    return size_of(work / "restic"), way


def borg(work: Path, source: Path, files: CellFiles) -> tuple[int, Way]:
    env = {
        "BORG_BASE_DIR": f"{work}/borg-base",
        "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
    }
    store, out = work / "borg", work / "borg-out"
    run(f"borg init -e none {store}", **env)
    run(f"cd {source} && borg create -C zstd,3 {store}::a .", **env)
    base, pool = files.cell.base_path, files.pool[3]

    def way() -> object:
        out.mkdir()
        run(f"cd {out} && borg extract {store}::a {base} {pool}", **env)
        return join(out / base, out / pool), shutil.rmtree(out)

    return size_of(store), way


def zipnn(work: Path, source: Path, files: CellFiles) -> tuple[int, Way]:
    import io

    import zipnn as library

    packed = work / "zipnn"
    packed.mkdir()
    wanted = [files.cell.base_path, *files.pool.values()]
    for path in wanted:
        packer = library.ZipNN(input_format="byte", bytearray_dtype="float32", threads=2)
        data = packer.compress(bytearray((source / path).read_bytes()))
        (packed / path.replace("/", "_")).write_bytes(data)

    def load(path: str) -> Any:
        packer = library.ZipNN(input_format="byte", threads=2)
        data = packer.decompress((packed / path.replace("/", "_")).read_bytes())
        return torch.load(io.BytesIO(data), weights_only=True)

    def way() -> object:
        base, pool = load(files.cell.base_path), load(files.pool[3])
        keys = {k: base["model_state_dict"][k] for k in pool["frozen_keys"]}
        return {**pool["model_state_dict"], **keys}

    return size_of(packed), way


def hf_xet(work: Path, source: Path, files: CellFiles) -> tuple[int, Way]:
    import hf_xet as library

    store, out = work / "xet", work / "xet-out"
    store.mkdir()
    session, where = library.XetSession(), f"local://{store}"
    wanted = [files.cell.base_path, *files.pool.values()]
    upload = session.new_upload_commit(endpoint=where)
    with upload:
        handles = {p: upload.start_upload_file(str(source / p)) for p in wanted}
    found = {p: h.result().xet_info for p, h in handles.items()}
    base, pool = files.cell.base_path, files.pool[3]

    def way() -> object:
        group = session.new_file_download_group(endpoint=where)
        with group:
            for path in (base, pool):
                (out / path).parent.mkdir(parents=True, exist_ok=True)
                info = library.XetFileInfo(found[path].hash, found[path].file_size)
                group.start_download_file(info, str(out / path))
        return join(out / base, out / pool), shutil.rmtree(out)

    return size_of(store), way


PEERS: dict[str, Callable[[Path, Path, CellFiles], tuple[int, Way]]] = {
    "restic": restic, "borg": borg, "zipnn": zipnn, "hf-xet": hf_xet,
}  # fmt: skip


# -- measuring


def room(zoo: Path, work: Path, files: CellFiles) -> None:
    logical = size_of(zoo / files.cell.base_path, *(zoo / p for p in files.pool.values()))
    began = time.perf_counter()
    reduced = sum(c.added for c in import_zoo(Repository.init(work / "store"), zoo))
    took = time.perf_counter() - began
    full = full_zoo(zoo, work, files)
    whole = sum(c.added for c in import_zoo(Repository.init(work / "full-store"), full))
    print(f"\n{len(files.pool)} pool files and their base: {logical / 1e9:.3f} GB\n")
    print("| stored as | bytes | stored/logical of the reduced files |")
    print("|---|---|---|")
    print(f"| reduced pool files, castore ({took:.1f} s) | {reduced} | {reduced / logical:.4f} |")
    print(f"| full pool files, castore | {whole} | {whole / logical:.4f} |")
    print(f"\nfull beside reduced: {whole / reduced - 1:+.3%}\n", flush=True)


@dataclass(frozen=True)
class Took:
    """Wall and own CPU seconds, and CPU seconds that the rest of the machine used meanwhile."""

    wall: float
    cpu: float
    others: float


def busy() -> float:
    """CPU seconds that all processors were not idle since the start, stolen ones included."""
    with open("/proc/stat") as file:
        fields = [int(n) for n in file.readline().split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def own() -> float:
    return sum(os.times()[:4])


def timed(way: Way) -> Took:
    all_before, mine_before, began = busy(), own(), time.perf_counter()
    way()
    wall, mine = time.perf_counter() - began, own() - mine_before
    return Took(wall, mine, max(0.0, busy() - all_before - mine))


def least_disturbed(took: list[Took]) -> list[Took]:
    """The third of the measurements during which the rest of the machine did least."""
    return sorted(took, key=lambda t: t.others / t.wall)[: max(1, len(took) // 3)]


def times(zoo: Path, work: Path, files: CellFiles, peers: list[str], rounds: int) -> None:
    full = work / "full" / files.pool[3]
    ways: dict[str, Way] = {
        "torch.load of the full file": lambda: torch.load(full, weights_only=True)
    }
    sizes: dict[str, int] = {}
    source = checkpoints(zoo, work, files)
    logical = size_of(source)
    if "plain" in peers:
        base, pool = zoo / files.cell.base_path, zoo / files.pool[3]
        ways["plain files, joined"] = lambda: join(base, pool)
        ways["plain files, assemble"] = lambda: assemble(base, pool)
    if "castore" in peers:
        ways |= castore_ways(zoo, work, files)
    for name in (p for p in peers if p in PEERS):
        sizes[name], ways[name] = PEERS[name](work, source, files)
    measured: dict[str, list[Took]] = {name: [] for name in ways}
    names = list(ways)
    for n in range(-1, rounds):
        for name in names[n % len(names) :] + names[: n % len(names)]:
            took = timed(ways[name])
            if n >= 0:
                measured[name].append(took)
        print(f"round {n}", file=sys.stderr, flush=True)
    kept = {name: least_disturbed(took) for name, took in measured.items()}
    plain = statistics.median(t.wall for t in kept[names[0]])
    print("| one whole model by | s | x torch.load | CPU s | others' CPU s | stored/logical |")
    print("|---|---|---|---|---|---|")
    for name in names:
        wall, cpu, others = (
            statistics.median(getattr(t, n) for t in kept[name]) for n in ("wall", "cpu", "others")
        )
        share = f"{sizes[name] / logical:.4f}" if name in sizes else "-"
        print(f"| {name} | {wall:.3f} | {wall / plain:.2f} | {cpu:.3f} | {others:.2f} | {share} |")


def on_s3(zoo: Path, files: CellFiles) -> None:
    """Commit, verify and assemble every file, on a server of this machine."""
    with S3Server(bucket="bench") as server:
        os.environ.update(server.env())
        repository = Repository.init(f"s3://{server.bucket}/store")
        began = time.perf_counter()
        added = sum(c.added for c in import_zoo(repository, zoo))
        committed = time.perf_counter() - began
        place = SnapshotPlace(repository, [_newest(repository, files)])
        began = time.perf_counter()
        findings = list(verify_place(place))
        verified = time.perf_counter() - began
        bad = [f for f in findings if f.verdict != "ok"]
        base = KeptCheckpoint(open_checkpoint(place.source(files.cell.base_path)))
        began, moved = time.perf_counter(), 0
        for path in files.pool.values():
            member = open_checkpoint(place.source(path))
            assemble(base, member, require_pin=True)
            moved += member.source.fetched  # type: ignore[attr-defined]
        took = (time.perf_counter() - began) / len(files.pool)
        moved += base.source.fetched  # type: ignore[attr-defined]
    print(f"| S3: commit {committed:.1f} s, {added / 1e6:.0f} MB stored | verify {verified:.1f} s,"
          f" {len(findings)} checks, {len(bad)} not ok | one model {took:.3f} s, decoded bytes"
          f" {moved / len(files.pool) / 1e6:.1f} MB each |")  # fmt: skip
    if bad:
        raise SystemExit(json.dumps([str(f) for f in bad[:3]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("zoo", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--work", type=Path, default=Path("/tmp/castore-pools"))
    parser.add_argument("--peers", default="plain,castore")
    parser.add_argument("--s3", action="store_true")
    options = parser.parse_args()
    logging.getLogger("castore.pools").setLevel(logging.ERROR)
    zoo = options.zoo.resolve()
    (files,) = survey(FolderPlace(zoo)).cells
    if options.s3:
        on_s3(zoo, files)
        return
    work = options.work / str(os.getpid())
    work.mkdir(parents=True)
    try:
        room(zoo, work, files)
        times(zoo, work, files, options.peers.split(","), options.rounds)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
