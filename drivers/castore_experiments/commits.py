"""The two commits an experiment is made of: weights, and the state they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any, SupportsIndex

from castore import (
    BaseFile,
    Draft,
    File,
    FormatError,
    IntegrityError,
    MemoryFile,
    NotFoundError,
    Options,
)
from castore.source import Source
from castore_experiments.layout import NO_SEGMENT, weights_path
from castore_experiments.records import Records, state_key, weights_key
from castore_experiments.states import State, Weights, weights_facts

DRIVER = "experiments"


@dataclass(frozen=True, slots=True)
class Save:
    """What is said of weights beside their bytes.

    ``saved`` is local ISO time, ``metrics`` what the caller measured, ``run`` the run that made
    them, ``metadata`` goes into the file, ``imported`` says that another program wrote the file.
    """

    step: int
    saved: str
    run: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] | None = None
    imported: bool = False


def checked_step(step: SupportsIndex) -> int:
    """A training step as an int, numpy's too; `InvalidInputError` for what is none."""
    found = step if isinstance(step, bool) or not hasattr(step, "__index__") else index(step)
    weights_path(NO_SEGMENT * 3, found)  # type: ignore[arg-type]
    return int(found)


def commit_weights(
    records: Records,
    state: State,
    save: Save,
    data: bytes | memoryview,
    options: Options = Options(),
    at_hand: Callable[[Weights], Source | None] = lambda _: None,
) -> Weights:
    """Commit one weight file; durable on return.

    It is delta-coded against the last weights of its hash, or of the hash that one descends from;
    ``at_hand`` may give a source of those, which is quicker to read than the repository.
    """
    draft = weights_draft(state, save, data, _base(records, state, at_hand))
    path = weights_path(state.hash, save.step)
    done = records.repository.commit(draft, namespace=records.namespace, options=options)
    records.add(done.name, done.tree)
    return Weights(state.hash, save.step, path, done.name.time, done.name)


def weights_draft(
    state: State, save: Save, data: bytes | memoryview, base: File | BaseFile | None = None
) -> Draft:
    """A weight file as a snapshot to be."""
    path = weights_path(state.hash, save.step)
    return Draft(
        {path: MemoryFile(data)},
        driver=DRIVER,
        key=weights_key(state.hash, save.step),
        facts=weights_facts(state, save.step, save.saved, save.metrics, save.run, save.imported),
        base={path: base} if base else None,
    )


def state_draft(state: State, documents: Mapping[str, bytes | File]) -> Draft:
    """The documents of a hash as a snapshot to be."""
    entries = {p: d if isinstance(d, File) else MemoryFile(d) for p, d in documents.items()}
    return Draft(entries, driver=DRIVER, key=state_key(state.hash), facts=state.facts())


def _base(
    records: Records, state: State, at_hand: Callable[[Weights], Source | None]
) -> File | BaseFile | None:
    for hash in (state.hash, state.parent):
        last = next(iter(records.all_weights(hash)), None) if hash else None
        if last is None:
            continue
        try:
            file, source = records.file_of(last), at_hand(last)
        except (NotFoundError, IntegrityError, FormatError):
            continue  # a base is a hint: what cannot be read is none
        return file if source is None else BaseFile(file, source)
    return None


def commit_state(
    records: Records, state: State, documents: Mapping[str, bytes | File], options: Options
) -> None:
    """Commit the documents of a hash: from now on the hash exists. Durable on return."""
    draft = state_draft(state, documents)
    done = records.repository.commit(draft, namespace=records.namespace, options=options)
    records.add(done.name, done.tree)
