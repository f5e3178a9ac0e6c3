"""What a pools layout promises, recomputed from its bytes; one model in memory at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeAlias

from castore import (
    BackendError,
    CastoreError,
    FormatError,
    IntegrityError,
    LayoutError,
    NotFoundError,
)
from castore.workers import ELSEWHERE, results
from castore_pools import rules
from castore_pools.assembly import assemble
from castore_pools.checkpoint import Checkpoint, open_checkpoint
from castore_pools.claims import broken_claims, training_config
from castore_pools.freeze import not_finite
from castore_pools.layout import CellFiles, Survey, survey
from castore_pools.pins import FIELD, Pin, frozen_keys_of, read_pin
from castore_pools.places import Place, open_place
from castore_pools.sources import Source
from castore_pools.values import state_digest

Metric: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Any]], float]

_STEP = 8 << 20
_FILES = 8  # pool files a job: each job reads the base once more
_SOUND = ("ok", "not-checked")
_DAMAGE = (FormatError, IntegrityError, NotFoundError)
"""What a read may raise where bytes are lost or damaged: also late, tensor by tensor."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One promise: ``verdict`` is ok, not-checked, missing, unreadable or mismatch."""

    path: str
    check: str
    verdict: str
    detail: str = ""

    @property
    def broken(self) -> bool:
        return self.verdict not in _SOUND


def verify_zoo(
    root: str | os.PathLike[str],
    *,
    metric: Metric | None = None,
    sample: int = 3,
    require_pin: bool = False,
    storage_options: dict[str, Any] | None = None,
    executor: Executor | None = None,
) -> Iterator[Finding]:
    """Verify every cell of the layout at ``root`` (folder, URL or ``castore://``); see below."""
    place = open_place(root, storage_options)
    return verify_place(
        place, metric=metric, sample=sample, require_pin=require_pin, executor=executor
    )


def verify_place(
    place: Place,
    *,
    metric: Metric | None = None,
    sample: int = 3,
    require_pin: bool = False,
    executor: Executor | None = None,
) -> Iterator[Finding]:
    """Every promise of every cell, kept or not.

    Parameters
    ----------
    place : Place
    metric : callable, optional
        Given a whole state dict and the base's fields, gives the validation metric.
    sample : int
        Pool files a cell whose metric is recomputed: first, last and those evenly between.
    require_pin : bool
        An unpinned file is a mismatch, not just unchecked.
    executor : concurrent.futures.Executor, optional
        Who does the work, some pool files a job; ``metric`` must pickle then. Secrets in storage
        options do not travel to other processes: see `castore.workers`.

    Raises
    ------
    BackendError
        The files, or a worker, cannot be reached.
    """
    found = survey(place)
    if executor is not None:
        yield from _spread(place, found, metric, sample, require_pin, executor)
        return
    for files in found.cells:
        yield from verify_cell(place, files, metric=metric, sample=sample, require_pin=require_pin)
    for path in found.bases:
        yield from verify_base(place, path)


def _spread(
    place: Place,
    found: Survey,
    metric: Metric | None,
    sample: int,
    require_pin: bool,
    executor: Executor,
) -> Iterator[Finding]:
    """The same findings in the same order; each job reads its cell's base, and `_FILES` files."""

    def jobs() -> Iterator[tuple[Any, ...]]:
        for files in found.cells:
            for start in range(0, max(1, len(files.pool)), _FILES):
                yield place, files, metric, sample, require_pin, range(start, start + _FILES)
        for path in found.bases:
            yield place, path

    for some in results(executor, _job, jobs()):
        yield from some


def _job(place: Place, what: CellFiles | str, *how: Any) -> list[Finding]:
    """A part of a cell, or a base without one. A worker must see what the caller saw."""
    path = what if isinstance(what, str) else what.base
    try:
        if path is not None:
            place.source(path)
    except NotFoundError as e:
        raise BackendError(
            f"a worker does not find {path} of {place.where}, which was there a moment ago ({e}):"
            f" {ELSEWHERE}"
        ) from e
    if isinstance(what, str):
        return list(verify_base(place, what))
    return list(_verify_part(place, what, *how))


def verify_cell(
    place: Place,
    files: CellFiles,
    *,
    metric: Metric | None = None,
    sample: int = 3,
    require_pin: bool = False,
) -> Iterator[Finding]:
    """The promises of one cell."""
    yield from _verify_part(place, files, metric, sample, require_pin, range(len(files.pool) + 1))


def _verify_part(
    place: Place,
    files: CellFiles,
    metric: Metric | None,
    sample: int,
    require_pin: bool,
    part: range,
) -> Iterator[Finding]:
    """The promises of some of a cell's pool files; with the first, those of the cell itself."""
    folder, first = files.cell.pool_folder, part.start == 0
    if not files.pool and files.record is None:  # a base's own snapshot
        if files.base:
            yield from verify_base(place, files.base, files)
        return
    path = files.base or files.cell.base_path
    base, problem = _open(place, path, "base")
    if first:
        yield problem
    elif base is None:
        return
    try:
        if first:
            yield from (Finding(*claim) for claim in broken_claims(place, files, base))
        member = _Member(place, files, base, require_pin) if base is not None else None
    except _DAMAGE as e:
        if first:
            yield _told(path, "base", e)
        return
    except LayoutError as e:
        if first:
            yield Finding(files.cell.registry_path, "record", "unreadable", str(e))
        return
    if member is None:
        yield Finding(folder, "pool", "not-checked", "without its base")
        return
    chosen = _chosen(list(files.pool), sample) if metric else []
    for index, path in list(files.pool.items())[part.start : part.stop]:
        yield from member.verify(index, path, metric if index in chosen else None)


def verify_base(place: Place, path: str, files: CellFiles | None = None) -> Iterator[Finding]:
    """The promises of a base that no pool was collected from."""
    base, problem = _open(place, path, "base")
    if base is None:
        yield problem
        return
    if files is not None:
        yield Finding(*training_config(place, files, base))
    try:
        yield problem
        yield _finite(path, base.load(base.keys()))
    except _DAMAGE as e:
        yield _told(path, "base", e)


def _told(path: str, check: str, error: Exception) -> Finding:
    verdict = "missing" if isinstance(error, NotFoundError) else "unreadable"
    return Finding(path, check, verdict, str(error))


def _open(place: Place, path: str, check: str) -> tuple[Checkpoint | None, Finding]:
    try:
        return open_checkpoint(place.source(path)), Finding(path, check, "ok")
    except BackendError:
        raise
    except CastoreError as e:
        return None, _told(path, check, e)


def _finite(path: str, state: Mapping[str, Any]) -> Finding:
    bad = not_finite(state)
    verdict = "mismatch" if bad else "ok"
    return Finding(path, "finite", verdict, f"not finite: {', '.join(bad[:8])}" if bad else "")


def _chosen(indices: list[int], sample: int) -> set[int]:
    """``sample`` of the indices: the first, the last, and evenly between."""
    if sample >= len(indices) or sample < 2:
        return set(indices[:sample])
    last = len(indices) - 1
    return {indices[round(i * last / (sample - 1))] for i in range(sample)}


class _Member:
    """Verifies the pool files of one cell against its base, which is read once."""

    def __init__(self, place: Place, files: CellFiles, base: Checkpoint, require_pin: bool):
        self._place, self._base, self._require_pin = place, base, require_pin
        body = files.record.body if files.record is not None else {}
        self._recorded = body.get(FIELD)
        recorded = {"frozen_keys": body["frozen_keys"]} if "frozen_keys" in body else None
        self._frozen_keys = frozen_keys_of(recorded, "the record") if recorded else None
        logs = files.record.checkpoints if files.record is not None else []
        self._logs = {log.get("file"): log for log in logs}
        self._digests = base.digests()

    def verify(self, index: int, path: str, metric: Metric | None) -> Iterator[Finding]:
        member, problem = _open(self._place, path, "readable")
        yield problem
        if member is None:
            return
        try:
            yield from self._promises(index, path, member)
            if metric is not None:
                yield self._metric(path, member, metric)
        except BackendError:
            raise
        except _DAMAGE as e:
            yield _told(path, "readable", e)
        except CastoreError as e:
            yield Finding(path, "keys", "mismatch", str(e))

    def _promises(self, index: int, path: str, member: Checkpoint) -> Iterator[Finding]:
        """All but the metric; raises what `rules` and reading raise."""
        log = self._logs.get(path.rpartition("/")[2], {})
        yield from self._fields(index, path, member, log)
        yield from self._joined(path, member)
        state = member.load(member.keys())
        yield _finite(path, state)
        yield from self._digest(path, member, state, log)

    def _fields(
        self, index: int, path: str, member: Checkpoint, log: Mapping[str, Any]
    ) -> Iterator[Finding]:
        """What the file says beside its tensors, against its number and its log."""
        wrong = []
        if member.fields.get("collect_step") != index:
            wrong.append(f"collect_step {member.fields.get('collect_step')!r}, expected {index}")
        wrong += [
            f"{name} {member.fields.get(name)!r}, logged {log[name]!r}"
            for name in ("train_step", "val_metric", "val_loss")
            if name in log and log[name] != member.fields.get(name)
        ]
        yield Finding(path, "fields", "mismatch" if wrong else "ok", "; ".join(wrong))

    def _joined(self, path: str, member: Checkpoint) -> Iterator[Finding]:
        """Keys, shapes, dtypes and pin against the base; raises what `rules` raises."""
        frozen = frozen_keys_of(member.fields, path)
        if self._frozen_keys is not None and set(self._frozen_keys) != set(frozen):
            yield Finding(
                path, "keys", "mismatch", f"frozen {frozen}, recorded {self._frozen_keys}"
            )
        pin = read_pin(member.fields.get(FIELD, self._recorded), path)
        rules.check_keys(self._base.state, member.state, frozen)
        rules.check_forms(self._base.state, member.state, pin.dtype)
        yield Finding(path, "keys", "ok")
        yield self._pinned(path, frozen, pin)

    def _pinned(self, path: str, frozen: list[str], pin: Pin) -> Finding:
        if not pin.frozen and frozen:
            verdict = "mismatch" if self._require_pin else "not-checked"
            return Finding(path, "pin", verdict, f"unpinned: {', '.join(frozen)}")
        wrong = [
            f"{k}: collected from {pin.frozen.get(k)}, the base has {self._digests[k]}"
            for k in frozen
            if self._digests[k] != pin.frozen.get(k)
        ]
        if pin.base and pin.base != state_digest(self._digests):
            wrong.append(f"base: {pin.base}, found {state_digest(self._digests)}")
        groups = rules.tie_groups(self._base, frozen, pin.ties)
        wrong += [
            f"tied and different in the base: {', '.join(g)}"
            for g in groups
            if len({self._digests[k] for k in g}) > 1
        ]
        return Finding(path, "pin", "mismatch" if wrong else "ok", "; ".join(wrong))

    def _digest(
        self, path: str, member: Checkpoint, state: Mapping[str, Any], log: Mapping[str, Any]
    ) -> Iterator[Finding]:
        """Digest of the state and SHA-256 of the file, where they are logged."""
        if not {"digest", "sha256"} & log.keys():
            yield Finding(path, "digest", "not-checked", "no digest is logged")
            return
        digests = {k: member.digest(k, v) for k, v in state.items()}
        found = {"digest": state_digest(digests), "sha256": _sha256(member.source)}
        wrong = [f"{n}: logged {log[n]}, found {v}" for n, v in found.items() if log.get(n, v) != v]
        yield Finding(path, "digest", "mismatch" if wrong else "ok", "; ".join(wrong))

    def _metric(self, path: str, member: Checkpoint, metric: Metric) -> Finding:
        logged = member.fields.get("val_metric")
        try:
            state = assemble(self._base, member, record={FIELD: self._recorded})
        except BackendError:
            raise
        except CastoreError as e:
            return Finding(path, "metric", "mismatch", str(e))
        value = float(metric(state, self._base.fields))
        if value == logged:
            return Finding(path, "metric", "ok")
        return Finding(path, "metric", "mismatch", f"recomputed {value!r}, logged {logged!r}")


def _sha256(source: Source) -> str:
    sha = hashlib.sha256()
    for start in range(0, source.size, _STEP):
        sha.update(source.read(start, min(source.size, start + _STEP)))
    return sha.hexdigest()
