"""castore_pools: pool checkpoints without their frozen tensors, reassembled on read.

    from castore_pools import assemble
    state = assemble("zoo/agnews/bertbase/bertbase_010.pth", ".../collect_000.pth")

Importing this package is cheap: torch is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from castore_pools.assembly import assemble, find_base
    from castore_pools.base import save_base
    from castore_pools.checkpoint import Checkpoint, open_checkpoint
    from castore_pools.collector import PoolCollector
    from castore_pools.driver import PoolsDriver
    from castore_pools.importing import import_zoo
    from castore_pools.names import Cell
    from castore_pools.pool import Pool, open_pool
    from castore_pools.reduce import reduce_files
    from castore_pools.stats import pool_stats
    from castore_pools.verify import verify_zoo

_HOMES = {
    "Cell": "castore_pools.names",
    "Checkpoint": "castore_pools.checkpoint",
    "Pool": "castore_pools.pool",
    "PoolCollector": "castore_pools.collector",
    "PoolsDriver": "castore_pools.driver",
    "assemble": "castore_pools.assembly",
    "find_base": "castore_pools.assembly",
    "import_zoo": "castore_pools.importing",
    "open_checkpoint": "castore_pools.checkpoint",
    "open_pool": "castore_pools.pool",
    "pool_stats": "castore_pools.stats",
    "reduce_files": "castore_pools.reduce",
    "save_base": "castore_pools.base",
    "verify_zoo": "castore_pools.verify",
}

__all__ = [
    "Cell",
    "Checkpoint",
    "Pool",
    "PoolCollector",
    "PoolsDriver",
    "assemble",
    "find_base",
    "import_zoo",
    "open_checkpoint",
    "open_pool",
    "pool_stats",
    "reduce_files",
    "save_base",
    "verify_zoo",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
