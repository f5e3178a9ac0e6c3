"""Read a saved state, and give its parts to the objects they belong to."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from castore import (
    FormatError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    UntrustedPickleError,
)
from castore_experiments import canonical, layout, rng
from castore_experiments.components import Scheme, Watched
from castore_experiments.documents import CONFIG, DataDocument, read_architecture_ref, read_object
from castore_experiments.states import Archive, State, Weights, pick

if TYPE_CHECKING:
    from castore_experiments.samples import DataState
    from castore_experiments.weights import WeightFile

DAMAGE = (NotFoundError, IntegrityError, FormatError, UntrustedPickleError)
"""What makes a saved file useless, as opposed to a store that cannot be reached."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which components to read, and the step the weights are to be nearest to."""

    model: bool = True
    weights: bool = True
    config: bool = True
    data: bool = True
    target_step: int | None = None


@dataclass(slots=True)
class Loaded:
    """What was read of a hash; None where it has none, or where it was not asked for."""

    state: State
    weights: Weights | None = None
    file: WeightFile | None = None
    config: dict[Any, Any] | None = None
    data: DataState | None = None
    document: DataDocument | None = None
    model: Any = None

    @property
    def step(self) -> int:
        """The training step the state stands at."""
        return self.weights.step if self.weights else self.state.step or 0

    @property
    def rng_state(self) -> Any:
        """The random streams: the weight file's, else the data snapshot's."""
        if self.file is not None and self.file.rng_state is not None:
            return self.file.rng_state
        if self.document is not None and self.document.rng_state is not None:
            return rng.from_json(self.document.rng_state)
        return None

    @property
    def loaders(self) -> dict[str, Any]:
        """Positions by loader: the weight file's, else the data snapshot's."""
        if self.file is not None:
            return dict(self.file.loaders)
        return dict(self.document.loaders) if self.document else {}


def load(
    archive: Archive,
    hash: str,
    wanted: Wanted = Wanted(),
    *,
    allow_pickle: bool = False,
    weights: Weights | None = None,
) -> Loaded:
    """Read the components of a hash; ``weights`` names the file, else ``wanted.target_step``.

    Raises
    ------
    SnapshotNotFoundError
        No such hash.
    CorruptObjectError, ObjectNotFoundError, FormatError
        Something of it is damaged; the message names it.
    UntrustedPickleError
        A pickle would have to be run, and ``allow_pickle`` is not given.
    """
    found = Loaded(archive.state(hash))
    if wanted.weights:
        found.weights = weights or pick(archive.weights(hash), wanted.target_step)
        if found.weights is not None:
            found.file = _decode(archive, found.weights)
    if wanted.config:
        found.config = read_config(archive, hash)
    if wanted.data:
        found.data, found.document = read_data(archive, hash)
    if wanted.model:
        found.model = read_model(archive, hash, allow_pickle)
    return found


def _decode(archive: Archive, weights: Weights) -> WeightFile:
    from castore_experiments.weights import decode

    file = decode(archive.weight_file(weights), f"{weights.path} of {weights.hash}")
    if file.step != weights.step:
        raise FormatError(
            f"{weights.path}: the name says step {weights.step}, the file {file.step}: saved under"
            " a wrong name, or renamed"
        )
    return file


def read_config(archive: Archive, hash: str) -> dict[Any, Any] | None:
    """The configuration of a hash with its types; None if it has none."""
    typed = archive.document(hash, CONFIG)
    if typed is not None:
        return canonical.decode(typed, f"{CONFIG} of {hash}")
    path = layout.config_path(layout.split(hash).hp)
    data = archive.document(hash, path)
    return None if data is None else canonical.hp_file(data, path)[0]


def read_data(archive: Archive, hash: str) -> tuple[DataState | None, DataDocument | None]:
    """The data state of a hash, and the document beside it."""
    from castore_experiments.samples import DataState

    label = layout.split(hash).data
    path = layout.data_json_path(label)
    text = archive.document(hash, path)
    document = None if text is None else DataDocument.decode(text, path)
    rows = archive.document(hash, layout.data_parquet_path(label))
    if rows is not None:
        return DataState.from_parquet(rows, layout.data_parquet_path(label)), document
    path = layout.data_rows_path(label)
    rows = archive.document(hash, path)
    if rows is not None:
        return read_rows(rows, path), document
    if document is not None and document.inline is not None:
        import pandas as pd

        return DataState.from_any(pd.DataFrame(document.inline)), document
    return None, document


def read_rows(data: bytes, where: str) -> DataState:
    """The samples in the JSON that stands in for a parquet file: columns of values by row."""
    import pandas as pd

    from castore_experiments.samples import DataState

    columns = read_object(data, where)
    try:
        table = pd.DataFrame({c: pd.Series(rows) for c, rows in columns.items()})
    except (TypeError, ValueError) as e:
        raise FormatError(f"{where}: not a table of columns: {e}") from e
    return DataState.from_any(table)


def read_model(archive: Archive, hash: str, allow_pickle: bool) -> Any:
    """The pickled model of a hash, its reference followed; None if there is none. Runs its code!"""
    label = layout.split(hash).model
    data = _pickled(archive, hash, label)
    if data is None:
        reference = archive.document(hash, layout.architecture_ref_path(label))
        if reference is None:
            return None
        holder = read_architecture_ref(reference, layout.architecture_ref_path(label))
        data = _of_holder(archive, holder)
        if data is None:
            raise NotFoundError(
                f"the architecture of {hash} is referred to {holder}, which no experiment here has"
            )
    if not allow_pickle:
        raise UntrustedPickleError(
            f"the architecture of {hash} is a pickle, which runs whatever code it holds when it is"
            " read: if you trust who wrote it, give allow_pickle=True, or dump_model_architecture:"
            " true in your own configuration"
        )
    return pickle.loads(data)  # noqa: S301  # only where the caller allowed it


def _pickled(archive: Archive, hash: str, label: str) -> bytes | None:
    return archive.document(hash, layout.architecture_path(label))


def _of_holder(archive: Archive, label: str) -> bytes | None:
    holders = (h for h in archive.hashes() if layout.split(h).model == label)
    found = (_pickled(archive, h, label) for h in holders)
    return next((data for data in found if data is not None), None)


def newest_readable(
    archive: Archive, latest: str, wanted: Wanted, report: Callable[[str], None]
) -> tuple[Loaded, bool]:
    """The latest hash that can be read, and whether one had to be skipped for that.

    Raises
    ------
    NotFoundError, IntegrityError, FormatError, UntrustedPickleError
        None can be read; what is wrong with the latest.
    """
    first: Exception | None = None
    for hash in [latest, *(h for h in archive.hashes() if h != latest)]:
        try:
            return _newest_whole(archive, hash, wanted, report), first is not None
        except DAMAGE as e:
            first = first or e
            report(f"experiment {hash} is skipped: {e}")
    assert first is not None
    raise first


def _newest_whole(
    archive: Archive, hash: str, wanted: Wanted, report: Callable[[str], None]
) -> Loaded:
    """The newest weights of ``hash`` that can be read; what is skipped is reported, never deleted.

    Raises
    ------
    NotFoundError, IntegrityError, FormatError, UntrustedPickleError
        There are weights and none of them can be read, or another component cannot.
    """
    first: Exception | None = None
    for weights in archive.weights(hash) if wanted.weights else ():
        try:
            return load(archive, hash, wanted, weights=weights)
        except DAMAGE as e:
            first = first or e
            report(f"step {weights.step} of {hash} is skipped: {e}")
    if first is not None:
        raise first
    return load(archive, hash, wanted)


# -- applying


@dataclass(slots=True)
class Resume:
    """A loaded state and which of its parts were given away already.

    ``strict`` makes what cannot be restored exactly an error; else it is reported. ``asked`` tells
    a state that the caller named from one that opening resumed.
    """

    loaded: Loaded
    rule: Scheme
    strict: bool
    report: Callable[[str], None]
    asked: bool = False
    given: set[str] = field(default_factory=set)
    begun: bool = False

    def apply(self, watched: Watched) -> set[str]:
        """Give every part whose object is watched now; gives the names of what was given.

        The random streams are restored each time, and once more when the first data loader is
        iterated, until training has ``begun``.
        """
        now = set(self._apply_all(watched)) - self.given
        self.given |= now
        if now and not self.begun:
            self._restore_rng()
            for loader in watched.loaders.values():
                loader.on_next_iter(self._begin)
        return now

    def _begin(self) -> None:
        """Training goes on: whatever the program drew meanwhile does not count."""
        if not self.begun:
            self.begun = True
            self._restore_rng()

    def _apply_all(self, watched: Watched) -> Iterator[str]:
        yield from self._apply_weights(watched)
        if watched.data is not None and self.loaded.data is not None and "data" not in self.given:
            self._apply_data(watched, self.loaded.data)
            yield "data"
        for name, loader in watched.loaders.items():
            part = f"loader {name}"
            if part in self.given or name not in self.loaded.loaders:
                continue
            position = self.loaded.loaders[name]
            # The public tool's positions are never exact; it does not restore them either.
            done = loader.restore(position, strict=self.strict and "castore" in position)
            if done.why:
                how = "" if done.exact else "does not go on exactly: "
                self.report(f"data loader {name!r}: {how}{done.why}")
            yield part

    def _apply_data(self, watched: Watched, data: DataState) -> None:
        from castore_experiments.samples import DataState

        frame = watched.frame()
        data.apply_to(frame)
        if not callable(watched.data):
            return
        now = watched.frame()
        if now is not frame and DataState.from_any(now) != DataState.from_any(frame):
            raise InvalidInputError(
                "data: the watched callable gives another object at each call, so that tags and"
                " discards cannot be restored in it: let it give the live one"
            )

    def _apply_weights(self, watched: Watched) -> Iterator[str]:
        from castore_experiments.schedulers import other_scheduler
        from castore_experiments.weights import apply, other_kind

        file = self.loaded.file
        if file is None:
            return
        parts = {
            name: getattr(watched, name)
            for name in ("model", "optimizer", "scheduler")
            if getattr(watched, name) is not None and name not in self.given
        }
        if "model" in parts and not self.fits(watched.model):
            self.given |= {"model", "optimizer", "scheduler"}
            self.report(
                f"the watched model is not the one of {self.loaded.state.hash}: its weights were"
                " not loaded; this counts as an edit of the model"
            )
            return
        for name in [n for n in parts if getattr(file, f"{n}_state") is None]:
            del parts[name]
            self.report(f"step {file.step} of {file.exp_hash} holds no {name} state: it is as new")
            yield name
        others = {
            "optimizer": other_kind(parts.get("optimizer"), file.optimizer_state),
            "scheduler": other_scheduler(parts.get("scheduler"), file.scheduler_state),
        }
        for name in [n for n, unlike in others.items() if unlike and not self.strict]:
            del parts[name]
            self.report(f"the saved {name} is of another kind ({others[name]}): it is as new")
            yield name
        if parts:
            apply(file, parts.get("model"), parts.get("optimizer"), parts.get("scheduler"))
            yield from parts

    def fits(self, model: Any) -> bool:
        """Whether ``model`` is the architecture that was saved, by the root's own rule."""
        from castore_experiments.states import same

        state = self.loaded.state
        return not state.digests.model or same(
            self.rule.model(model, state.init_step), state.digests.model
        )

    def _restore_rng(self) -> None:
        report = rng.restore(self.loaded.rng_state, strict=self.strict)
        if not report.exact:
            for line in report.lines():
                self.report(line)


def write_config(watched: Watched, config: dict[Any, Any], kept_out: tuple[str, ...]) -> None:
    """Make the watched mapping hold ``config``, in place; keys that do not count stay."""
    mapping = watched.hyperparameters
    if mapping is None:
        return
    try:
        for key in [k for k in mapping if k not in config and k not in kept_out]:
            del mapping[key]
        mapping.update(config)
    except (TypeError, AttributeError) as e:
        raise InvalidInputError(
            f"the watched hyperparameters ({type(mapping).__name__}) cannot be changed: {e}; watch"
            " a mutable mapping"
        ) from e


def log_report(text: str) -> None:
    """The default for words to people: the logger ``castore``, as a warning."""
    logging.getLogger("castore").warning("%s", text)
