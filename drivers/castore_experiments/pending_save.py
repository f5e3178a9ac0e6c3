"""What a caller holds of a save that is under way."""

from __future__ import annotations

from castore_experiments import answers
from castore_experiments.background import Handle
from castore_experiments.catalog import Place
from castore_experiments.saving import Done


class Saving:
    """A save under way, as ``save_model_checkpoint(wait=False)`` gives it."""

    def __init__(self, handle: Handle[Done], folder: Place):
        self._handle, self._folder = handle, folder

    def result(self, timeout: float | None = None) -> Place | None:
        """The documented file's path once it is durable, or None; raises what went wrong.

        Raises
        ------
        TimeoutError
            It is not done after ``timeout`` seconds.
        """
        weights = self._handle.result(timeout).weights
        return None if weights is None else answers.below(self._folder, weights.path)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._handle.done()
