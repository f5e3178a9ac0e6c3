"""An assembled model as a file: torch's or safetensors, on disk or behind a URL."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from castore import BackendError, InvalidInputError
from castore_pools.checkpoint import STATE_KEY
from castore_pools.files import write_bytes
from castore_pools.freeze import tied_keys
from castore_pools.pins import FIELD
from castore_pools.sources import url_errors

Format: TypeAlias = Literal["pth", "safetensors"]
_LEFT_OUT = (FIELD, "frozen_keys", "frozen_source")


def encode_assembled(
    state: Mapping[str, Any], fields: Mapping[str, Any], format: Format = "pth"
) -> bytes:
    """A whole model's file, with the pool file's own fields (steps, metric, loss).

    ``pth``: a dict with ``model_state_dict`` and ``frozen_keys: []``, ties kept. ``safetensors``:
    of tied keys the first, the others named in the header's metadata, as safetensors' own
    ``save_model`` does; `InvalidInputError` for values that are no tensors.
    """
    kept = {k: v for k, v in fields.items() if k not in _LEFT_OUT}
    if format == "pth":
        import torch

        out = io.BytesIO()
        torch.save({STATE_KEY: state, "frozen_keys": [], **kept}, out)
        return out.getvalue()
    return _safetensors(state, kept)


def _safetensors(state: Mapping[str, Any], fields: Mapping[str, Any]) -> bytes:
    from safetensors.torch import save

    plain = [k for k, v in state.items() if not hasattr(v, "untyped_storage")]
    if plain:
        raise InvalidInputError(f"safetensors holds tensors only: {plain[:8]} are none; use pth")
    aliases = {k: g[0] for g in tied_keys(state) for k in g[1:]}
    texts = {k: json.dumps(v) for k, v in fields.items() if k not in state}
    tensors = _apart({k: v for k, v in state.items() if k not in aliases})
    try:
        data: bytes = save(tensors, {"format": "pt", **texts, **aliases})
    except (KeyError, ValueError, RuntimeError) as e:
        raise InvalidInputError(f"safetensors cannot hold this model: {e}; use pth") from e
    return data


def _apart(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Row-major tensors of which none shows another's memory: overlapping views are copied."""
    seen: set[int] = set()
    out: dict[str, Any] = {}
    for key, value in tensors.items():
        whole = value.contiguous()
        place = whole.untyped_storage().data_ptr()
        out[key] = whole.clone() if place in seen else whole
        seen.add(place)
    return out


def write_output(
    address: str | os.PathLike[str], data: bytes, storage_options: dict[str, Any] | None = None
) -> None:
    """Put a file on disk (whole or not at all, durable) or behind an fsspec URL (one request)."""
    text = os.fspath(address)
    if text.startswith("castore://"):
        raise InvalidInputError(f"{text}: snapshots are not written to; use 'castore pools import'")
    if "://" not in text:
        write_bytes(Path(text), data)
        return
    import fsspec

    try:
        fs, path = fsspec.url_to_fs(text, **(storage_options or {}))
        fs.makedirs(os.path.dirname(path), exist_ok=True)
        fs.pipe_file(path, data)
    except url_errors() as e:
        raise BackendError(f"{text} cannot be written: {e}") from e
