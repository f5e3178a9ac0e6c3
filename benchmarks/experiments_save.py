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


def measure(model: Any, optimizer: Any, rounds: int, path: Path) -> dict[str, list[float]]:
    """Milliseconds of each way, round by round."""
    buffers, kept, times = Buffers(), io.BytesIO(), dict[str, list[float]]()
    for _ in range(rounds + 2):
        state = {"m": model.state_dict(), "o": optimizer.state_dict(), "r": rng.capture()}
        ways: dict[str, Callable[[], Any]] = {
            "plain clone": lambda: cloned([model.state_dict(), optimizer.state_dict()]),
            "torch.save to memory": lambda: (kept.seek(0), torch.save(state, kept)),
            "torch.save + fsync": lambda: saved(state, path),
        }
        for name, call in ways.items():
            times.setdefault(name, []).append(timed(call)[0])
        took, captured = timed(lambda: capture(model, optimizer, buffers=buffers))
        times.setdefault("capture, kept buffers", []).append(took)
        head: dict[str, Any] = {"step": 1, "exp_hash": "0" * 24, "timestamp": ""}
        took, _ = timed(lambda: encode(captured, rng_state=state["r"], **head))
        times.setdefault("encode", []).append(took)
        captured.release()
        took, fresh = timed(lambda: capture(model, optimizer, buffers=Buffers()))
        times.setdefault("capture, fresh memory", []).append(took)
        fresh.release()
    return {name: t[2:] for name, t in times.items()}


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
