"""The objects a manager watches, and what of them counts for the experiment hash."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from castore import InvalidInputError
from castore_experiments import canonical
from castore_experiments.states import Digests, same

if TYPE_CHECKING:
    from castore_experiments.architecture import Description
    from castore_experiments.loaders import LoaderWatch
    from castore_experiments.samples import DataState

CASTORE_1 = "castore-1"
WEIGHTSLAB_2 = "weightslab-2"


@dataclass(slots=True)
class Watched:
    """What `CheckpointManager.watch` was given; None where nothing was."""

    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    hyperparameters: MutableMapping[Any, Any] | None = None
    data: Any = None
    loaders: dict[str, LoaderWatch] = field(default_factory=dict)

    def frame(self) -> Any:
        """The data object as it is now: a callable is asked."""
        return self.data() if callable(self.data) else self.data


@dataclass(frozen=True, slots=True)
class Content:
    """What counts for a hash, as it was at one moment; None where a component is not at hand.

    ``config`` and ``data`` are copies in normal form, ``model`` the object itself, which may change
    later; ``architecture``, which is there once the hash is known, is of that moment.
    """

    config: Mapping[Any, Any] | None = None
    model: Any = None
    data: DataState | None = None
    architecture: Description | None = None


@dataclass(frozen=True, slots=True)
class Scheme:
    """A rule for the full digests of the three components.

    ``config`` gives the normal form of what counts of a configuration: that is hashed and kept.
    """

    name: str
    config: Callable[[object], dict[Any, Any]]
    hp: Callable[[Mapping[Any, Any]], str]
    model: Callable[[Any, int], str]
    data: Callable[[DataState], str]

    def content(self, config: object, model: object, data: object) -> Content:
        """A copy of what counts; None stays None."""
        from castore_experiments.samples import DataState

        return Content(
            None if config is None else self.config(config),
            model,
            None if data is None else DataState.from_any(data),
        )

    def digests(
        self, now: Content, before: Digests, initialised: Mapping[str, int], step: int
    ) -> tuple[Digests, int]:
        """Full digests of ``now``, and the step its model was initialised at.

        A component that is not at hand keeps its digest of ``before``. ``initialised`` has the
        digests of models that are known, with the step each was initialised at: one of these keeps
        it. Any other was initialised at ``step``, the first of all at 0.
        """
        hp = before.hp if now.config is None else self.hp(now.config)
        data = before.data if now.data is None else self.data(now.data)
        if now.model is None:
            return Digests(hp, before.model, data), initialised.get(before.model, 0)
        model, init_step = self._initialised(now.model, initialised, step if before.model else 0)
        return Digests(hp, model, data), init_step

    def _initialised(
        self, model: Any, initialised: Mapping[str, int], step: int
    ) -> tuple[str, int]:
        for known, init_step in initialised.items():
            digest = self.model(model, init_step)
            if same(digest, known):
                return digest, init_step
        return self.model(model, step), step


def scheme(name: str) -> Scheme:
    """The scheme called ``name``; `InvalidInputError` if there is none."""
    if name == CASTORE_1:
        parts = (canonical.hyperparameters, canonical.hp_digest, _model_digest, _data_digest)
        return Scheme(name, *parts)
    if name == WEIGHTSLAB_2:
        from castore_experiments import weightslab

        rules = (weightslab.hp_digest, weightslab.model_digest, _weightslab_data)
        return Scheme(name, canonical.normal, *rules)
    raise InvalidInputError(
        f"hash scheme {name!r}: there are {CASTORE_1} and {WEIGHTSLAB_2}: upgrade castore?"
    )


def describe(model: Any, init_step: int) -> Description:
    """The architecture of ``model``."""
    from castore_experiments import architecture

    return architecture.describe(model, init_step)


def _model_digest(model: Any, init_step: int) -> str:
    return describe(model, init_step).digest()


def _weightslab_data(data: DataState) -> str:
    """The public tool's label, which ignores tags, then our digest, which tells them apart.

    Two states that differ in tags alone then have one label and two digests, and the later one
    gets the next characters.
    """
    from castore_experiments import weightslab

    return weightslab.data_digest(data)[:8] + data.digest()[:56]


def _data_digest(data: DataState) -> str:
    return data.digest()
