"""Between torch's `Metadata` and the `Layout` that is stored."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from castore import InvalidInputError
from castore_dcp.layout import (
    SIZES,
    BytesEntry,
    Chunk,
    Entry,
    Item,
    Layout,
    TensorEntry,
)


def to_layout(metadata: Metadata) -> Layout:
    """What is stored of ``metadata``, whose ``storage_data`` maps indices to `Item`.

    Its ``storage_meta`` (who saved when) is not part of it: that stands in the snapshot.

    Raises
    ------
    InvalidInputError
        A dtype or a kind of entry that cannot be stored, named.
    """
    entries = {fqn: _entry(fqn, e) for fqn, e in metadata.state_dict_metadata.items()}
    items = tuple(metadata.storage_data.values())
    return Layout(entries, items, metadata.planner_data, metadata.version)


def to_metadata(layout: Layout) -> Metadata:
    """The inverse of `to_layout`: equal to what was saved but for ``storage_meta``."""
    return Metadata(
        {fqn: _storage(e) for fqn, e in layout.entries.items()},
        planner_data=layout.planner,
        storage_data={index_of(i): i for i in layout.items},
        version=layout.version,
    )


def index_of(item: Item) -> MetadataIndex:
    """The index torch looks an item up by."""
    return MetadataIndex(item.fqn, item.offsets, item.hint)


def dtype_name(dtype: torch.dtype, fqn: str) -> str:
    """The stored name of ``dtype``; `InvalidInputError` for one that is not stored."""
    name = str(dtype).removeprefix("torch.")
    if name not in SIZES:
        raise InvalidInputError(
            f"{fqn!r} has dtype {dtype}, which cannot be stored: convert it, or keep it as bytes"
            " (a value that is no tensor)"
        )
    return name


def named(name: str, kind: type[Any]) -> Any:
    """torch's constant of that name; ValueError if it is none of ``kind``."""
    found = getattr(torch, name, None)
    if not isinstance(found, kind):
        raise ValueError(f"this torch has no {kind.__name__} {name!r}")
    return found


def _entry(fqn: str, entry: object) -> Entry:
    if isinstance(entry, BytesStorageMetadata):
        return BytesEntry()
    if not isinstance(entry, TensorStorageMetadata):
        raise InvalidInputError(f"{fqn!r} is described by a {type(entry).__name__}: unknown kind")
    p = entry.properties
    return TensorEntry(
        dtype_name(p.dtype, fqn),
        tuple(entry.size),
        tuple(Chunk(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks),
        str(p.layout).removeprefix("torch."),
        p.requires_grad,
        str(p.memory_format).removeprefix("torch."),
        p.pin_memory,
    )


def _storage(entry: Entry) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(entry, BytesEntry):
        return BytesStorageMetadata()
    properties = TensorProperties(
        dtype=named(entry.dtype, torch.dtype),
        layout=named(entry.layout, torch.layout),
        requires_grad=entry.requires_grad,
        memory_format=named(entry.memory_format, torch.memory_format),
        pin_memory=entry.pin_memory,
    )
    chunks = [
        ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks
    ]
    return TensorStorageMetadata(properties, torch.Size(entry.size), chunks)
