"""Two contents with one label: the later one moves to a label of its own, with all that it has.

A label is looked up before it is given, so this happens only where two machines wrote at once. Of
the two snapshots the earlier keeps the label; the other content is committed again under the next
characters of its digest, and what stood under the shared label is forgotten.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace

from castore import File, Options, SnapshotName, SnapshotNotFoundError
from castore_experiments import canonical, layout
from castore_experiments.commits import Save, commit_state, commit_weights
from castore_experiments.documents import CONFIG, OWN_FILES, DataDocument, architecture_ref
from castore_experiments.dump import Documents, belongs
from castore_experiments.exhibit import Exhibit
from castore_experiments.records import Records
from castore_experiments.states import State, Weights
from castore_experiments.versions import hash_of, owner_in


def settle(records: Records, exhibit: Exhibit, mine: State, options: Options) -> State:
    """Give every content its own label, as far as ``records`` tell; ``mine`` under its label.

    Several processes may do it at once: what they write is the same.
    """
    others = [s for s in contested(records) if s.digests != mine.digests]
    return [_settled(records, exhibit, s, options) for s in (*others, mine)][-1]


def contested(records: Records) -> Iterator[State]:
    """States whose hash an earlier one, of other content, has."""
    for hash in records.written_twice():
        claims = records.claims(hash)
        yield from {s.digests: s for s in claims if s.digests != claims[0].digests}.values()


def _settled(records: Records, exhibit: Exhibit, state: State, options: Options) -> State:
    hash = hash_of(state.digests, owner_in(records))
    if hash == state.hash:
        return state
    new = replace(state, hash=hash)
    try:
        with exhibit.following(state.hash, hash):
            _move(records, exhibit, state, new, options)
    except SnapshotNotFoundError:  # forgotten: another process has moved all of it
        records.refresh()
    return new


def _move(records: Records, exhibit: Exhibit, old: State, new: State, options: Options) -> None:
    weights, states = records.weights_of(old), records.states_of(old)
    for one in reversed(weights):
        _commit_again(records, one, new, options)
    if states and new.hash not in records:
        commit_state(records, new, renamed(records, states[0], old, new), options)
    _forget(records, exhibit, old, [*states, *(w.snapshot for w in weights if w.snapshot)])
    if new.hash in records:
        exhibit.show_state(new.hash)
        exhibit.note_state(new, new.experiment_name)
    for one in records.weights(new.hash)[:1]:
        exhibit.show_weights(one)


def _commit_again(records: Records, weights: Weights, new: State, options: Options) -> None:
    """The weight file under the new hash, which stands in it too."""
    import torch

    from castore_experiments.weightfile import load

    assert weights.snapshot is not None
    data = records.repository.read(weights.snapshot, weights.path)
    body = load(data, weights.path)
    out = io.BytesIO()
    torch.save({**body, "exp_hash": new.hash}, out)
    facts = records.facts(weights.snapshot)
    save = Save(weights.step, str(facts["saved"]), facts.get("run"), facts.get("metrics", {}))
    commit_weights(records, new, save, out.getvalue(), options)


def renamed(records: Records, snapshot: SnapshotName, old: State, new: State) -> Documents:
    """The documents of a state under other labels, also where these stand in them."""
    files = records.files(snapshot)
    labels = zip(layout.COMPONENTS, layout.split(old.hash), layout.split(new.hash), strict=True)
    found: Documents = {p: f for p, f in files.items() if p in OWN_FILES}
    for component, before, after in labels:
        for path in (p for p in files if p not in OWN_FILES and belongs(p, component)):
            target = path.replace(before, after)
            found[target] = _relabelled(records, files, path, after, new)
    return found


def _relabelled(
    records: Records, files: dict[str, File], path: str, label: str, new: State
) -> bytes | File:
    def read(name: str) -> bytes:
        return b"".join(records.repository.read_file(files[name]))

    document = layout.parse(path)
    kind = document.kind if document else None
    if kind == "config" and CONFIG in files:
        return canonical.to_yaml(canonical.decode(read(CONFIG), CONFIG), label)
    if kind == "data_json":
        return replace(DataDocument.decode(read(path), path), exp_hash=new.hash).encode(label)
    if kind == "architecture_ref":
        return architecture_ref(label, label, new.hash)
    return files[path]


def _forget(records: Records, exhibit: Exhibit, old: State, gone: list[SnapshotName]) -> None:
    for name in gone:
        for path, file in records.files(name).items():
            if path not in OWN_FILES:
                exhibit.will_go(path, file)
        records.repository.forget(name)
        records.drop(name)
    exhibit.withdraw()
    exhibit.note_withdrawn(old.hash)
