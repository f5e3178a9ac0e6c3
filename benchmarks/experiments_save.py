"""What the first half of a save costs: the copy that blocks, and the file made of it.

    python benchmarks/experiments_save.py [--rounds 9]

Side by side for a model with AdamW: a plain clone of the state, `weights.capture` into kept
buffers, ``torch.save`` to memory, and to a file with fsync; `weights.encode`. Medians, interleaved.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from castore_experiments import rng
from castore_experiments.weights import Buffers, capture, encode


def trained(width: int, layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose optimizer has its moments."""
    blocks = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.LayerNorm(width))]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, width)).sum().backward()
    optimizer.step()
    return model, optimizer


def cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: cloned(v) for k, v in value.items()}
    return [cloned(v) for v in value] if isinstance(value, list) else value


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return (time.perf_counter() - start) * 1e3, result


def saved(state: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def once(model: Any, optimizer: Any, buffers: Buffers, path: Path) -> dict[str, float]:
    """Milliseconds of each way, one after the other."""
    state = {"m": model.state_dict(), "o": optimizer.state_dict(), "r": rng.capture()}
    head: dict[str, Any] = {"step": 1, "exp_hash": "0" * 24, "timestamp": ""}
    times = {}
    times["plain clone"], _ = timed(lambda: cloned([model.state_dict(), optimizer.state_dict()]))
    times["capture, kept buffers"], kept = timed(lambda: capture(model, optimizer, buffers=buffers))
    times["encode"], _ = timed(lambda: encode(kept, rng_state=state["r"], **head))
    kept.release()
    times["torch.save to memory"], _ = timed(lambda: torch.save(state, io.BytesIO()))
    times["torch.save + fsync"], _ = timed(lambda: saved(state, path))
    return times


def measure(model: Any, optimizer: Any, rounds: int, path: Path) -> dict[str, list[float]]:
    buffers = Buffers()
    found = [once(model, optimizer, buffers, path) for _ in range(rounds + 2)][2:]
    return {name: [times[name] for times in found] for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    for width, layers in ((2400, 4), (256, 150)):
        model, optimizer = trained(width, layers)
        size = 12 * sum(p.numel() for p in model.parameters())
        print(f"\n{layers} layers of {width}: {size / 1e6:.0f} MB with AdamW, medians in ms")
        with tempfile.TemporaryDirectory(dir=".") as folder:
            found = measure(model, optimizer, rounds, Path(folder) / "x.pt")
        for name, values in found.items():
            print(f"  {name:24}{statistics.median(values):8.1f}   (least {min(values):.1f})")


if __name__ == "__main__":
    main()
