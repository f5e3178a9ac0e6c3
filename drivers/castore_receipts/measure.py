"""What a checkpoint cost: memory by its sources, and seconds by what was done in them."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

PHASES = (
    "initialization",
    "data_preparation",
    "warmed_forward",
    "rollouts",
    "training_updates",
    "evaluation",
)


@dataclass(slots=True)
class Timings:
    """Seconds by phase, accelerator work waited for at both ends; None where not measured."""

    clock: Callable[[], float]
    synchronize: Callable[[], None]
    seconds: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(PHASES, None))
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))

    def now(self) -> float:
        """The clock, once the accelerator has done all it was given."""
        self.synchronize()
        return self.clock()

    def add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = (self.seconds[phase] or 0.0) + seconds
        self.counts[phase] += 1

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        began = self.now()
        yield
        self.add(phase, self.now() - began)

    def record(self) -> dict[str, Any]:
        """As it stands in a receipt."""
        return {p: {"seconds": self.seconds[p], "count": self.counts[p]} for p in PHASES}


def synchronizer(device: Any) -> Callable[[], None]:
    """What waits for the accelerator of ``device``; on a CPU there is nothing to wait for."""
    import torch

    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    if device.type == "mps":
        return torch.mps.synchronize
    return lambda: None


def peak_memory() -> int:
    """Bytes of the largest resident set this process has had (getrusage; Linux counts in KiB)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def framework_memory() -> dict[str, int | None]:
    """Bytes that torch's allocators hold, None for a device that is not there."""
    import torch

    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    return {
        "cuda_peak_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "mps_driver_bytes": torch.mps.driver_allocated_memory() if mps else None,
    }


def resources(policy: Any) -> dict[str, int | None]:
    """The receipt's memory fields: process, framework and parameters kept apart.

    Parameter bytes exclude activations, gradients, optimizer state and buffers.
    """
    return {
        "process_peak_bytes": peak_memory(),
        **framework_memory(),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in policy.parameters()),
    }
