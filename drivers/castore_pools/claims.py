"""What registry and configurations claim about a cell, against the files: numbering and counts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from castore import IntegrityError, LayoutError, NotFoundError
from castore.tensors import TensorInfo
from castore_pools.checkpoint import Checkpoint
from castore_pools.layout import CellFiles
from castore_pools.names import collected_name
from castore_pools.pins import FIELD, frozen_keys_of, read_pin
from castore_pools.places import Place
from castore_pools.records import pool_statistics
from castore_pools.rules import tie_groups

Claim: TypeAlias = tuple[str, str, str, str]
_MAX_CONFIG = 16 << 20


def broken_claims(place: Place, files: CellFiles, base: Checkpoint | None) -> Iterator[Claim]:
    """Path, check, verdict and detail of each claim, kept or not."""
    try:
        collect_config = _config(place, files.cell.collect_config_path)
    except LayoutError as e:
        collect_config = {}
        yield files.cell.collect_config_path, "collect_config", "unreadable", str(e)
    yield _numbering(files, collect_config)
    if base is not None:
        yield training_config(place, files, base)
    if files.record is None:
        yield files.cell.registry_path, "record", "missing", f"no record of {files.cell}"
        return
    if base is not None:
        yield _counts(files, base)
        yield _training_info(files, base)
    yield _statistics(files)
    yield _settings(files, collect_config)
    yield _assemble_check(files, files.record.part("training_info").get("assemble_check"))


def _config(place: Place, path: str) -> dict[str, Any]:
    """A configuration, empty where there is none; `LayoutError` for one that cannot be read."""
    try:
        source = place.source(path)
    except NotFoundError:
        return {}
    if source.size > _MAX_CONFIG:
        raise LayoutError(f"{source.where}: {source.size} bytes, at most {_MAX_CONFIG}")
    try:
        document = json.loads(source.read(0, source.size))
    except (IntegrityError, NotFoundError) as e:
        raise LayoutError(f"{source.where}: lost or damaged: {e}") from e
    except (ValueError, RecursionError) as e:
        raise LayoutError(f"{source.where}: not JSON: {e}") from e
    if not isinstance(document, dict):
        raise LayoutError(f"{source.where}: expected an object")
    return document


def _numbering(files: CellFiles, collect_config: Mapping[str, Any]) -> Claim:
    """Files run from 0 without holes, as many as were to be collected."""
    there, folder = set(files.pool), files.cell.pool_folder
    pool = files.record.part("pool") if files.record is not None else {}
    promised = [pool.get("count")]
    promised += [collect_config.get(n) for n in ("count", "n")]
    logged = len(files.record.checkpoints) if files.record is not None else 0
    counts = [n for n in promised if type(n) is int]
    end = min(max([logged, max(there, default=-1) + 1, *counts]), 1_000_000)
    holes = [i for i in range(end) if i not in there]
    if not holes:
        return folder, "numbering", "ok", ""
    shown = ", ".join(collected_name(i) for i in holes[:10])
    more = f" and {len(holes) - 10} more" if len(holes) > 10 else ""
    return folder, "numbering", "missing", f"{len(holes)} of {end} files: {shown}{more}"


def training_config(place: Place, files: CellFiles, base: Checkpoint) -> Claim:
    path = files.cell.config_path
    try:
        config = _config(place, path)
    except LayoutError as e:
        return path, "config", "unreadable", str(e)
    if not config:
        return path, "config", "not-checked", "there is none"
    held = base.fields.get("config")
    same = held is None or json.loads(json.dumps(held, default=str)) == config
    return path, "config", "ok" if same else "mismatch", "" if same else "the base holds another"


def count_elements_of(base: Checkpoint, keys: Any, ties: Any) -> int:
    """Elements of the tensors under ``keys``; tied ones count once."""
    asked = set(keys)
    wanted = [k for k in base.state if k in asked]
    twins = {k for g in tie_groups(base, wanted, ties) for k in g[1:]}
    infos = (base.state[k] for k in wanted if k not in twins)
    return sum(i.elements for i in infos if isinstance(i, TensorInfo))


def _counts(files: CellFiles, base: Checkpoint) -> Claim:
    """``total_params``, ``frozen_params`` and ``generated_params``, as far as they are recorded."""
    body, path = files.record.body if files.record else {}, files.cell.registry_path
    frozen = frozen_keys_of(body, path) if "frozen_keys" in body else None
    ties = read_pin(body.get(FIELD), path).ties
    total = count_elements_of(base, base.keys(), ties)
    found = {"total_params": total}
    if frozen is not None:
        held = count_elements_of(base, frozen, ties)
        found |= {"frozen_params": held, "generated_params": total - held}
    elif type(body.get("frozen_params")) is int:
        found["generated_params"] = total - body["frozen_params"]
    wrong = [f"{n} {body[n]}, found {v}" for n, v in found.items() if n in body and body[n] != v]
    return path, "counts", "mismatch" if wrong else "ok", "; ".join(wrong)


def _training_info(files: CellFiles, base: Checkpoint) -> Claim:
    """What the record says of the base's training and of paths, against base and layout."""
    record, path = files.record, files.cell.registry_path
    body = record.body if record is not None else {}
    info = record.part("training_info") if record is not None else {}
    names = [n for n in ("val_metric", "val_loss", "config") if n in info and n in base.fields]
    wrong = [
        f"{n} {info[n]!r}, the base has {base.fields[n]!r}" for n in names if _other(info, base, n)
    ]
    folder = files.cell.pool_folder
    if body.get("pool_path", folder) != folder:
        wrong.append(f"pool_path {body['pool_path']!r}, expected {folder!r}")
    return path, "training_info", "mismatch" if wrong else "ok", "; ".join(wrong)


def _other(info: Mapping[str, Any], base: Checkpoint, name: str) -> bool:
    """Whether the record holds another value; both as JSON gives them back."""
    return bool(json.loads(json.dumps(base.fields[name], default=str)) != info[name])


def _statistics(files: CellFiles) -> Claim:
    """The pool's statistics, recomputed from the logs."""
    record, path = files.record, files.cell.registry_path
    claimed = record.body.get("pool") if record is not None else None
    if record is None or not isinstance(claimed, dict) or not record.checkpoints:
        return path, "statistics", "not-checked", "none are recorded"
    found = pool_statistics(record.checkpoints)
    wrong = [f"{n} {claimed[n]}, found {v}" for n, v in found.items() if claimed.get(n, v) != v]
    return path, "statistics", "mismatch" if wrong else "ok", "; ".join(wrong)


def _settings(files: CellFiles, collect_config: Mapping[str, Any]) -> Claim:
    """``collect_config.json`` names ``collect_lr`` and ``save_every``; the record says the same."""
    path = files.cell.collect_config_path
    body = files.record.body if files.record is not None else {}
    recorded = body.get("collect_config")
    lacking = [n for n in ("collect_lr", "save_every") if n not in collect_config]
    if lacking:
        verdict = "mismatch" if collect_config else "missing"
        return path, "collect_config", verdict, f"without {', '.join(lacking)}"
    if isinstance(recorded, dict):
        wrong = [n for n in recorded if collect_config.get(n, recorded[n]) != recorded[n]]
        if wrong:
            return path, "collect_config", "mismatch", f"the record differs in {', '.join(wrong)}"
    return path, "collect_config", "ok", ""


def _assemble_check(files: CellFiles, check: Any) -> Claim:
    path = files.cell.registry_path
    if not isinstance(check, dict):
        return path, "assemble_check", "not-checked", "not recorded: the collection did not end"
    if check.get("ok") is True:
        return path, "assemble_check", "ok", ""
    return path, "assemble_check", "mismatch", f"recorded as failed: {check}"
