"""Time and room of distributed checkpoints: castore beside torch's own writers.

    python benchmarks/dcp.py [--ranks 2] [--steps 10] [--width 1440] [--train 5] [--folder DIR]

A model under FSDP2 on gloo really trains with AdamW; after every ``--train`` optimizer steps the
same state (weights and both moments) is saved by each writer in rotating order, into a local
folder: castore (as it comes, and keeping nothing in memory), torch's `FileSystemWriter` and its
fsspec writer. Timed is ``dcp.save`` from a barrier to its return on rank 0; torch's writers sync
their files, castore all it wrote. Then the last step is loaded by each, with the same ranks.
Printed: medians, ratios to FileSystemWriter, and bytes of the whole series.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

from castore import Repository
from castore_dcp import CastoreReader, CastoreWriter

NAMES = ("FileSystemWriter", "fsspec", "castore", "castore, nothing kept")


def writers(root: Path) -> dict[str, Callable[[int], Any]]:
    """For each way what makes the writer of a step; castore's lives as long as the job."""
    for name in ("castore", "bare"):
        if dist.get_rank() == 0:
            Repository.init(root / name)
    dist.barrier()
    kept = CastoreWriter(root / "castore", "train")
    bare = CastoreWriter(root / "bare", "train", keep_bytes=0)
    return {
        NAMES[0]: lambda step: dcp.FileSystemWriter(root / "files" / f"step-{step}"),
        NAMES[1]: lambda step: FsspecWriter(f"file://{root}/fsspec/step-{step}"),
        NAMES[2]: lambda step: kept,
        NAMES[3]: lambda step: bare,
    }


def readers(root: Path, step: int) -> dict[str, Any]:
    return {
        NAMES[0]: dcp.FileSystemReader(root / "files" / f"step-{step}"),
        NAMES[1]: FsspecReader(f"file://{root}/fsspec/step-{step}"),
        NAMES[2]: CastoreReader(root / "castore", "train"),
        NAMES[3]: CastoreReader(root / "bare", "train"),
    }


def model(width: int) -> nn.Module:
    """Four square layers: 4 * width^2 weights, so 48 * width^2 bytes with their moments."""
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, teacher: torch.Tensor, n: int) -> None:
    for _ in range(n):
        x = torch.randn(32, teacher.shape[0])
        loss = (net(x) - torch.tanh(x @ teacher)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def timed(act: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def used(root: Path) -> int:
    return sum(p.stat().st_size for p in root.rglob("*") if p.is_file())


def rank(number: int, args: argparse.Namespace, root: Path) -> None:
    """One process of the job."""
    warnings.filterwarnings("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/group", rank=number, world_size=args.ranks
    )
    net = model(args.width)
    mesh = init_device_mesh("cpu", (args.ranks,))
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)
    teacher = torch.randn(args.width, args.width) / args.width**0.5
    ways = writers(root)
    saves: dict[str, list[float]] = {n: [] for n in NAMES}
    state: dict[str, Any] = {}
    for step in range(args.steps):
        torch.manual_seed(step)
        train(net, optimizer, teacher, args.train)
        state = {
            "model": get_model_state_dict(net),
            "optimizer": get_optimizer_state_dict(net, optimizer),
        }
        for name in [*NAMES[step % 4 :], *NAMES[: step % 4]]:
            saves[name].append(timed(partial(save, state, ways[name], step, name)))
    loads = {}
    for name, reader in readers(root, args.steps - 1).items():
        loads[name] = timed(partial(dcp.load, state, storage_reader=reader))
    if number == 0:
        report(root, saves, loads, 48 * args.width**2 * args.steps)
    dist.barrier()
    dist.destroy_process_group()


def save(state: dict[str, Any], make: Callable[[int], Any], step: int, name: str) -> None:
    at = f"step-{step}" if name.startswith("castore") else None
    dcp.save(state, checkpoint_id=at, storage_writer=make(step))


def report(
    root: Path, saves: dict[str, list[float]], loads: dict[str, float], logical: int
) -> None:
    folders = dict(zip(NAMES, ("files", "fsspec", "castore", "bare"), strict=True))
    print(f"{logical / 1e6:.0f} MB of state in {len(saves[NAMES[0]])} steps")
    print(f"{'':24}{'first':>8}{'median':>8}{'ratio':>7}{'load':>8}{'MB':>8}{'ratio':>7}")
    first = statistics.median(saves[NAMES[0]][1:])
    room = used(root / folders[NAMES[0]])
    for name in NAMES:
        median, size = statistics.median(saves[name][1:]), used(root / folders[name])
        print(
            f"{name:24}{saves[name][0]:7.2f}s{median:7.2f}s{median / first:7.2f}"
            f"{loads[name]:7.2f}s{size / 1e6:8.0f}{size / room:7.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--train", type=int, default=5, help="optimizer steps between saves")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder without")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="castore-dcp-", dir=args.folder))
    try:
        spawn(rank, args=(args, root), nprocs=args.ranks)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
