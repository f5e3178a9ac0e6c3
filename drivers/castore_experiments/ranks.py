"""Which process of a distributed job writes."""

from __future__ import annotations

import sys


def writes() -> bool:
    """Whether this process is rank 0 of a running torch.distributed job, or of none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return True
    return int(distributed.get_rank()) == 0
