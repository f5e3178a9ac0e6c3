"""One checkpoint, opened: its fields at once, its tensors when they are asked for."""

from __future__ import annotations

import io
import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from castore import FormatError, LayoutError, Repository, UntrustedPickleError
from castore.tensors import TensorInfo, describe
from castore_pools.addresses import open_source
from castore_pools.sources import BytesSource, Source
from castore_pools.values import digest_of_pieces, load_rows, load_tensors, value_digest

if TYPE_CHECKING:
    from torch import Tensor

STATE_KEY = "model_state_dict"


class Checkpoint:
    """A base or pool file whose ``model_state_dict`` is read tensor by tensor.

    Nothing is unpickled: the pickle's operations are interpreted by `castore.tensors`.

    Attributes
    ----------
    where : str
        Its address.
    state : mapping of key to TensorInfo
        The state dict in its order; plain values stand for themselves.
    fields : mapping of str to object
        What stands beside ``model_state_dict``.
    metadata : mapping or None
        The ``_metadata`` of the saved state dict.
    """

    def __init__(self, source: Source):
        self.source, self.where = source, source.where
        try:
            self.file = describe(source.read, source.size)
            if self.file.format == "safetensors":
                self.state, self.fields = _from_safetensors(self.file.tensors, self.file.metadata)
            else:
                self.state, self.fields = _from_torch(self.file.document)
        except (FormatError, LayoutError, UntrustedPickleError) as e:
            raise type(e)(f"{self.where}: {e}") from e
        self.metadata: Any = getattr(self.state, "_metadata", None)

    def keys(self) -> list[str]:
        return list(self.state)

    def load(self, keys: Iterable[str]) -> dict[str, Any]:
        """The values of ``keys``; tied ones share their storage."""
        return load_together([(self, keys)])[0]

    def to_read(self, keys: Sequence[str]) -> list[str]:
        """Those of ``keys`` whose tensors must be read."""
        return [k for k in keys if isinstance(self.state[k], TensorInfo)]

    def give(self, keys: Sequence[str], read: Mapping[str, Tensor]) -> dict[str, Any]:
        """The values of ``keys``, from what was read."""
        return {k: read[k] if k in read else self.state[k] for k in keys}

    def digest(self, key: str, value: Any) -> str:
        """`value_digest` of what `load` gave for ``key``, without hashing it twice."""
        info = self.state[key]
        if isinstance(info, TensorInfo) and info.contiguous and info.extent:
            pieces = self.source.proven(*self.file.range(info))
            if pieces is not None:
                return digest_of_pieces(info.dtype, info.shape, pieces)
        return value_digest(value)

    def tensor(self, key: str) -> Tensor:
        """One tensor, without the rest."""
        self._info(key)
        loaded: Tensor = self.load([key])[key]
        return loaded

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        """Rows ``[start, stop)`` of one tensor, without its other rows."""
        info = self._info(key)
        if not info.shape or not 0 <= start <= stop:
            raise LayoutError(f"{self.where}: {key!r} of shape {info.shape} has no such rows")
        return load_rows(self.source, self.file, info, start, stop)

    def digests(self) -> dict[str, str]:
        """`value_digest` of every key, one tensor in memory at a time."""
        return {k: self.digest(k, self.load([k])[k]) for k in self.state}

    def ties(self) -> list[tuple[str, ...]]:
        """Keys that are one tensor in this file."""
        names = {i.name: k for k, i in self.state.items() if isinstance(i, TensorInfo)}
        groups = (tuple(names[n] for n in g if n in names) for g in self.file.ties())
        return [g for g in groups if len(g) > 1] + self._aliases()

    def _aliases(self) -> list[tuple[str, ...]]:
        groups: dict[str, list[str]] = {}
        for key, info in self.state.items():
            if isinstance(info, TensorInfo) and self.file.format == "safetensors":
                groups.setdefault(info.name, []).append(key)
        return [tuple(g) for g in groups.values() if len(g) > 1]

    def _info(self, key: str) -> TensorInfo:
        info = self.state.get(key)
        if not isinstance(info, TensorInfo):
            raise LayoutError(f"{self.where}: there is no tensor {key!r}")
        return info


def load_together(parts: Sequence[tuple[Checkpoint, Iterable[str]]]) -> list[dict[str, Any]]:
    """The values of several checkpoints' keys, read at the same time."""
    wanted = [(checkpoint, list(keys)) for checkpoint, keys in parts]
    reading = [(c, c.to_read(keys)) for c, keys in wanted]
    items = [(c.source, c.file, c.state[k]) for c, keys in reading for k in keys]
    tensors = iter(load_tensors(items))
    read = [{k: next(tensors) for k in keys} for _, keys in reading]
    return [c.give(keys, found) for (c, keys), found in zip(wanted, read, strict=True)]


def _from_torch(document: Any) -> tuple[Mapping[str, Any], dict[str, Any]]:
    if not isinstance(document, dict) or not isinstance(document.get(STATE_KEY), dict):
        raise LayoutError(f"no {STATE_KEY!r} in it: not a base or pool checkpoint")
    state = document[STATE_KEY]
    odd = [k for k in state if not isinstance(k, str)]
    if odd:
        raise LayoutError(f"{STATE_KEY!r} has keys that are no texts: {odd[:3]}")
    return state, {k: v for k, v in document.items() if k != STATE_KEY}


def _from_safetensors(
    tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Fields are JSON in the header; a text that names a tensor is an alias of it."""
    state: OrderedDict[str, Any] = OrderedDict(tensors)
    fields: dict[str, Any] = {}
    for name, text in metadata.items():
        if text in tensors and name not in tensors:
            state[name] = tensors[text]
        else:
            try:
                fields[name] = json.loads(text)
            except (ValueError, RecursionError):
                fields[name] = text
    return state, fields


def open_checkpoint(
    address: str | os.PathLike[str] | Source,
    storage_options: dict[str, Any] | None = None,
    repository: Repository | None = None,
) -> Checkpoint:
    """Open a base or pool file: a local path, an fsspec URL, ``castore://`` or a source.

    A torch file of the format before 1.6 is read whole, with ``weights_only=True``.

    Raises
    ------
    NotFoundError, BackendError
    FormatError, LayoutError
        It is no file of tensors, or no checkpoint of this layout.
    UntrustedPickleError
        It names what is not plain data; nothing was run.
    """
    source = (
        open_source(address, storage_options, repository)
        if isinstance(address, str | os.PathLike)
        else address
    )
    if source.size > 2 and source.read(0, 1) == b"\x80":
        source = _modern(source)
    return Checkpoint(source)


def _modern(source: Source) -> BytesSource:
    """An old torch file in the format of today."""
    import pickle

    import torch

    data = io.BytesIO(source.read(0, source.size))
    try:
        value = torch.load(data, weights_only=True)
    except pickle.UnpicklingError as e:
        raise UntrustedPickleError(f"{source.where}: {e}") from e
    except Exception as e:  # its reader raises whatever a hostile pickle makes of its stack
        raise FormatError(f"{source.where}: not a readable torch file: {e}") from e
    out = io.BytesIO()
    torch.save(value, out)
    return BytesSource(out.getvalue(), source.where)
