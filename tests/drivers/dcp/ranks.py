"""Real processes that share a gloo group: forked from one server that has torch loaded."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LOADED = ["torch.distributed.checkpoint", "torch.distributed.fsdp", "castore_dcp.writer"]
TIMEOUT = 120
"""Seconds of the group; a rank whose peer is gone must end long before."""


def run(world: int, scenario: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """``scenario(rank, world, *args)`` on ``world`` ranks.

    Gives what each returned; the text of its error as an `Error`; None for one that was killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    meeting = folder / f"group-{len(list(folder.glob('group-*')))}"
    pipes = [context.Pipe() for _ in range(world)]
    processes = [
        context.Process(target=_child, args=(rank, world, str(meeting), pipe[1], scenario, args))
        for rank, pipe in enumerate(pipes)
    ]
    try:
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        return [_answer(mine) for mine, _ in pipes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
            process.join()
        meeting.touch()  # gloo removes it: the next group needs another name


class Error(str):
    """What a rank raised."""

    __slots__ = ()


def _answer(pipe: Connection) -> Any:
    assert pipe.poll(TIMEOUT + 120), "a rank hangs"
    try:
        return pipe.recv()
    except EOFError:
        return None


def _child(
    rank: int,
    world: int,
    meeting: str,
    pipe: Connection,
    scenario: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT),
    )
    try:
        pipe.send(scenario(rank, world, *args))
        dist.barrier()  # a peer may still need what this rank's store holds
    except BaseException as e:
        pipe.send(Error(f"{type(e).__name__}: {e}"))
    finally:
        dist.destroy_process_group()
