"""Recompute what the layout promises: names against content, labels against digests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from castore import CastoreError, FormatError, Repository, SnapshotName
from castore_experiments import canonical, layout
from castore_experiments.architecture import Description
from castore_experiments.components import CASTORE_1, scheme
from castore_experiments.documents import ARCHITECTURE, CONFIG, DataDocument, read_architecture_ref
from castore_experiments.samples import DataState
from castore_experiments.states import MISSING, State, same, state_of
from castore_experiments.weights import decode

Defect = tuple[str, str]
"""A path, and what is wrong with it."""


def verify_state(repository: Repository, snapshot: SnapshotName) -> Iterator[Defect]:
    """Every broken promise of a state: its labels, and each of its files."""
    document = repository.snapshot(snapshot)
    try:
        state = state_of(document.facts, str(snapshot))
        labels = layout.split(state.hash)
    except CastoreError as e:
        yield snapshot.path, str(e)
        return
    if snapshot.key != f"{state.hash}.state":
        yield snapshot.path, f"its name says {snapshot.key}, its facts {state.hash}"
    for component, label in labels._asdict().items():
        digest = getattr(state.digests, component)
        if not _stands_for(label, digest):
            yield (
                snapshot.path,
                f"the {component} label {label} is no part of {digest or 'nothing'}",
            )
    files = {p: b"".join(repository.read_file(f)) for p, f in repository.tree(snapshot).files()}
    for path, data in files.items():
        yield from _file(path, data, state, files)


def _stands_for(label: str, digest: str) -> bool:
    if digest == MISSING:
        return label == layout.NO_SEGMENT
    return label in [digest[i : i + 8] for i in range(0, len(digest), 8)]


def _file(path: str, data: bytes, state: State, files: Mapping[str, bytes]) -> Iterator[Defect]:
    """What is wrong with one file of a state."""
    try:
        yield from ((path, text) for text in _wrong(path, data, state, files))
    except CastoreError as e:
        yield path, str(e)


def _wrong(path: str, data: bytes, state: State, files: Mapping[str, bytes]) -> Iterator[str]:
    found = layout.parse(path)
    check = _OWN.get(path) or (_DOCUMENTS.get(found.kind) if found else None)
    if check is None:
        yield "is no document of the layout"
        return
    labels = layout.split(state.hash)
    if found is not None and found.label not in labels:
        yield f"carries {found.label}, which is no segment of {state.hash}"
    yield from check(path, data, state, files)


Check = Callable[[str, bytes, State, Mapping[str, bytes]], Iterator[str]]


def _config(path: str, data: bytes, state: State, files: Mapping[str, bytes]) -> Iterator[str]:
    digest = scheme(state.scheme).hp(canonical.decode(data, path))
    if not same(digest, state.digests.hp):
        yield f"its digest is {digest}, the state says {state.digests.hp}"


def _yaml(path: str, data: bytes, state: State, files: Mapping[str, bytes]) -> Iterator[str]:
    label = layout.split(state.hash).hp
    _, said = canonical.hp_file(data, path)
    if said not in (None, label):
        yield f"says that it is of {said}"
    if CONFIG not in files:
        return
    typed = canonical.decode(files[CONFIG], CONFIG)
    if state.scheme == CASTORE_1 and canonical.to_yaml(typed, label) != data:
        yield f"is not what {CONFIG} says: edited?"


def _architecture(
    path: str, data: bytes, state: State, files: Mapping[str, bytes]
) -> Iterator[str]:
    if state.scheme == CASTORE_1:
        digest = Description.decode(data, path).digest()
        if not same(digest, state.digests.model):
            yield f"its digest is {digest}, the state says {state.digests.model}"


def _rows(path: str, data: bytes, state: State, files: Mapping[str, bytes]) -> Iterator[str]:
    digest = scheme(state.scheme).data(DataState.from_parquet(data, path))
    if not same(digest, state.digests.data):
        yield f"its digest is {digest}, the state says {state.digests.data}"


def _data(path: str, data: bytes, state: State, files: Mapping[str, bytes]) -> Iterator[str]:
    document = DataDocument.decode(data, path)
    rows = files.get(layout.data_parquet_path(layout.split(state.hash).data))
    if rows is not None and document.inline is None:
        count = len(DataState.from_parquet(rows, path))
        if count != document.rows:
            yield f"says {document.rows} rows, the parquet file has {count}"


def _reference(path: str, data: bytes, state: State, files: Mapping[str, bytes]) -> Iterator[str]:
    read_architecture_ref(data, path)
    return iter(())


def _nothing(path: str, data: bytes, state: State, files: Mapping[str, bytes]) -> Iterator[str]:
    return iter(())


_OWN: dict[str, Check] = {CONFIG: _config, ARCHITECTURE: _architecture}
_DOCUMENTS: dict[str, Check] = {
    "config": _yaml,
    "data_json": _data,
    "data_parquet": _rows,
    "architecture_ref": _reference,
    "architecture": _nothing,
    "architecture_text": _nothing,
    "data_rows": _nothing,
}


def verify_weights(repository: Repository, snapshot: SnapshotName) -> Iterator[Defect]:
    """Every broken promise of a weight file: hash and step in its name, facts and content."""
    facts: Mapping[str, Any] = repository.snapshot(snapshot).facts
    hash, _, step = snapshot.key.partition(".step.")
    files = dict(repository.tree(snapshot).files())
    path = layout.weights_path(hash, int(step))
    if list(files) != [path]:
        yield snapshot.path, f"holds {', '.join(files) or 'nothing'}, expected {path}"
        return
    if (facts.get("hash"), facts.get("step")) != (hash, int(step)):
        yield snapshot.path, f"its facts are of {facts.get('hash')} step {facts.get('step')}"
    data = b"".join(repository.read_file(files[path]))
    try:
        file = decode(data, path)
    except CastoreError as e:
        yield path, str(e)
        return
    if file.step != int(step):
        yield path, f"the name says step {step}, the file {file.step}"
    if file.exp_hash != hash:
        yield path, f"the name says {hash}, the file {file.exp_hash}"


def verify_curves(repository: Repository, snapshot: SnapshotName) -> Iterator[Defect]:
    """Every broken promise of a batch of rows: its name, and each Parquet file's rows."""
    from castore_experiments.signals.batch import Facts, parse_key
    from castore_experiments.signals.parquet import decode as read_rows

    name = parse_key(snapshot.key)
    if name is None:
        yield snapshot.path, f"{snapshot.key} is no name of a batch of rows"
        return
    try:
        facts = Facts.from_json(repository.snapshot(snapshot).facts, name, str(snapshot))
    except FormatError as e:
        yield snapshot.path, str(e)
        return
    files = dict(repository.tree(snapshot).files())
    if set(files) != {f.path for f in facts.files}:
        yield snapshot.path, f"holds {', '.join(files)}, its facts name others"
    for file in facts.files:
        if file.path not in files:
            continue
        try:
            data = b"".join(repository.read_file(files[file.path]))
            rows = read_rows(data, file.table, file.path)
        except CastoreError as e:
            yield file.path, str(e)
            continue
        if rows.num_rows != file.rows:
            yield file.path, f"has {rows.num_rows} rows, the facts say {file.rows}"
