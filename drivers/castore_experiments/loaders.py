"""Where a data loader stands, and how to bring one there again.

The caller's own loader object stays in use. What is kept is the position of the batches that were
*handed to the training loop*: those that workers fetched ahead are fetched again.

What is exact, and what is not:

- Map-style data with any sampler whose order depends on what `castore_experiments.samplers`
  lists: order and position, in the middle of an epoch and at its end, for any number of workers,
  kept or not between epochs. The skipped part is proved by a digest. Samples are not read again.
- Random numbers drawn by the data set: exact with ``num_workers=0`` (the global streams are part
  of the saved state); with workers, exact from the start of an epoch that starts its workers
  anew. Within an epoch, and with ``persistent_workers``, workers start over with fresh seeds;
  within an epoch a resume says so.
- ``IterableDataset``: exact with ``num_workers=0`` and a data set with ``state_dict`` and
  ``load_state_dict``, else not; torchdata's ``StatefulDataLoader`` is the way then.
- A loop that was left by ``break`` before the save is gone on with where it was left, as the
  training that was stopped there would have. Once a program has left a loop and begun another
  one, leaving is how it ends an epoch, and a resume begins the next.
- A position after the last batch of an epoch is the start of the next epoch. Where the sampler
  has no length that cannot be known before the loop asks again: the resumed pass is then empty.

Where exactness cannot be had, ``state()["castore"]["exact"]`` is false and says ``why``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from castore import FormatError, InvalidInputError

FORMAT = 1


@dataclass(frozen=True, slots=True)
class LoaderReport:
    """What a restore did: whether the position is exact, and in words why not, or what to know."""

    name: str
    exact: bool
    why: str = ""


class LoaderWatch(ABC):
    """A watched loader: made by `watch_loader`."""

    def __init__(self, name: str, loader: Any):
        self.name, self.loader = name, loader
        self._on_next: Callable[[], None] | None = None

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Position of what was handed to the training loop, in plain JSON types.

        The documented keys ``samples_yielded`` (of this epoch) and ``batch_size``, and ours under
        ``castore``, among them ``epoch`` and ``batches`` (handed out in it), ``exact`` and
        ``why``. Draws no random number, and reads no sample.
        """

    def restore(self, state: Mapping[str, Any], *, strict: bool = True) -> LoaderReport:
        """The next ``iter(loader)`` goes on where ``state`` was taken.

        Making that iterator draws nothing from the global random streams, as the iterator it
        stands for was made before the state was taken; so the streams may be restored before or
        after, as long as it is before that ``iter(loader)``. A loop under way gets an
        `InvalidInputError` at its next batch.

        Parameters
        ----------
        state : mapping
            As from `state`; one of the public tool, which has no order, is never exact.
        strict : bool
            Whether a position that cannot be had exactly is an error. If not, nothing is changed
            then, and the report says why.

        Raises
        ------
        InvalidInputError
            ``strict`` and not exact: nothing was changed.
        FormatError
            ``state`` is malformed, or of a newer format.
        """
        ours = _ours(self.name, state)
        try:
            with self._named():
                why = self._refusal(state, ours) if ours else _FOREIGN
                if not why:
                    self._apply(ours)
                    return LoaderReport(self.name, True, self._to_know(ours))
        except InvalidInputError as e:
            why = str(e)
        if strict:
            raise self._inexact(why)
        return LoaderReport(self.name, False, why)

    def _to_know(self, ours: Mapping[str, Any]) -> str:
        within = ours["kind"] == "sampler" and ours["pass"] and self.loader.num_workers
        words = [_LEFT if ours.get("left") else "", _SEEDS if within else ""]
        return "; ".join(filter(None, words))

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise what a strict `restore` would, as far as that is known before; changes nothing."""
        ours = _ours(self.name, state)
        with self._named():
            why = self._refusal(state, ours) if ours else _FOREIGN
        if why:
            raise self._inexact(why)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as e:
            if isinstance(e, InvalidInputError):
                raise
            raise FormatError(f"data loader {self.name!r}: malformed position: {e!r}") from e

    def _inexact(self, why: str) -> InvalidInputError:
        return InvalidInputError(
            f"data loader {self.name!r} cannot go on exactly where it was: {why}."
            " With strict=False it begins an epoch anew"
        )

    def on_next_iter(self, call: Callable[[], None] | None) -> None:
        """``call`` once, just before the next iterator over the loader is made.

        For random streams that must stand where they were saved when training goes on, whatever
        the program draws before (a model's initialisation).
        """
        self._on_next = call

    def _arrive(self) -> None:
        call, self._on_next = self._on_next, None
        if call is not None:
            call()

    @abstractmethod
    def _refusal(self, state: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
        """Why the position cannot be had; empty if it can."""

    @abstractmethod
    def _apply(self, ours: Mapping[str, Any]) -> None:
        """Bring the loader there, or raise and change nothing."""


_LEFT = "its loop was left in the middle of an epoch, which is gone on with"

_SEEDS = (
    "samples come in the same order, but random numbers that its workers draw (augmentation) start"
    " over with fresh seeds for the rest of this epoch; num_workers=0 keeps those too"
)

_FOREIGN = (
    "the saved position is another tool's, which counts batches since that loader was made and"
    " keeps no order"
)


def _ours(name: str, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of ``state`` that is ours; empty for another tool's."""
    if not isinstance(state, Mapping) or not isinstance(ours := state.get("castore", {}), Mapping):
        raise FormatError(f"data loader {name!r}: the saved position is not a mapping")
    found = ours.get("format", FORMAT)
    if ours and found != FORMAT:
        raise FormatError(
            f"data loader {name!r}: position of format {found!r}; this version reads {FORMAT}"
        )
    return ours


def watch_loader(name: str, loader: Any) -> LoaderWatch:
    """Follow ``loader``, a torch ``DataLoader`` or torchdata's; the same object stays in use.

    Hold the watch: once it is gone the loader is as it was. A loader that is watched keeps its
    watch, under the new name. The sampler that the loader uses
    is wrapped in place; the wrapper has all attributes of the caller's.

    Raises
    ------
    InvalidInputError
        It is no data loader.
    """
    from torch.utils.data import DataLoader

    from castore_experiments.hook import watch_of
    from castore_experiments.samplers import is_stateful
    from castore_experiments.stateful_watch import StatefulWatch
    from castore_experiments.watches import SamplerWatch

    known: LoaderWatch | None = watch_of(loader)
    if known is not None:
        known.name = name
        return known
    if is_stateful(loader):
        return StatefulWatch(name, loader)
    if isinstance(loader, DataLoader):
        return SamplerWatch(name, loader)
    raise InvalidInputError(
        f"data loader {name!r} is a {type(loader).__qualname__}; a torch DataLoader, or an object"
        " with state_dict and load_state_dict, can be watched"
    )
