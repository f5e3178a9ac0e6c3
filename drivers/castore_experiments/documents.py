"""The small JSON documents of the layout, and the files of ours that only snapshots hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from castore import FormatError
from castore_experiments import layout

CONFIG = "castore/config.json"
"""In a state's tree: the configuration with its types, as `canonical.encode` spells it."""
ARCHITECTURE = "castore/architecture.json"
"""In a state's tree: the description of the model."""
OWN_FILES = (CONFIG, ARCHITECTURE)

_MAX_JSON = 64 << 20


@dataclass(frozen=True, slots=True)
class DataDocument:
    """``<DATA>_data_snapshot.json``: what stands beside the rows, or (older files) the rows too."""

    exp_hash: str
    timestamp: str
    rows: int
    rng_state: Mapping[str, Any] | None = None
    loaders: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    inline: list[Any] | None = None

    def encode(self, label: str) -> bytes:
        """Its text; ``label`` is that of the data, whose parquet file it names."""
        body: dict[str, Any] = {
            "exp_hash": self.exp_hash,
            "timestamp": self.timestamp,
            "data_format": "parquet",
            "data_file": layout.data_parquet_path(label).rpartition("/")[2],
            "data_rows": self.rows,
            "rng_state": self.rng_state,
        }
        if self.loaders:
            body["dataloader_iteration_state"] = dict(self.loaders)
        return json.dumps(body, indent=2, allow_nan=False).encode() + b"\n"

    @staticmethod
    def decode(data: bytes, where: str) -> DataDocument:
        """The document in ``data``, ours or the public tool's; `FormatError` if it is none."""
        body = read_object(data, where)
        rng, inline = body.get("rng_state"), body.get("data")
        rows = body.get("data_rows", len(inline) if isinstance(inline, list) else 0)
        if not isinstance(rng, dict | None) or type(rows) is not int:
            raise FormatError(f"{where}: rng_state or data_rows has a wrong type")
        return DataDocument(
            str(body.get("exp_hash", "")),
            str(body.get("timestamp", "")),
            rows,
            rng,
            loaders_of(body.get("dataloader_iteration_state"), where),
            inline if isinstance(inline, list) else None,
        )


def loaders_of(value: object, where: str) -> dict[str, Mapping[str, Any]]:
    """Positions by loader; an older flat mapping is that of the loader ``default``."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise FormatError(f"{where}: dataloader_iteration_state is no mapping")
    if "samples_yielded" in value and not isinstance(value["samples_yielded"], dict):
        return {"default": value}
    if not all(isinstance(v, dict) for v in value.values()):
        raise FormatError(f"{where}: dataloader_iteration_state: a position is no mapping")
    return {str(k): v for k, v in value.items()}


def architecture_ref(model: str, holder: str, hash: str) -> bytes:
    """``<MODEL>_architecture_ref.json``: which model's folder has the pickled architecture.

    Parameters
    ----------
    model, holder : str
        Labels of the model that refers, and of the one whose folder holds the file.
    hash : str
        The experiment hash that is referring.
    """
    body = {
        "architecture_hash": holder,
        "current_hash": hash,
        "model_hash": model,
        "reason": "the model did not change",
    }
    return json.dumps(body, indent=2).encode() + b"\n"


def read_architecture_ref(data: bytes, where: str) -> str:
    """The label of the folder that holds the architecture; `FormatError` if it names none."""
    label = read_object(data, where).get("architecture_hash")
    if not isinstance(label, str) or not layout.is_label(label):
        raise FormatError(f"{where}: architecture_hash {label!r} is no label of 8 characters")
    return label


def read_object(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object; `FormatError` for anything else, for a key twice, for what is too deep."""
    if len(data) > _MAX_JSON:
        raise FormatError(f"{where}: {len(data)} bytes, at most {_MAX_JSON}")
    try:
        value = json.loads(data, object_pairs_hook=_no_key_twice)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{where}: not JSON: {e}") from e
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected an object, found {type(value).__name__}")
    return value


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found
