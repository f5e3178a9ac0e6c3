"""States to save: every kind of tensor torch may hold, models with optimizers, and comparison."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn

BIG = 40_000  # float32 elements: a blob of its own


def odd() -> dict[str, Any]:
    """Kinds and shapes of tensors, tied ones, and values that are none, nested."""
    torch.manual_seed(1)
    tied = torch.randn(200, BIG // 200)
    base = torch.randn(30)
    dtypes = [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
    dtypes += [torch.float8_e5m2, torch.int8, torch.uint16, torch.bool]
    return {
        "model": {"embed": tied, "head": tied, "bias": torch.randn(7)},
        "kinds": {str(d): (base * 3).to(d) for d in dtypes},
        "complex": {
            "64": torch.randn(3, dtype=torch.complex64).conj(),
            "128": torch.randn(5, dtype=torch.complex128),
        },
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "strided": torch.randn(50, 60).t(),
        "slice": torch.randn(100, 100)[10:20, ::3],
        "a,b[0]": torch.arange(5),
        "a,b": {"[0]": torch.arange(3)},
        "__metadata__": torch.arange(4),
        "epoch": 3,
        "rate": float("inf"),
        "list": [1, "two", None, torch.ones(3), {"deep": (1, 2)}],
        "ünï/../c": "path",
    }


def model(seed: int = 0, width: int = 120) -> nn.Module:
    """Three layers; the first is large enough for blobs of its own on four ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 8 * width), nn.Tanh(), nn.Linear(8 * width, 10))


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    """Really train it, so that weights and moments drift as they do."""
    for step in range(steps):
        torch.manual_seed(100 + step)
        width = 120
        loss = net(torch.randn(8, width)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def blank(value: Any) -> Any:
    """The same structure with nothing in it, to load into."""
    if isinstance(value, Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {k: blank(v) for k, v in value.items()}
    if isinstance(value, list):
        return [blank(v) for v in value]
    return None


def raw(tensor: Tensor) -> bytes:
    """A tensor's elements, row by row."""
    whole = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return bytes(whole.view(torch.uint8).numpy()) if whole.numel() else b""


def shown(value: Any) -> Any:
    """A value that compares by the bytes of its tensors."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), raw(value))
    if isinstance(value, dict):
        return {k: shown(v) for k, v in value.items()}
    if isinstance(value, list):
        return [shown(v) for v in value]
    return value


def saved(value: Any) -> bytes:
    """A value as bytes that go between processes."""
    made = io.BytesIO()
    torch.save(value, made)
    return made.getvalue()
