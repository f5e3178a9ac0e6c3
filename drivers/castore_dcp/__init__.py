"""castore_dcp: PyTorch's distributed checkpoints in a castore repository.

    import torch.distributed.checkpoint as dcp
    from castore_dcp import CastoreReader, CastoreWriter
    dcp.save(state, checkpoint_id="step-100", storage_writer=CastoreWriter("store", "train"))
    dcp.load(state, checkpoint_id="step-100", storage_reader=CastoreReader("store", "train"))

Importing this package is cheap: torch is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from castore_dcp.driver import DcpDriver
    from castore_dcp.reader import CastoreReader
    from castore_dcp.writer import CastoreWriter

_HOMES = {
    "CastoreReader": "castore_dcp.reader",
    "CastoreWriter": "castore_dcp.writer",
    "DcpDriver": "castore_dcp.driver",
}

__all__ = ["CastoreReader", "CastoreWriter", "DcpDriver"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
