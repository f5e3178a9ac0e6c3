"""Where a collection stands: optimizer, random numbers and counters, in one file.

Written after each pool file, so it is at most one file behind; what it says decides, and a pool
file that it does not count yet is collected again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from castore import LayoutError, UntrustedPickleError
from castore_pools.files import write_file


@dataclass(frozen=True, slots=True)
class Progress:
    """``files`` are complete after ``steps`` steps; ``exact`` holds what the files only round."""

    files: int
    steps: int
    settings: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    random: Mapping[str, Any]
    exact: Mapping[str, Any] | None = None


def write_progress(path: Path, progress: Progress) -> None:
    """Replace the file, all or nothing."""
    import torch

    document = {name: getattr(progress, name) for name in Progress.__slots__}
    write_file(path, lambda file: torch.save(document, file))


def read_progress(path: Path) -> Progress | None:
    """What the file says, read with ``weights_only=True``; None where there is none."""
    import pickle

    import torch

    if not path.exists():
        return None
    try:
        return Progress(**torch.load(path, weights_only=True))
    except pickle.UnpicklingError as e:
        raise UntrustedPickleError(f"{path}: {e}") from e
    except Exception as e:  # torch's reader raises whatever a damaged pickle makes of its stack
        raise LayoutError(
            f"{path}: damaged ({e}): the collection cannot be resumed; move its folder away"
        ) from e


def random_state() -> dict[str, Any]:
    """The state of every global generator: Python's, NumPy's, torch's on CPU and CUDA."""
    import numpy as np
    import torch

    kind, keys, place, has, cached = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [str(kind), [int(k) for k in keys], int(place), int(has), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Undo to what `random_state` gave."""
    import numpy as np
    import torch

    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, place, has, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), place, has, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
