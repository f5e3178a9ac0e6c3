"""Take in a root that another program wrote, or whose repository is gone: files to snapshots.

Incremental: what the namespace has already is not committed again, so it may be run beside the
program that writes the root. A file that is not whole yet is left out, reported, and taken by the
next run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from castore import CastoreError, Draft, FormatError, Options, UntrustedPickleError
from castore_experiments import canonical
from castore_experiments.commits import (
    Save,
    commit_state,
    commit_weights,
    state_draft,
    weights_draft,
)
from castore_experiments.documents import CONFIG
from castore_experiments.folder import FolderRecords
from castore_experiments.layout import config_path, split
from castore_experiments.records import Records, State, Weights


@dataclass(slots=True)
class Imported:
    """What was taken in; ``left`` counts files that were left out and reported."""

    states: int = 0
    weights: int = 0
    rows: int = 0
    left: int = 0

    def __str__(self) -> str:
        text = f"{self.states} hashes, {self.weights} weight files, {self.rows} rows of curves"
        return f"{text} ({self.left} left out)" if self.left else text


def import_root(folder: FolderRecords, records: Records, report: Callable[[str], None]) -> Imported:
    """Commit what ``folder`` has and ``records`` lack, the oldest first, the latest hash last.

    Raises
    ------
    BackendError
        One of the two cannot be read or written; what was committed stays.
    """
    done = Imported()
    latest = folder.latest()
    for hash in sorted(folder.in_order(), key=lambda h: h == latest):
        _import_hash(folder, records, hash, done, report)
    if latest is not None and latest in records and records.latest() != latest:
        records.touch(latest)
    done.rows = _import_curves(folder, records, done, report)
    return done


def drafts(folder: FolderRecords, report: Callable[[str], None]) -> Iterator[Draft]:
    """Every state and weight file of ``folder`` as a snapshot to be, in the order of import."""
    from castore_experiments.weights import decode

    latest = folder.latest()
    for hash in sorted(folder.in_order(), key=lambda h: h == latest):
        state = folder.state(hash)
        for weights in reversed(folder.weights(hash)):
            data = folder.weight_file(weights)
            try:
                saved = decode(data, weights.path).timestamp
            except (FormatError, UntrustedPickleError) as e:
                report(f"{weights.path}: left out: {e}")
                continue
            yield weights_draft(state, Save(weights.step, saved), data)
        yield state_draft(state, with_typed_config(hash, folder.documents(hash), report))


def _import_hash(
    folder: FolderRecords,
    records: Records,
    hash: str,
    done: Imported,
    report: Callable[[str], None],
) -> None:
    state = folder.state(hash)
    for weights in reversed(folder.weights(hash)):
        try:
            done.weights += _import_weights(folder, records, state, weights)
        except (FormatError, UntrustedPickleError) as e:
            done.left += 1
            report(f"{weights.path}: left out: {e}")
    if hash not in records:
        documents = with_typed_config(hash, folder.documents(hash), report)
        commit_state(records, state, documents, Options())
        done.states += 1


def _import_weights(folder: FolderRecords, records: Records, state: State, weights: Weights) -> int:
    """1 if it was committed, 0 if it was there."""
    from castore_experiments.weights import decode

    data = folder.weight_file(weights)
    sha256 = hashlib.sha256(data).hexdigest()
    known = [w for w in records.all_weights(weights.hash) if w.step == weights.step]
    if any(records.weight_sha256(w) == sha256 for w in known):
        return 0
    save = Save(weights.step, decode(data, weights.path).timestamp)
    commit_weights(records, state, save, data)
    return 1


def with_typed_config(
    hash: str, documents: Mapping[str, bytes], report: Callable[[str], None]
) -> dict[str, bytes]:
    """``documents`` with the configuration in its typed form beside the YAML one."""
    found = dict(documents)
    path = config_path(split(hash).hp)
    if path in found and CONFIG not in found:
        try:
            found[CONFIG] = canonical.encode(canonical.hp_file(found[path], path)[0])
        except CastoreError as e:
            report(f"{path}: kept as it is, but not read: {e}")
    return found


def _import_curves(
    folder: FolderRecords, records: Records, done: Imported, report: Callable[[str], None]
) -> int:
    """Rows of the root's curve files that the namespace lacks."""
    from castore_experiments.curves import import_curves

    try:
        return import_curves(folder.files, records.repository, records.namespace, report)
    except FormatError as e:
        done.left += 1
        report(f"curves left out: {e}")
        return 0
