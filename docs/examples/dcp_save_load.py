"""Save a training state with torch.distributed.checkpoint into a repository, and load it.

    python docs/examples/dcp_save_load.py
    torchrun --nproc-per-node 2 docs/examples/dcp_save_load.py

Without torchrun it is a group of one process. Needs ``castore[dcp]``.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from castore import Repository
from castore_dcp import CastoreReader, CastoreWriter


def job(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose weights are sharded over the ranks, and its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    torch.manual_seed(0)
    loss = model(torch.randn(16, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def run(url: str) -> None:
    model, optimizer = job(seed=1)
    writer = CastoreWriter(url, "train", labels={"who": "example"})
    losses = []
    for step in range(3):
        losses.append(train(model, optimizer))
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": step}
        dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)

    # A new job, with as many ranks as it likes, goes on from step 1.
    model, optimizer = job(seed=2)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": -1}
    dcp.load(state, checkpoint_id="step-1", storage_reader=CastoreReader(url, "train"))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    assert state["step"] == 1
    assert train(model, optimizer) == losses[2]


def main() -> None:
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = "0"  # any free one
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)  # every rank needs one store
        url = str(Path(shared[0]) / "store")
        if dist.get_rank() == 0:
            Repository.init(url)
        dist.barrier()
        run(url)
        dist.barrier()
        kept = [name.key for name in Repository.open(url).snapshots("train")]
        assert kept == ["step.2", "step.1", "step.0"]
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
