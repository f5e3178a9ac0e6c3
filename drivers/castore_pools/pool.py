"""One pool member, opened lazily: single tensors, rows, or the whole model."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from castore import LayoutError
from castore.tensors import TensorInfo
from castore_pools.assembly import assemble
from castore_pools.checkpoint import Checkpoint, open_checkpoint
from castore_pools.pins import FIELD, frozen_keys_of, read_pin
from castore_pools.rules import check_keys, check_pin
from castore_pools.values import dtype_name, dtype_of, is_floating

if TYPE_CHECKING:
    from torch import Tensor


class KeptCheckpoint(Checkpoint):
    """A checkpoint that keeps in memory what was read, and gives copies of it."""

    def __init__(self, opened: Checkpoint):
        super().__init__(opened.source)
        self.kept: dict[str, Any] = {}

    def to_read(self, keys: Sequence[str]) -> list[str]:
        return [k for k in super().to_read(keys) if k not in self.kept]

    def give(self, keys: Sequence[str], read: Mapping[str, Tensor]) -> dict[str, Any]:
        self.kept.update(read)
        copies: dict[int, Any] = {}
        found = super().give(keys, self.kept)
        for value in found.values():
            copies.setdefault(id(value), value.clone() if hasattr(value, "clone") else value)
        return {k: copies[id(v)] for k, v in found.items()}


def _keeping(opened: Checkpoint) -> KeptCheckpoint:
    return opened if isinstance(opened, KeptCheckpoint) else KeptCheckpoint(opened)


class Pool:
    """A pool member and its base. What was read stays in memory until the object goes.

    Attributes
    ----------
    base, member : Checkpoint
    frozen_keys : list of str
    pinned : bool
        Whether the member says what its frozen tensors were.
    """

    def __init__(self, base: Checkpoint, member: Checkpoint):
        self.base, self.member = _keeping(base), _keeping(member)
        self.frozen_keys = frozen_keys_of(member.fields, member.where)
        check_keys(base.state, member.state, self.frozen_keys)
        self._pin = read_pin(member.fields.get(FIELD), member.where)
        self._frozen = set(self.frozen_keys)
        self._proven: set[str] = set()

    @property
    def pinned(self) -> bool:
        return bool(self._pin.frozen)

    @property
    def fields(self) -> Mapping[str, Any]:
        """``collect_step``, ``train_step``, ``val_metric``, ``val_loss`` and the others."""
        return self.member.fields

    def keys(self) -> list[str]:
        """Every key of the whole model."""
        return self.base.keys()

    def info(self, key: str) -> TensorInfo:
        """Dtype, shape and place of a tensor in its file, without reading it."""
        found = self._home(key).state[key]
        if not isinstance(found, TensorInfo):
            raise LayoutError(f"{key!r} is a plain value, not a tensor")
        return found

    def tensor(self, key: str) -> Tensor:
        """One tensor as `assemble` gives it, without the rest.

        A frozen one comes from the base, its pin checked, in the dtype that was recorded.
        """
        tensor = self._home(key).tensor(key)
        if key in self._frozen and key not in self._proven and self.pinned:
            check_pin(self.base, {key: tensor}, self._pin, self.member.where)
            self._proven.add(key)
        return self._converted(key, tensor)

    def _converted(self, key: str, tensor: Tensor) -> Tensor:
        dtype = self._pin.dtype
        if dtype is None or key not in self._frozen or not is_floating(dtype_name(tensor)):
            return tensor
        return tensor.to(dtype_of(dtype))

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        """Rows ``[start, stop)`` of one tensor. A part of a frozen tensor proves no pin."""
        home = self._home(key)
        if key in home.kept and 0 <= start <= stop and self.info(key).shape:
            return self.tensor(key)[start:stop].clone()
        return self._converted(key, home.rows(key, start, stop))

    def assemble(self, *, require_pin: bool = False) -> OrderedDict[str, Tensor]:
        """The whole state dict; only what was not read before is transferred."""
        return assemble(self.base, self.member, require_pin=require_pin)

    def _home(self, key: str) -> KeptCheckpoint:
        if key in self._frozen:
            return self.base
        if key not in self.member.state:
            raise LayoutError(f"there is no tensor {key!r} in {self.member.where}")
        return self.member


def open_pool(
    base_ckpt_path: str | os.PathLike[str] | Checkpoint,
    pool_ckpt_path: str | os.PathLike[str] | Checkpoint,
    *,
    storage_options: dict[str, Any] | None = None,
) -> Pool:
    """Open a pool member with its base; only their headers are read.

    Parameters
    ----------
    base_ckpt_path, pool_ckpt_path : address or opened checkpoint
        As for `castore_pools.assemble`. Another pool's ``base`` may be given: what it has read
        is not read again.
    storage_options : dict, optional
        For fsspec URLs.

    Raises
    ------
    LayoutError
        The keys do not make one model.
    NotFoundError, BackendError, FormatError, UntrustedPickleError
    """
    base, member = (
        c if isinstance(c, Checkpoint) else open_checkpoint(c, storage_options)
        for c in (base_ckpt_path, pool_ckpt_path)
    )
    return Pool(base, member)
