"""Whether a document that another program writes in place is whole already."""

from __future__ import annotations

import pickletools
from collections.abc import Callable

from castore import FormatError
from castore_experiments import canonical, layout
from castore_experiments.documents import DataDocument, read_architecture_ref
from castore_experiments.resume import read_rows


def check_whole(path: str, data: bytes) -> None:
    """`FormatError` for a document of the layout that is cut off or cannot be read.

    Weight files are not for this: to decode one is to check it.
    """
    found = layout.parse(path)
    if found is not None and found.kind in _CHECKS:
        _CHECKS[found.kind](data, path)


def _config(data: bytes, path: str) -> None:
    """The public tool sorts the keys, so ``last_updated`` comes last; ours are never torn."""
    body = canonical.from_yaml(data, path)
    canonical.hp_file(data, path)
    if "last_updated" not in body and not data.startswith(b'exp_hash: "'):
        raise FormatError(f"{path}: cut off: its last key, last_updated, is missing")


def _data(data: bytes, path: str) -> None:
    DataDocument.decode(data, path)


def _rows(data: bytes, path: str) -> None:
    from castore_experiments.samples import DataState

    DataState.from_parquet(data, path)


def _reference(data: bytes, path: str) -> None:
    read_architecture_ref(data, path)


def _pickle(data: bytes, path: str) -> None:
    """Its operations are counted, not carried out."""
    try:
        for _ in pickletools.genops(data):
            pass
    except ValueError as e:
        raise FormatError(f"{path}: not a whole pickle: {e}") from e


def _json(data: bytes, path: str) -> None:
    read_rows(data, path)


_CHECKS: dict[layout.Kind, Callable[[bytes, str], None]] = {
    "config": _config,
    "data_json": _data,
    "data_parquet": _rows,
    "data_rows": _json,
    "architecture": _pickle,
    "architecture_ref": _reference,
}
