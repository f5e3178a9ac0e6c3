"""What ranks do in the tests: each function runs in a process of its own, within a group."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from castore import Repository
from castore.testing.faulty import Call, FaultyBackend
from castore.testing.s3server import free_ports
from castore_dcp import CastoreReader, CastoreWriter
from tests.drivers.dcp.states import BIG, model, saved, trained
from tests.helpers import with_backend

Options = dict[str, Any] | None


def _sharded(seed: int, mesh: DeviceMesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model under FSDP2 and its optimizer, both with state."""
    net = model(seed)
    for layer in net:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    trained(net, optimizer)
    return net, optimizer


def _tensors(rank: int, mesh: DeviceMesh, fill: bool) -> dict[str, Any]:
    """Plain DTensors: uneven, with ranks that have nothing, replicated, tied; and plain values."""
    torch.manual_seed(3)
    uneven = torch.arange(10 * BIG // 4, dtype=torch.float32).reshape(10, -1)
    whole = {
        "rows": (uneven, Shard(0)),
        "columns": (torch.randn(6, 7, dtype=torch.bfloat16), Shard(1)),
        "few": (torch.arange(3), Shard(0)),
        "everywhere": (torch.randn(9), Replicate()),
        "scalar": (torch.tensor(2.5), Replicate()),
        "none": (torch.empty(0, 3), Shard(0)),
    }
    made: dict[str, Any] = {
        k: distribute_tensor(t if fill else torch.zeros_like(t), mesh, [p])
        for k, (t, p) in whole.items()
    }
    made["tied"] = made["rows"]
    made["plain"] = torch.ones(5) if fill else torch.zeros(5)
    made["step"] = 12 if fill else 0
    made["rates"] = [0.5, {"beta": (0.9, 0.99)}] if fill else [0.0, {"beta": None}]
    return made


def _full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {k: _full(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_full(v) for v in value]
    return value


def state(rank: int, world: int, seed: int, fill: bool) -> tuple[dict[str, Any], Any]:
    """A sharded model with optimizer, DTensors and values; with the objects they are of."""
    mesh = init_device_mesh("cpu", (world,))
    net, optimizer = _sharded(seed, mesh)
    made = {
        "model": get_model_state_dict(net),
        "optimizer": get_optimizer_state_dict(net, optimizer),
        "tensors": _tensors(rank, mesh, fill),
    }
    return made, (net, optimizer)


def save_all_ways(rank: int, world: int, url: str, options: Options) -> bytes:
    """Steps 1, 2 and 3: saved, trained and saved, saved on a thread; gives step 3 in full."""
    made, (net, optimizer) = state(rank, world, 0, fill=True)
    writer = CastoreWriter(url, "train", storage_options=options)
    dcp.save(made, checkpoint_id="step-1", storage_writer=writer)
    trained(net, optimizer, 2)
    made["model"] = get_model_state_dict(net)
    made["optimizer"] = get_optimizer_state_dict(net, optimizer)
    dcp.save(made, checkpoint_id="step-2", storage_writer=writer)
    assert (writer.snapshot is not None) == (rank == 0)
    group = dist.new_group(backend="gloo")
    done = dcp.async_save(made, checkpoint_id="step-3", storage_writer=writer, process_group=group)
    done.result()  # type: ignore[union-attr]
    return saved(_full(made))


def load(rank: int, world: int, url: str, options: Options, step: int) -> bytes:
    """A step into a state that has other weights; gives it in full."""
    made, _ = state(rank, world, 7, fill=False)
    dcp.load(made, storage_reader=CastoreReader(url, "train", step=step, storage_options=options))
    return saved(_full(made))


def load_and_save(rank: int, world: int, url: str, options: Options, old: int, new: int) -> bytes:
    """A step of other ranks, saved again by these; gives it in full."""
    made, _ = state(rank, world, 7, fill=False)
    dcp.load(made, storage_reader=CastoreReader(url, "train", step=old, storage_options=options))
    writer = CastoreWriter(url, "train", storage_options=options)
    dcp.save(made, checkpoint_id=str(new), storage_writer=writer)
    return saved(_full(made))


def save_first(rank: int, world: int, url: str) -> bytes:
    """Step 1; gives it in full."""
    made, _ = state(rank, world, 0, fill=True)
    dcp.save(made, storage_writer=CastoreWriter(url, "train", step=1))
    return saved(_full(made))


def save_in_a_process(rank: int, world: int, url: str, steps: list[int]) -> bytes:
    """Saves by torch's background process, one for each rank.

    torch picks a port seconds before it listens there: not one that a connection may be given.
    """
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    _async_process_executor.get_free_port = lambda: free_ports(1)[0]
    mesh = init_device_mesh("cpu", (world,))
    made = {"w": distribute_tensor(torch.arange(2.0 * BIG), mesh, [Shard(0)]), "n": 3}
    writer = CastoreWriter(url, "train")
    for step in steps:
        done = dcp.async_save(
            made,
            checkpoint_id=f"step-{step}",
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        done.result()  # type: ignore[union-attr]
    return saved(_full(made))


def save_apart(rank: int, world: int, urls: list[str]) -> None:
    """Each rank is given a store of its own, as where a path is local to its machine."""
    mesh = init_device_mesh("cpu", (world,))
    made = {"w": distribute_tensor(torch.arange(2.0 * BIG), mesh, [Shard(0)])}
    dcp.save(made, storage_writer=CastoreWriter(urls[rank], "train"))


def _dying(repository: Repository, moment: str) -> Repository:
    """It ends this process, as a machine that fails does, at its first write of ``moment``."""

    def end(call: Call) -> None:
        if call.method in ("create", "create_many", "write_many") and call.name.startswith(moment):
            os.kill(os.getpid(), signal.SIGKILL)

    return with_backend(repository, FaultyBackend(repository.backend, hook=end))


def save_and_die(
    rank: int, world: int, url: str, options: Options, doomed: int, moment: str
) -> None:
    """Saves, and one rank is killed at a write."""
    repository = Repository.open(url, storage_options=options)
    if rank == doomed:
        repository = _dying(repository, moment)
    mesh = init_device_mesh("cpu", (world,))
    made = {"w": distribute_tensor(torch.randn(4 * BIG), mesh, [Shard(0)])}
    dcp.save(made, checkpoint_id="step-9", storage_writer=CastoreWriter(repository, "train"))


def fail_on_one(rank: int, world: int, url: str) -> None:
    """One rank has what cannot be saved: all must be told."""
    act: Callable[[], object] = object
    made = {"w": torch.ones(3), f"of-{rank}": act() if rank else 1}
    dcp.save(made, storage_writer=CastoreWriter(url, "train"))
