"""The documents of a new state: what changed is encoded, what did not is referred to."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from castore import File, InvalidInputError
from castore_experiments import canonical, layout, rng
from castore_experiments.components import Content
from castore_experiments.documents import ARCHITECTURE, CONFIG, DataDocument, architecture_ref
from castore_experiments.options import Options
from castore_experiments.records import Records
from castore_experiments.states import State, same

Documents = dict[str, bytes | File]


@dataclass(frozen=True, slots=True)
class Instant:
    """What holds at the moment of a save, beside weights.

    ``saved`` is local ISO time, ``loaders`` positions by loader, ``architecture`` the encoded
    description of the model of a new state, ``pickled`` the model where that is to be dumped.
    """

    saved: str
    rng_state: Mapping[str, Any]
    loaders: Mapping[str, Mapping[str, Any]]
    architecture: bytes | None = None
    pickled: bytes | None = None


def with_model(now: Instant, content: Content, options: Options) -> Instant:
    """``now`` with what is kept of the model of a new state.

    Raises
    ------
    InvalidInputError
        Its architecture is to be dumped, and it cannot be pickled.
    """
    if content.model is None or content.architecture is None:
        return now
    pickled = _pickle(content.model) if options.dump_model_architecture else None
    return replace(now, architecture=content.architecture.encode(), pickled=pickled)


def state_documents(
    records: Records, state: State, content: Content, options: Options, now: Instant
) -> Documents:
    """The files of a state, relative to ``checkpoints/``.

    A segment that some earlier state of the namespace has is not encoded again: its files stand
    in the new tree as they are. A component that is neither at hand nor known has no files.

    Raises
    ------
    InvalidInputError
        A configuration that has no YAML form, or a model that cannot be pickled though its
        architecture is to be dumped.
    """
    labels = layout.split(state.hash)
    found: Documents = {}
    if options.dump_config_state:
        found.update(_known(records, state, "hp") or _config(content, labels.hp))
    found.update(_model(records, state, options, now))
    if options.dump_data_state:
        found.update(_known(records, state, "data") or _data(state, content, now))
    return found


def _known(records: Records, state: State, component: layout.Component) -> Mapping[str, File]:
    """The files of one segment in an earlier state that has it; empty if none does."""
    label = getattr(layout.split(state.hash), component)
    if label == layout.NO_SEGMENT:
        return {}  # no state has any, and to see that would be to read all of them
    for hash in records.with_label(component, label):
        if same(_digest(records.state(hash), component), _digest(state, component)):
            files = {p: f for p, f in records.state_files(hash).items() if belongs(p, component)}
            if files:
                return files
    return {}


def _digest(state: State, component: layout.Component) -> str:
    return str(getattr(state.digests, component))


def belongs(path: str, component: layout.Component) -> bool:
    """Whether a file of a state's tree is of this component."""
    own = {CONFIG: "hp", ARCHITECTURE: "model"}
    return (own.get(path) or layout.component_of(path)) == component


def _config(content: Content, label: str) -> Documents:
    if content.config is None:
        return {}
    return {
        layout.config_path(label): canonical.to_yaml(content.config, label),
        CONFIG: canonical.encode(content.config),
    }


def _model(records: Records, state: State, options: Options, now: Instant) -> Documents:
    label = layout.split(state.hash).model
    found: Documents = dict(_known(records, state, "model"))
    if now.architecture is not None and ARCHITECTURE not in found:
        found[ARCHITECTURE] = now.architecture
    pickled, reference = layout.architecture_path(label), layout.architecture_ref_path(label)
    if not options.dump_model_architecture:
        if pickled in found and reference not in found:
            found[reference] = architecture_ref(label, label, state.hash)
    elif now.pickled is not None and pickled not in found:
        found[pickled] = now.pickled
    return found


def _pickle(model: Any) -> bytes:
    try:
        return pickle.dumps(model, protocol=4)
    except Exception as e:  # whatever the model's own code raises
        raise InvalidInputError(
            f"dump_model_architecture: {type(model).__name__} cannot be pickled: {e}; leave the"
            " option out, or define its classes in an importable module"
        ) from e


def _data(state: State, content: Content, now: Instant) -> Documents:
    if content.data is None:
        return {}
    label = layout.split(state.hash).data
    document = DataDocument(
        state.hash,
        now.saved,
        len(content.data),
        rng.to_json(now.rng_state),
        now.loaders,
    )
    return {
        layout.data_json_path(label): document.encode(label),
        layout.data_parquet_path(label): content.data.to_parquet(),
    }
