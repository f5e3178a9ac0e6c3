"""Take in a root that another program wrote, or whose repository is gone: files to snapshots.

Incremental: what the namespace has already is not committed again, so it may be run beside the
program that writes the root. A file that is not whole yet is left out, reported, and taken by the
next run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from castore import CastoreError, Draft, FormatError, IntegrityError, InvalidInputError, Options
from castore_experiments import canonical
from castore_experiments.commits import (
    Save,
    commit_state,
    commit_weights,
    state_draft,
    weights_draft,
)
from castore_experiments.components import scheme
from castore_experiments.documents import CONFIG
from castore_experiments.folder import FolderRecords
from castore_experiments.layout import config_path, split
from castore_experiments.records import Records
from castore_experiments.resume import DAMAGE
from castore_experiments.runs import RunWords, set_words, words_of
from castore_experiments.states import State, Weights, same
from castore_experiments.torn import check_whole


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
    new = done.states or done.weights
    if new and latest is not None and latest in records and records.latest() != latest:
        records.touch(latest)
    _import_words(folder, records)
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
            except DAMAGE as e:
                report(f"{weights.path}: left out: {e}")
                continue
            yield weights_draft(state, Save(weights.step, saved, imported=True), data)
        yield state_draft(state, whole_documents(state, folder.documents(hash), report)[0])


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
        except DAMAGE as e:
            done.left += 1
            report(f"{weights.path}: left out: {e}")
    whole, left = whole_documents(state, folder.documents(hash), report)
    done.left += left
    there = records.state_files(hash) if hash in records else {}
    if hash not in records or whole.keys() - there.keys():
        state = records.state(hash) if hash in records else state
        commit_state(records, state, {**whole, **there}, Options())
        done.states += 1


def _import_words(folder: FolderRecords, records: Records) -> None:
    """Names and notes, where nobody said others here."""
    known = words_of(records.repository, records.namespace)
    for hash in folder.in_order():
        name, notes = folder.words(hash)
        said = notes or name != records.state(hash).experiment_name
        if said and hash not in known:
            set_words(records.repository, records.namespace, hash, RunWords(name, notes))


def _import_weights(folder: FolderRecords, records: Records, state: State, weights: Weights) -> int:
    """1 if it was committed, 0 if it was there."""
    from castore_experiments.weights import decode

    data = folder.weight_file(weights)
    sha256 = hashlib.sha256(data).hexdigest()
    known = [w for w in records.all_weights(weights.hash) if w.step == weights.step]
    if any(records.weight_sha256(w) == sha256 for w in known):
        return 0
    save = Save(weights.step, decode(data, weights.path).timestamp, imported=True)
    commit_weights(records, state, save, data)
    return 1


def whole_documents(
    state: State, documents: Mapping[str, bytes], report: Callable[[str], None]
) -> tuple[dict[str, bytes], int]:
    """Those of ``documents`` that can be read, and how many were left out and reported.

    The configuration comes in its typed form, too, where YAML lost no type: a tuple is text or a
    list there, and has another digest than the hash says.
    """
    whole = {}
    for path, data in documents.items():
        try:
            check_whole(path, data)
            whole[path] = data
        except CastoreError as e:
            report(f"{path}: left out: {e}")
    left = len(documents) - len(whole)
    label = split(state.hash).hp
    path = config_path(label)
    if path in whole and CONFIG not in whole:
        try:
            config = canonical.hp_file(whole[path], path)[0]
            if same(scheme(state.scheme).hp(config), label):
                whole[CONFIG] = canonical.encode(config)
        except InvalidInputError as e:
            report(f"{path}: kept as it is, its values have no typed form: {e}")
    return whole, left


def _import_curves(
    folder: FolderRecords, records: Records, done: Imported, report: Callable[[str], None]
) -> int:
    """Rows of the root's curve files that the namespace lacks."""
    from castore_experiments.curves import import_curves

    try:
        return import_curves(folder.files, records.repository, records.namespace, report)
    except (FormatError, IntegrityError) as e:
        done.left += 1
        report(f"curves left out: {e}")
        return 0
