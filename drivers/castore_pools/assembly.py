"""The whole model from a base and a pool file, or from a base and generated tensors.

Source of the rule: a pool file holds every tensor but the frozen ones, which are copied from the
base's ``model_state_dict`` (docs/layouts/pools.md, "Reassembling").
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from castore import (
    FormatError,
    IntegrityError,
    LayoutError,
    NotFoundError,
    UntrustedPickleError,
)
from castore_pools import rules
from castore_pools.addresses import open_sources
from castore_pools.checkpoint import Checkpoint, load_together, open_checkpoint
from castore_pools.names import is_base, split_root
from castore_pools.pins import FIELD, Pin, frozen_keys_of, read_pin
from castore_pools.places import Place, open_place
from castore_pools.registry import find_record, read_registries
from castore_pools.values import dtype_of, is_floating

if TYPE_CHECKING:
    from torch import Tensor

Address: TypeAlias = str | os.PathLike[str]


def assemble(
    base_ckpt_path: Address | Checkpoint,
    pool_ckpt_path: Address | Checkpoint | Mapping[str, Tensor],
    *,
    frozen_keys: Sequence[str] | None = None,
    record: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    require_pin: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> OrderedDict[str, Tensor]:
    """The full state dict: the pool file's tensors, and the frozen ones copied from the base.

    ``load_state_dict(strict=True)`` accepts it. Keys stand in the base's order; tied keys are one
    tensor. Nothing is unpickled that could run code; ``frozen_source`` is text and never opened.

    Parameters
    ----------
    base_ckpt_path, pool_ckpt_path : address, or an opened checkpoint
        A local path, an fsspec URL, or ``castore://<namespace>/<snapshot>/<path>``. In place of a
        pool file a mapping of generated tensors.
    frozen_keys : sequence of str, optional
        For generated tensors; by default those of the registry's record.
    record : mapping, optional
        The registry's record of the cell; looked up beside the base where it is needed.
    dtype : str, optional
        Of the floating-point tensors. By default what was recorded at collection, else float32.
    require_pin : bool
        Refuse a pool file that does not say what its frozen tensors were.

    Raises
    ------
    LayoutError
        Keys, shapes or dtypes that do not make one model; they are named.
    IntegrityError
        The base's frozen tensors are not those that were pinned, or tied copies differ.
    NotFoundError, BackendError, FormatError, UntrustedPickleError
    """
    base, given = _open_both(base_ckpt_path, pool_ckpt_path, storage_options)
    where = given.where if isinstance(given, Checkpoint) else "the generated tensors"
    if record is None and not isinstance(given, Checkpoint):
        record = _record_beside(base.where, storage_options)
    state = given.state if isinstance(given, Checkpoint) else given
    frozen = _frozen_keys(given, frozen_keys, record)
    pin = _pin(given, record)
    wanted = dtype or pin.dtype
    rules.check_keys(base.state, state, frozen)
    rules.check_forms(base.state, state, wanted)
    _check_pinned(pin, frozen, where, require_pin)
    values = _load(base, given, frozen, pin, where)
    groups = rules.tie_groups(base, frozen, pin.ties)
    rules.tie(values, groups, base.where)
    _convert(values, frozen, wanted, groups)
    rules.tie(values, rules.tie_groups(base, values, pin.ties, by_name=False), where)
    return _ordered(base, given, values)


def _open_both(
    base: Address | Checkpoint,
    pool: Address | Checkpoint | Mapping[str, Tensor],
    storage_options: dict[str, Any] | None,
) -> tuple[Checkpoint, Checkpoint | Mapping[str, Tensor]]:
    addresses = [p for p in (base, pool) if isinstance(p, str | os.PathLike)]
    sources = iter(open_sources(addresses, storage_options))
    found = base if isinstance(base, Checkpoint) else open_checkpoint(next(sources))
    given = open_checkpoint(next(sources)) if isinstance(pool, str | os.PathLike) else pool
    if not isinstance(given, Checkpoint):
        _check_generated(given)
    return found, given


def _check_generated(tensors: Mapping[str, Tensor]) -> None:
    """Values that were never filled are refused: they would load as whatever memory held."""
    empty = [k for k, t in tensors.items() if getattr(t, "is_meta", False)]
    if empty:
        raise LayoutError(f"generated tensors without values (on the meta device): {empty[:8]}")


def _frozen_keys(
    given: Checkpoint | Mapping[str, Tensor],
    frozen_keys: Sequence[str] | None,
    record: Mapping[str, Any] | None,
) -> list[str]:
    if isinstance(given, Checkpoint) and frozen_keys is None:
        return frozen_keys_of(given.fields, given.where)
    if frozen_keys is None and record is None:
        return frozen_keys_of({}, "the generated tensors")
    fields = {"frozen_keys": list(frozen_keys)} if frozen_keys is not None else dict(record or {})
    return frozen_keys_of(fields, "the given frozen keys")


def _pin(given: Checkpoint | Mapping[str, Tensor], record: Mapping[str, Any] | None) -> Pin:
    if isinstance(given, Checkpoint) and given.fields.get(FIELD) is not None:
        return read_pin(given.fields[FIELD], given.where)
    return read_pin((record or {}).get(FIELD), "the registry's record")


def _check_pinned(pin: Pin, frozen: Sequence[str], where: str, required: bool) -> None:
    if pin.frozen or not frozen:
        return
    if required:
        raise IntegrityError(
            f"{where}: unpinned: nothing says what its frozen tensors were ({', '.join(frozen)})"
        )
    logging.getLogger("castore.pools").warning(
        "%s: unpinned: its base is taken on trust for %s", where, ", ".join(frozen)
    )


def _load(
    base: Checkpoint,
    given: Checkpoint | Mapping[str, Tensor],
    frozen: Sequence[str],
    pin: Pin,
    where: str,
) -> dict[str, Any]:
    """All values, read together; the frozen ones proven by the pin where there is one."""
    if isinstance(given, Checkpoint):
        values, loaded = load_together([(base, frozen), (given, given.keys())])
    else:
        values, loaded = base.load(frozen), dict(given)
    if pin.frozen:
        rules.check_pin(base, values, pin, where)
    return {**loaded, **values}


def _convert(
    values: dict[str, Any],
    frozen: Sequence[str],
    dtype: str | None,
    groups: Sequence[Sequence[str]],
) -> None:
    """Give the frozen floating-point tensors the recorded dtype, ties kept."""
    if dtype is None:
        return
    for key in frozen:
        kind = rules.form_of(values[key]).dtype
        if is_floating(kind) and kind != dtype:
            values[key] = values[key].to(dtype_of(dtype))
    for group in groups:
        values.update(dict.fromkeys(group, values[group[0]]))


def _ordered(
    base: Checkpoint, given: Checkpoint | Mapping[str, Tensor], values: Mapping[str, Any]
) -> OrderedDict[str, Tensor]:
    state: OrderedDict[str, Tensor] = OrderedDict((k, values[k]) for k in base.state)
    own = given.metadata if isinstance(given, Checkpoint) else None
    metadata = own or base.metadata
    if metadata is not None:
        state._metadata = metadata  # type: ignore[attr-defined]
    return state


def _record_beside(where: str, storage_options: dict[str, Any] | None) -> dict[str, Any] | None:
    """The registry's record of the base at ``where``, if it lies in a layout."""
    parts = split_root(where)
    if parts is None:
        return None
    return find_record(open_place(parts[0], storage_options), ckpt_path=parts[1])


# -- finding the base


def find_base(
    root: Address | Place, pool: Checkpoint, *, storage_options: dict[str, Any] | None = None
) -> str:
    """The path, below ``root``, of the base that ``pool`` was collected from.

    The registry's ``ckpt_path`` of the pool file's cell comes first, then a record with its base's
    digest, then every base under ``zoo/`` whose frozen tensors are the pinned ones. What
    ``frozen_source`` says is not looked at.

    Raises
    ------
    NotFoundError
        None of them is there or fits.
    LayoutError
        A record's ``ckpt_path`` is none.
    """
    place = open_place(root, storage_options) if isinstance(root, str | os.PathLike) else root
    pin = read_pin(pool.fields.get(FIELD), pool.where)
    frozen = frozen_keys_of(pool.fields, pool.where)
    paths = place.paths()
    recorded = _recorded(place, pool, pin)
    for path in dict.fromkeys([*recorded, *filter(is_base, paths)]):
        trusted = path in recorded or _same_model(pool, path)
        if path in paths and (pin.frozen or trusted) and _fits(place, path, frozen, pin, pool):
            return path
    raise NotFoundError(
        f"{pool.where}: no base in {place.where} has the frozen tensors it was collected from"
        f" ({', '.join(frozen)}): name the base"
    )


def _recorded(place: Place, pool: Checkpoint, pin: Pin) -> list[str]:
    parts = split_root(pool.where)
    found: list[str] = []
    for record in read_registries(place):
        mine = parts is not None and parts[1].startswith(record.pool_folder + "/")
        if mine:
            found.insert(0, record.ckpt_path)
        elif pin.base and record.base_digest == pin.base:
            found.append(record.ckpt_path)
    return found


def _same_model(pool: Checkpoint, path: str) -> bool:
    """Whether a base has the model's name that the pool file's folder has."""
    parts = split_root(pool.where)
    return parts is not None and parts[1].split("/")[3] + ".pth" == path.split("/")[3]


def _fits(place: Place, path: str, frozen: Sequence[str], pin: Pin, pool: Checkpoint) -> bool:
    """Whether the file at ``path`` can be the base; one that is no checkpoint is told and not."""
    try:
        base = open_checkpoint(place.source(path))
    except (FormatError, LayoutError, UntrustedPickleError) as e:
        logging.getLogger("castore.pools").warning("looking for a base, passed over: %s", e)
        return False
    if any(k not in base.state for k in [*frozen, *pool.state]):
        return False
    values = base.load(k for k in frozen if k in pin.frozen)
    return all(base.digest(k, v) == pin.frozen[k] for k, v in values.items())
