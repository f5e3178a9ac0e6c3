"""Full pool files made small afterwards: keys whose bytes never changed are taken out."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from castore import IntegrityError, InvalidInputError, LayoutError
from castore.tensors import TensorInfo
from castore_pools import records
from castore_pools.assembly import assemble
from castore_pools.checkpoint import STATE_KEY, Checkpoint, open_checkpoint
from castore_pools.files import write_bytes
from castore_pools.freeze import saved_state
from castore_pools.names import cell_of, collected_index, split_root
from castore_pools.pins import FIELD, Pin, read_pin
from castore_pools.registry import put_record, read_record
from castore_pools.rules import check_forms, check_keys, tie_groups
from castore_pools.sources import BytesSource
from castore_pools.values import digest_state, state_digest, value_digest


@dataclass(frozen=True, slots=True)
class Reduction:
    """``keys`` taken out of ``files``; bytes of the files before and after."""

    keys: tuple[str, ...]
    files: tuple[str, ...]
    before: int
    after: int


def reduce_files(
    base: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dry_run: bool = False,
) -> Reduction:
    """Write the pool files of ``folder`` into ``out`` without the keys that never changed.

    A key is taken out when its bytes are the base's in every file; a tied one only with all its
    names. Every file is reassembled and compared before it is written; ``out`` may be ``folder``.
    The record of the cell, where there is one beside ``out``, follows.

    Raises
    ------
    LayoutError
        No pool files, files that are no checkpoints of the base's model, or unpinned ones from
        which keys were taken out before.
    IntegrityError
        Keys that were taken out before are, by the pin, not the base's.
    InvalidInputError
        Nothing changed at all between the base and the files.
    """
    paths = _pool_files(Path(folder))
    opened = open_checkpoint(base)
    digests = opened.digests()
    keys = _unchanged(opened, digests, paths)
    if len(keys) == len(digests):
        raise InvalidInputError(f"{folder}: nothing differs from {opened.where}: not a pool of it")
    before = sum(p.stat().st_size for p in paths)
    ties = tuple(tuple(g) for g in tie_groups(opened, opened.keys(), ()))
    after, logs = 0, {}
    for path in () if dry_run else paths:
        data, digest = _reduced(path, opened, keys, digests, ties)
        write_bytes(Path(out) / path.name, data)
        logs[path.name] = {"digest": digest, "sha256": _sha256(data)}
        after += len(data)
    if logs:
        _update_record(Path(out), opened, keys, ties, digests, logs)
    return Reduction(tuple(keys), tuple(p.name for p in paths), before, after)


def _pool_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise LayoutError(f"{folder} is not a folder")
    found = [p for p in folder.iterdir() if collected_index(p.name) is not None]
    if not found:
        raise LayoutError(f"{folder} holds no collect_NNN.pth")
    return sorted(found, key=lambda p: collected_index(p.name) or 0)


def _unchanged(base: Checkpoint, digests: dict[str, str], paths: list[Path]) -> list[str]:
    same = {k for k, v in base.state.items() if isinstance(v, TensorInfo)}
    for path in paths:
        member = open_checkpoint(path)
        held = member.fields.get("frozen_keys") or []
        check_keys(base.state, member.state, held)
        pin = read_pin(member.fields.get(FIELD), member.where)
        check_forms(base.state, member.state, pin.dtype)
        _check_taken_out(held, pin, digests, member.where)
        for key in sorted(same & member.state.keys()):
            if value_digest(member.load([key])[key]) != digests[key]:
                same.discard(key)
    for group in tie_groups(base, base.keys(), ()):
        if not same.issuperset(group):
            same.difference_update(group)
    return [k for k in base.state if k in same]


def _check_taken_out(held: Sequence[str], pin: Pin, digests: Mapping[str, str], where: str) -> None:
    """What was taken out before must be the base's: the pin that is written vouches for it."""
    if held and not pin.frozen:
        raise LayoutError(
            f"{where}: {', '.join(held[:8])} taken out already and no pin says what they were: a"
            " pin written now would vouch for what nothing shows; reduce the full files"
        )
    wrong = [k for k in held if pin.frozen.get(k) != digests[k]]
    if wrong:
        raise IntegrityError(
            f"{where}: the base is not the one it was collected from: {', '.join(wrong[:8])}"
            " differ from its pin; nothing was written"
        )


def _reduced(
    path: Path,
    base: Checkpoint,
    keys: list[str],
    digests: dict[str, str],
    ties: tuple[tuple[str, ...], ...],
) -> tuple[bytes, str]:
    """The reduced file and its state's digest; proven to give the full one back."""
    import torch

    member = open_checkpoint(path)
    state = member.load(member.keys())
    kept = saved_state({k: v for k, v in state.items() if k not in keys})
    if member.metadata is not None:
        kept._metadata = member.metadata  # type: ignore[attr-defined]
    dtype = (member.fields.get(FIELD) or {}).get("dtype")
    pin = Pin(state_digest(digests), {k: digests[k] for k in keys}, dtype, ties)
    document: dict[str, Any] = {
        STATE_KEY: kept,
        **member.fields,
        "frozen_keys": list(keys),
        FIELD: pin.document(),
    }
    document.setdefault("frozen_source", base.where)
    out = io.BytesIO()
    torch.save(document, out)
    written = open_checkpoint(BytesSource(out.getvalue(), f"{path}, reduced"))
    whole = assemble(base, written, require_pin=True)
    if any(value_digest(whole[k]) != value_digest(v) for k, v in state.items()):
        raise IntegrityError(f"{path}: reduced and reassembled it is not the same")
    return out.getvalue(), digest_state(kept)


def _sha256(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def _update_record(
    folder: Path,
    base: Checkpoint,
    keys: list[str],
    ties: tuple[tuple[str, ...], ...],
    digests: dict[str, str],
    logs: dict[str, dict[str, str]],
) -> None:
    """Make the cell's record say what its files are now."""
    parts = split_root(os.path.abspath(folder / "collect_000.pth"))
    cell = cell_of(parts[1]) if parts else None
    if parts is None or cell is None:
        return
    body = read_record(Path(parts[0]), cell)
    if body is None:
        return
    state = base.load(base.keys())
    body |= records.counts(state, keys)
    body["frozen_keys"] = list(keys)
    dtype = (body.get(FIELD) or {}).get("dtype")
    body[FIELD] = Pin(state_digest(digests), {k: digests[k] for k in keys}, dtype, ties).document()
    body["checkpoints"] = list(_with_logs(body.get("checkpoints", []), logs))
    put_record(Path(parts[0]), cell, body)


def _with_logs(checkpoints: Any, logs: dict[str, dict[str, str]]) -> Iterator[dict[str, Any]]:
    for log in checkpoints:
        yield {**log, **logs.get(log.get("file"), {})}
