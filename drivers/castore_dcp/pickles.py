"""Values that are no tensors: torch files of plain values, unless the caller trusts more."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from castore import UntrustedPickleError


def plain_value(data: bytes, fqn: str, where: str) -> Any:
    """What ``torch.save`` wrote as ``data``, read with ``weights_only``: nothing of it is run.

    Classes that this process allowed (`torch.serialization.add_safe_globals`) are let through.

    Raises
    ------
    UntrustedPickleError
        It holds anything else, or is no torch file.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError) as e:
        reason = str(e).strip().splitlines()[-1][:300] if str(e).strip() else type(e).__name__
        raise UntrustedPickleError(
            f"{where}: {fqn!r} is no torch file of plain values ({reason}): keep plain values,"
            " name its classes with torch.serialization.add_safe_globals, or give"
            " trust_pickles=True if you trust who wrote it"
        ) from e


def rewritten(data: bytes, fqn: str, where: str) -> io.BytesIO:
    """A torch file of the same value that this process wrote itself.

    torch's planner reads what it is given without ``weights_only``, so it is never given bytes
    of the store.
    """
    made = io.BytesIO()
    torch.save(plain_value(data, fqn, where), made)
    made.seek(0)
    return made
