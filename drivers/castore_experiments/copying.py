"""The copy of what is saved, of the model that the hash stands for and of no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from castore import InvalidInputError
from castore_experiments.architecture import Description, describe
from castore_experiments.components import Watched
from castore_experiments.documents import ARCHITECTURE
from castore_experiments.options import Options
from castore_experiments.resume import DAMAGE
from castore_experiments.states import Archive, State

if TYPE_CHECKING:
    from castore_experiments.weights import Buffers, Captured, Shapes


class Copier:
    """Copies the watched state for saves, in memory that is kept between them.

    Weights that could not be loaded under their hash are refused. The architecture is described
    only where the names or shapes of a copy are not those of the last one under the same model.
    """

    def __init__(self) -> None:
        self._buffers: Buffers | None = None
        self._known: tuple[str, Shapes] | None = None

    def copy(
        self,
        watched: Watched,
        model: Any,
        optimizer: bool,
        options: Options,
        state: State,
        architecture: Callable[[], Description | None],
    ) -> Captured | None:
        """The state at this instant; None if there is no model, or it is not to be dumped.

        Parameters
        ----------
        model : object or None
            Instead of the watched one.
        optimizer : bool
            Whether the optimizer's state is asked for.
        state : State
            What the weights are saved under.
        architecture : callable
            Gives that of the model that ``state`` stands for, None where it is not known.

        Raises
        ------
        InvalidInputError
            The model is another than ``state`` stands for, or holds what could not be read back.
        """
        from castore_experiments.weights import Buffers, capture

        model = watched.model if model is None else model
        if model is None or not options.dump_model_state:
            return None
        self._buffers = self._buffers or Buffers()
        captured = capture(
            model,
            watched.optimizer if optimizer and options.dump_optimizer_state else None,
            watched.scheduler,
            buffers=self._buffers,
        )
        found = (state.digests.model, captured.model_shapes())
        if found != self._known:
            try:
                _refuse_other_model(model, state, architecture())
            except BaseException:
                captured.release()
                raise
            self._known = found
        return captured


def architecture_of(
    archive: Archive, hash: str, report: Callable[[str], None]
) -> Description | None:
    """The architecture that was written with a hash; None if there is none, or it is damaged."""
    try:
        data = archive.document(hash, ARCHITECTURE) if hash in archive else None
        return None if data is None else Description.decode(data, f"{ARCHITECTURE} of {hash}")
    except DAMAGE as e:
        report(f"the model is not compared with the one of {hash}: {e}")
        return None


def _refuse_other_model(model: Any, state: State, architecture: Description | None) -> None:
    if architecture is None or not _holds_module(model):
        return
    now, then = _shapes(describe(model)), _shapes(architecture)
    unlike = [
        f"{name}: {then.get(name, 'none')} there, {now.get(name, 'none')} now"
        for name in {**then, **now}
        if then.get(name) != now.get(name)
    ]
    if unlike:
        raise InvalidInputError(
            f"the model is not the one that {state.hash} stands for ({'; '.join(unlike[:5])}), so"
            " that its weights could not be loaded: call update_experiment_hash with it first;"
            " nothing was saved"
        )


def _holds_module(model: Any) -> bool:
    """Whether `describe` takes it; what else has a ``state_dict`` may be saved, too."""
    from torch.nn import Module

    return isinstance(model, Module) or isinstance(getattr(model, "model", None), Module)


def _shapes(architecture: Description) -> dict[str, tuple[int, ...]]:
    return {t.name: t.shape for t in architecture.tensors if t.role != "temporary buffer"}
