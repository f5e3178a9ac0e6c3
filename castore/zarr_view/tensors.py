"""The tensors of a committed file as a read-only zarr group; nothing is unpickled or unpacked."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from operator import lt
from typing import Any

import zarr
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.dtype import parse_dtype

from castore.errors import FormatError, NotFoundError
from castore.ranges import Blobs, Extent
from castore.repository import Repository
from castore.snapshot import SnapshotName
from castore.tree import File
from castore.zarr_view import dtypes
from castore.zarr_view.keys import NODE, children, span
from castore.zarr_view.layout import View, node_paths
from castore.zarr_view.views import Contents, read_contents

_CHUNK = re.compile(r"(.+)/c((?:/(?:0|[1-9][0-9]{0,18}))*)")


def tensors_group(repository: Repository, snapshot: SnapshotName | str, path: str) -> zarr.Group:
    """The tensors of a committed ``.pt``, ``.pth``, ``.ckpt``, ``.safetensors`` or ``.npz``.

    A read-only group of zarr format 3: one array a tensor, under its name (how names become
    nodes: `castore.zarr_view.layout`). Shapes and dtypes come from the file's headers; a torch
    file's pickle is interpreted and never run. A chunk is at most 4 MiB of what lies together in
    the file, so reading a slice fetches the blobs it lies in, and verifies each. Views with
    strides, transposed and expanded tensors are shown as they are; tied ones twice. Members of an
    ``.npz`` that are compressed are unpacked whole, up to 512 MiB, when first read.

    What no array can show (Python objects, records, texts, an unknown dtype) is no member: its
    name raises, and stands with the reason in the group's attribute ``not_shown``.

    Raises
    ------
    NotFoundError
        The snapshot has no such file.
    FormatError
        It is no file of tensors, or damaged.
    UntrustedPickleError
        A torch file's pickle names what is not on the list.
    ObjectNotFoundError, CorruptObjectError
        Something it needs is lost or damaged; later from every read of a slice.
    """
    name = repository.resolve(snapshot) if isinstance(snapshot, str) else snapshot
    entry = repository.tree(name).entries.get(path)
    if not isinstance(entry, File):
        raise NotFoundError(f"there is no file {path!r} in {name}: 'castore ls' lists its paths")
    store = TensorStore(repository, entry, f"{name}:{path}")
    return zarr.open_group(store, mode="r", zarr_format=3)


@dataclass(frozen=True)
class _Nodes:
    """The hierarchy: arrays by path, groups with their children, reasons for what is not shown."""

    arrays: Mapping[str, View]
    groups: Mapping[str, tuple[str, ...]]
    refused: Mapping[str, tuple[str, str]]
    attributes: Mapping[str, Any]


class TensorStore(Store):
    """A zarr store over one committed file; `tensors_group` opens it.

    Parameters
    ----------
    repository : Repository
    file : File
        Of some tree of the repository.
    where : str
        What messages call it.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(self, repository: Repository, file: File, where: str):
        super().__init__(read_only=True)
        dtypes.register()
        self.repository, self.file, self.where = repository, file, where
        self._nodes  # noqa: B018 - what cannot be opened is told here

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorStore, (self.repository, self.file, self.where)

    def __str__(self) -> str:
        return f"castore-tensors://{self.where}"

    def __repr__(self) -> str:
        return f"TensorStore({self.repository.url!r}, {self.where!r})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TensorStore)
            and self.repository.id == other.repository.id
            and (self.file, self.where) == (other.file, other.where)
        )

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def _nodes(self) -> _Nodes:
        blobs, extent = Blobs(self.repository.store), Extent.of(self.file)
        read = partial(blobs.read, extent)
        return _hierarchy(read_contents(read, self.file.size, self.where))

    # -- reading

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """A node's metadata or a chunk; None only for what is not in the hierarchy."""
        found = await asyncio.to_thread(self._value, key)
        if found is None:
            return None
        start, stop = span(byte_range, len(found))
        return prototype.buffer.from_bytes(found[start:stop])

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return list(await asyncio.gather(*(self.get(k, prototype, r) for k, r in key_ranges)))

    async def exists(self, key: str) -> bool:
        return self._metadata_of(key) is not None or self._chunk_of(key) is not None

    async def getsize(self, key: str) -> int:
        metadata, chunk = self._metadata_of(key), self._chunk_of(key)
        if metadata is not None:
            return len(metadata)
        if chunk is None:
            raise FileNotFoundError(key)
        return math.prod(chunk[0].chunks) * chunk[0].dtype.itemsize

    def _value(self, key: str) -> bytes | None:
        found = self._chunk_of(key)
        return self._metadata_of(key) if found is None else found[0].chunk(found[1])

    def _chunk_of(self, key: str) -> tuple[View, tuple[int, ...]] | None:
        match = _CHUNK.fullmatch(key)
        view = self._nodes.arrays.get(match[1]) if match else None
        if match is None or view is None:
            return None
        index = tuple(map(int, match[2].split("/")[1:]))
        inside = len(index) == len(view.grid) and all(map(lt, index, view.grid))
        return (view, index) if inside else None

    def _metadata_of(self, key: str) -> bytes | None:
        path, nodes = key.removesuffix(NODE).rstrip("/"), self._nodes
        if key not in (NODE, f"{path}/{NODE}"):
            return None
        if path in nodes.refused:
            name, why = nodes.refused[path]
            raise FormatError(f"{name!r} of {self.where} cannot be shown as an array: {why}")
        if path in nodes.arrays:
            return _array(nodes.arrays[path])
        if path not in nodes.groups:
            return None
        return _group({} if path else {"file": self.where, **nodes.attributes})

    # -- listing

    async def list(self) -> AsyncIterator[str]:
        for key in self._keys():
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for key in self._keys():
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        path, nodes = prefix.strip("/"), self._nodes
        if path in nodes.groups:
            found = sorted({NODE, *nodes.groups[path]})
        elif path in nodes.arrays:
            found = ["c", NODE] if math.prod(nodes.arrays[path].grid) else [NODE]
        else:
            found = children(self._keys(), prefix)
        for name in found:
            yield name

    def _keys(self) -> Iterator[str]:
        yield from (f"{g}/{NODE}" if g else NODE for g in self._nodes.groups)
        for path, view in self._nodes.arrays.items():
            yield f"{path}/{NODE}"
            yield from (f"{path}/{key}" for key in view.chunk_keys())

    # -- what is read-only

    async def set(self, key: str, value: Buffer) -> None:
        self._check_writable()

    async def delete(self, key: str) -> None:
        self._check_writable()


def _hierarchy(contents: Contents) -> _Nodes:
    paths = node_paths([*contents.views, *contents.refused])
    groups: dict[str, dict[str, None]] = {"": {}}
    for name in contents.views:
        path = paths[name]
        while path:
            parent, _, last = path.rpartition("/")
            groups.setdefault(parent, {})[last] = None
            path = parent
    return _Nodes(
        {paths[n]: v for n, v in contents.views.items()},
        {g: tuple(names) for g, names in groups.items()},
        {paths[n]: (n, why) for n, why in contents.refused.items()},
        {"format": contents.format, "not_shown": dict(contents.refused)},
    )


def _group(attributes: Mapping[str, Any]) -> bytes:
    document = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    return json.dumps(document).encode()


def _array(view: View) -> bytes:
    zdtype = parse_dtype(view.dtype, zarr_format=3)
    fill = zdtype.to_json_scalar(zdtype.default_scalar(), zarr_format=3)
    endian = {"configuration": {"endian": "little"}} if view.dtype.itemsize > 1 else {}
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": view.shape,
        "data_type": zdtype.to_json(zarr_format=3),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": view.chunks}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": [{"name": "bytes", **endian}],
        "attributes": {"name": view.name},
    }
    return json.dumps(document).encode()
